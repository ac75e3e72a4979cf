"""Tensors as an error message lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.signature import TensorSpec

_MOST = 8


def seen(what: str, specs: Sequence[TensorSpec]) -> str:
    """The first few of some inputs or outputs, and how many more there are."""
    shown = ", ".join(str(spec) for spec in specs[:_MOST]) or "none"
    more = f" and {len(specs) - _MOST} more" if len(specs) > _MOST else ""
    return f"{what}: {shown}{more}"
