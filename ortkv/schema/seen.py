"""Tensors as an error message lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.signature import TensorSpec

_MOST_CHARACTERS = 160


def seen(what: str, specs: Sequence[TensorSpec]) -> str:
    """The first few of some inputs or outputs, and how many more there are."""
    return f"{what}: {few([str(spec) for spec in specs])}"


def few(texts: Sequence[str]) -> str:
    """As many as a message has room for, one at least, and how many more there are."""
    shown: list[str] = []
    for text in texts:
        if shown and len(", ".join(shown)) + len(text) > _MOST_CHARACTERS:
            break
        shown.append(text[:_MOST_CHARACTERS])
    more = f" and {len(texts) - len(shown)} more" if len(shown) < len(texts) else ""
    return (", ".join(shown) or "none") + more
