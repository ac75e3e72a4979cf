"""Evidence from dims: which axis of a cache tensor is which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.signature import Dim, TensorSpec

_GROWING = re.compile(r"past|seq|len|cache|kv", re.IGNORECASE)
_PAST_PLUS_ONE = re.compile(r"\w+ ?\+ ?1")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A cache tensor's axis order and its two fixed sizes."""

    layout: str
    num_kv_heads: int
    head_dim: int


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


def axes(
    past: TensorSpec,
    present: TensorSpec,
    *,
    sequence: int,
    stack: int | None,
    batch: Dim,
    head_dim: int | None,
) -> Axes | None:
    """The layout, given the sequence axis; None where heads or head_dim are not stated.

    ``batch``: the tokens' own batch dim, which tells the batch axis where it is symbolic.
    ``head_dim``: what the graph's ops say of it, for a tensor that does not.
    Heads come before head_dim in every known layout.
    """
    dims = _stated(past, present)
    if dims is None or len(dims) not in (len("BHSD"), len("2BHSD")):
        return None
    letters = {sequence: "S"}
    if len(dims) == len("2BHSD"):
        letters[0 if stack is None else stack] = "2"
    free = [i for i in range(len(dims)) if i not in letters]
    named = [i for i in free if isinstance(batch, str) and dims[i] == batch]
    letters[named[0] if named else free[0]] = "B"
    heads, depth = (i for i in free if i not in letters)
    letters |= {heads: "H", depth: "D"}
    num_kv_heads, size = dims[heads], dims[depth]
    if not isinstance(size, int):
        size = head_dim
    if not isinstance(num_kv_heads, int) or not isinstance(size, int):
        return None
    layout = "".join(letters[i] for i in range(len(dims)))
    return Axes(layout=layout, num_kv_heads=num_kv_heads, head_dim=size)


def _stated(past: TensorSpec, present: TensorSpec) -> tuple[Dim, ...] | None:
    """Past's dims, a size taken from present's where past's is only a symbol."""
    if past.dims is None:
        return present.dims
    if present.dims is None or len(present.dims) != len(past.dims):
        return past.dims
    pairs = zip(past.dims, present.dims, strict=True)
    return tuple(
        new if isinstance(new, int) and not isinstance(old, int) else old for old, new in pairs
    )
