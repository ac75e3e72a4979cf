"""A model's tokenizer: text to token ids and back, conversations included."""

from __future__ import annotations

import re
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Encoding, Tokenizer

from ortkv.errors import ConfigError, InvalidRequest, TemplateError, TokenizerMissing
from ortkv.text.stream import TextStream
from ortkv.text.template import render_chat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.folder import ModelFolder

_SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "sentencepiece.bpe.model",
)


class Text:
    """A model's tokenizer and chat template. For several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        specials: dict[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoding_lock = threading.Lock()
        self._template = template
        self._specials = specials or {}

    @property
    def num_tokens(self) -> int:
        """One more than the highest id the tokenizer gives."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Token ids of text. ``first``: at a sequence's start, with BOS where the model wants one.

        Special tokens written out in the text are taken as such; ``encode_chat`` is for text
        from others.   Raises: InvalidRequest where the text is not valid Unicode.
        """
        return self._encoding(text, first=first).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self, before: Sequence[int], stop_strings: Sequence[str] = ()) -> TextStream:
        """A stream of what follows the tokens ``before``."""
        return TextStream(self._tokenizer, before, stop_strings)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation, through the model's chat template, up to the reply.

        A message's content is text: a special token written out in it does not become one.

        Raises: TemplateError where there is no template or it refuses the messages;
        InvalidRequest where a content is not valid text.
        """
        if not all(isinstance(m.get("content"), str) for m in messages):
            raise InvalidRequest("a message has no content: expected a str in every message.")
        specials = self._specials_added()
        spelled = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        contents = "".join(m["content"] for m in messages)
        if not spelled.search(contents):
            return self._encoding(self._render(messages)).ids
        mark = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in contents)
        masked = [
            {**m, "content": spelled.sub(lambda f: f"{mark}{specials[f[0]]}{mark}", m["content"])}
            for m in messages
        ]
        rendered = self._render(masked)
        names = {f"{mark}{i}{mark}": name for name, i in specials.items()}
        return self._ids_of_masked(rendered, names)

    def _specials_added(self) -> dict[str, int]:
        """Special tokens and their ids, one that starts with another before it."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return dict(sorted(((t.content, i) for i, t in added if t.special), reverse=True))

    def _ids_of_masked(self, rendered: str, names: dict[str, str]) -> list[int]:
        """Special tokens still in the text are the template's; ``names`` unmasks the others."""
        encoding = self._encoding(rendered)
        spelling = {i: name for name, i in self._specials_added().items()}
        ids, done = list[int](), 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # An unknown character has a special token too, which the text does not spell.
            if token in spelling and spelling[token] in rendered[start:end]:
                ids += [*self._as_plain_text(rendered[done:start], names), token]
                done = end
        return ids + self._as_plain_text(rendered[done:], names)

    def _encoding(
        self, text: str, *, first: bool = False, specials_are_text: bool = False
    ) -> Encoding:
        """Ids with their places in the text; ``specials_are_text``: special tokens get no id."""
        # Whether they do is a state of the tokenizer: one text at a time.
        with self._encoding_lock:
            self._tokenizer.encode_special_tokens = specials_are_text
            try:
                return self._tokenizer.encode(text, add_special_tokens=first)
            except (UnicodeEncodeError, TypeError) as error:
                raise InvalidRequest(
                    f"the prompt is not valid text ({error}): expected a str without lone "
                    "surrogates. Decode it from its bytes as UTF-8."
                ) from error
            finally:
                self._tokenizer.encode_special_tokens = False

    def _as_plain_text(self, text: str, names: dict[str, str]) -> list[int]:
        for mask, name in names.items():
            text = text.replace(mask, name)
        return self._encoding(text, specials_are_text=True).ids

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        if self._template is None:
            raise TemplateError(
                "the model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): use generate with a whole prompt instead."
            )
        return render_chat(self._template, messages, self._specials)


def load_text(folder: ModelFolder) -> Text:
    """The folder's tokenizer and template.

    Raises: TokenizerMissing where there is none that can be read.
    """
    config = folder.json("tokenizer_config.json")
    file = folder.find("tokenizer.json")
    if file is None:
        tokenizer = _converted(folder)
    else:
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerMissing(
                f"{file} cannot be read ({error}): copy it again from the original model."
            ) from error
    return Text(tokenizer, template=_template(folder, config), specials=_specials(config))


def _specials(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens a template may name; each is a string or a tokenizers' AddedToken."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value: Any = config.get(name)
        if value is not None:
            is_object = isinstance(value, dict)
            content: Any = cast("dict[str, Any]", value).get("content") if is_object else value
            if not isinstance(content, str):
                raise ConfigError(
                    f"tokenizer_config.json: {name} is {value!r}: expected a string, or an object "
                    "with its content."
                )
            found[name] = content
    return found


def _converted(folder: ModelFolder) -> Tokenizer:
    """A slow tokenizer's fast twin, made by transformers."""
    if not any(folder.find(name) for name in _SLOW_FILES):
        raise TokenizerMissing(
            f"{folder.root} has no tokenizer.json: copy the original model's tokenizer files "
            "there, or work with token ids (start, generate_ids)."
        )
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise TokenizerMissing(
            f"{folder.root} has only a slow tokenizer, which transformers must convert: "
            "pip install transformers sentencepiece, or copy a tokenizer.json there."
        ) from error
    try:
        fast: Tokenizer = transformers.AutoTokenizer.from_pretrained(folder.root).backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError) as error:
        raise TokenizerMissing(
            f"{folder.root}: transformers cannot convert its slow tokenizer ({error}): "
            "copy a tokenizer.json there."
        ) from error
    return fast


def _template(folder: ModelFolder, config: dict[str, Any]) -> str | None:
    file = folder.find("chat_template.jinja")
    if file is not None:
        return file.read_text(encoding="utf-8", errors="replace")
    found: Any = config.get("chat_template")
    if isinstance(found, str | None):
        return found
    try:
        named: dict[str, str] = {entry["name"]: entry["template"] for entry in found}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "tokenizer_config.json: chat_template is neither a string nor a list of objects with "
            "a name and a template each."
        ) from error
    return named.get("default")
