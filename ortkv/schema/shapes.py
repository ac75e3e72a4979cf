"""Evidence from dims: which axis of a cache tensor is which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.topology import Stack
    from ortkv.signature import Dim, TensorSpec

_GROWING = re.compile(r"past|seq|len|cache|kv", re.IGNORECASE)
_PAST_PLUS_ONE = re.compile(r"\w+ ?\+ ?1")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A cache tensor's axis order and its two fixed sizes."""

    layout: str
    num_layers: int
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
    stacks: Sequence[Stack],
    batch: Dim,
    head_dim: int | None,
) -> Axes | None:
    """The layout, given the sequence axis; None where the rest stays open.

    ``stacks``: how the graph takes the past apart.   ``batch``: the tokens' own batch dim,
    which tells the batch axis where it is symbolic.   ``head_dim``: what the graph's ops say
    of it, for a tensor that does not. Heads come before head_dim in every known layout; a
    tensor with no axis for them has one head.
    """
    dims = _stated(past, present)
    if dims is None:
        return None
    own = {stack.axis: stack.letter for stack in stacks if stack.own_axis}
    if not stacks and len(dims) == len("2BHSD") and dims[0] == 2:
        own = {0: "2"}
    letters = {**own, sequence: "S"}
    free = [i for i in range(len(dims)) if i not in letters]
    named = [i for i in free if isinstance(batch, str) and dims[i] == batch]
    rest = [i for i in free if i != (named or free)[0]]
    if len(rest) not in (1, 2) or (len(rest) == 1 and not named):
        return None
    heads, depth = dims[rest[0]] if len(rest) == 2 else 1, dims[rest[-1]]
    shared = [stack for stack in stacks if not stack.own_axis]
    if any(stack.axis != rest[-1] or stack.letter != "2" for stack in shared):
        return None
    size = depth // (2 if shared else 1) if isinstance(depth, int) else head_dim
    if not isinstance(heads, int) or not isinstance(size, int):
        return None
    letters |= {(named or free)[0]: "B", rest[0]: "H", rest[-1]: "(2D)" if shared else "D"}
    num_layers = [stack.num_parts for stack in stacks if stack.letter == "L"]
    return Axes(
        layout="".join(letters[i] for i in range(len(dims))),
        num_layers=max(num_layers, default=1),
        num_kv_heads=heads,
        head_dim=size,
    )


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
