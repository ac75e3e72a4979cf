"""Evidence from dims: which axis of a cache tensor is which."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.signature import TensorSpec

_GROWING = re.compile(r"past|seq|len|cache|kv", re.IGNORECASE)
_PAST_PLUS_ONE = re.compile(r"\w+ ?\+ ?1")


def sequence_axis(past: TensorSpec, present: TensorSpec) -> int | None:
    """The one axis that grows, judged by dims alone: the one that differs, else one named so."""
    if past.dims is None or present.dims is None or len(past.dims) != len(present.dims):
        return None
    pairs = list(zip(past.dims, present.dims, strict=True))
    free = [i for i, (old, _) in enumerate(pairs) if not isinstance(old, int)]
    differing = [i for i in free if pairs[i][0] != pairs[i][1]]
    named = [i for i in free if _GROWING.search(str(pairs[i][0]))]
    found = differing or named
    return found[0] if len(found) == 1 else None


def grows_by_one(present: TensorSpec) -> bool:
    """True where the dims promise ``past + 1``: the graph was traced with one new token.

    Optimum's merged decoders of 2023 are; their causal mask is wrong for several (measured).
    """
    dims = present.dims or ()
    return any(isinstance(dim, str) and _PAST_PLUS_ONE.fullmatch(dim) for dim in dims)
