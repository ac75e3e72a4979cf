"""Text as it is generated: whole characters only, and never past a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_CONTEXT_TOKENS = 16
"""Tokens before a stream that decide whether its first piece starts with a space."""
_REPLACEMENT = "\ufffd"
"""What a decoder gives for bytes that are no character, or not yet one."""
_UTF8_BYTES = 4


class TextStream:
    """Tokens in, text out, in whole characters and never past a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], stop_strings: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False
        before = list(before)
        start, whole = _context(tokenizer, before)
        # The window's first tokens, ``_num_whole`` of them, read ``_whole``; all of ``before``
        # in it reads ``_seen``, which differs where ``before`` ends within a character.
        self._window = list(before[start:])
        self._num_whole = whole - start
        self._whole = tokenizer.decode(self._window[: self._num_whole])
        self._seen = tokenizer.decode(self._window)

    def push(self, token: int) -> str:
        """The text this token completes; '' while a character or a stop string may be open."""
        self._held += self._completed_by(token)
        ends = [at for at in map(self._held.find, self._stop_strings) if at >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop_strings), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def _completed_by(self, token: int) -> str:
        """The text that is new and whole with this token; the window then slides up to it."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        if text.startswith(self._whole):
            new = text[max(len(self._whole), _num_shared(text, self._seen)) :]
        elif text.startswith(self._seen):
            new = text[len(self._seen) :]
        else:  # byte fallback reads a run of bytes otherwise once one of them is broken
            new = self._tokenizer.decode(self._window[self._num_whole :])
        if new:
            self._window = self._window[self._num_whole :]
            self._num_whole = len(self._window)
            self._whole = self._seen = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        shown, self._held = self._held, ""
        return shown


def _context(tokenizer: Tokenizer, before: Sequence[int]) -> tuple[int, int]:
    """The last tokens of ``before`` that read as whole characters, as a range.

    Where every range has a broken end, a broken start does no harm.
    """
    last = len(before)
    ranges = [
        (max(0, last - _CONTEXT_TOKENS - extra), last - back)
        for back in range(min(_CONTEXT_TOKENS, last) + 1)
        for extra in range(_UTF8_BYTES)
    ]
    texts = ((span, tokenizer.decode(before[slice(*span)])) for span in ranges)
    ending: tuple[int, int] | None = None
    for span, text in texts:
        if not text.endswith(_REPLACEMENT):
            if not text.startswith(_REPLACEMENT):
                return span
            ending = ending or span
    return ending or ranges[0]


def _num_shared(one: str, other: str) -> int:
    """How many characters both start with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the start of ``stop``."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
