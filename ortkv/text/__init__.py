"""Text to token ids and back: tokenizer, chat template, streaming in whole characters."""

from ortkv.text.stream import TextStream
from ortkv.text.tokenizer import Text, load_text

__all__ = ["Text", "TextStream", "load_text"]
