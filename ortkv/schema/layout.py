"""Which axis of a cache tensor is which: what the graph does with them, then their dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.schema.moves import Part
from ortkv.schema.sizes import Size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.flow import Flow, Stack
    from ortkv.schema.sizes import Sizes
    from ortkv.signature import Dim


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A cache tensor's axis order and its sizes; ``fixed_batch`` and ``capacity`` None if free."""

    axes: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    fixed_batch: int | None
    capacity: int | None


@dataclass(frozen=True, kw_only=True)
class Dims:
    """What is known of a tensor's dims.

    past: as the graph states them.   sizes: as its ops compute them for the present, or the past.
    """

    past: tuple[Dim, ...]
    sizes: Sizes

    def size(self, axis: int) -> Size | None:
        """As stated, where that is a number; else as computed."""
        stated = self.past[axis]
        if isinstance(stated, int):
            return Size.of(stated)
        computed = self.sizes[axis] if axis < len(self.sizes) else None
        return computed or (None if stated is None else Size.of(stated))


def layout(dims: Dims, flow: Flow | None, *, sequence: int | None, batch: Dim) -> Layout | None:
    """The layout; None where an axis stays open.

    sequence: the past's axis that is S, for a tensor of which the graph does not show it.
    batch: the tokens' own batch dim, which tells the batch axis where it is symbolic.

    An axis is S, D, a stack or split because the graph uses it so. Of the rest, the batch is the
    one that has the tokens' batch dim or is symbolic; heads have a fixed size. A tensor with no
    axis for heads has one head, or shares the batch's axis where its size is a multiple of it.
    """
    parts = _parts(dims, flow)
    letters = _known_letters(parts, flow, sequence)
    if list(letters.values()).count("S") != 1:
        return None
    rest = [part for part in parts if part not in letters]
    if "D" not in letters.values() and rest:
        letters[rest.pop()] = "D"
    sizes = {part: _size(dims, part, flow) for part in parts}
    if not _name_batch_and_heads(letters, rest, sizes, batch):
        return None
    return _checked(parts, letters, sizes, flow, batch)


def _parts(dims: Dims, flow: Flow | None) -> list[Part]:
    splits = {split[0].axis: split for split in flow.splits} if flow else {}
    return [p for axis in range(len(dims.past)) for p in splits.get(axis, (Part(axis),))]


def _known_letters(parts: list[Part], flow: Flow | None, sequence: int | None) -> dict[Part, str]:
    letters: dict[Part, str] = {}
    stacks: Sequence[Stack] = flow.stacks if flow else ()
    for stack in stacks:
        if stack.own_axis:
            letters[Part(stack.axis)] = stack.letter
    if not stacks and sequence is not None and len(parts) == len("2BHSD"):
        letters[Part(0)] = "2"
    s = flow.sequence if flow and flow.sequence is not None else None
    letters[s or Part(sequence or 0)] = "S"
    if flow is not None and flow.depth is not None and flow.depth not in letters:
        letters[flow.depth] = "D"
    return {part: letter for part, letter in letters.items() if part in parts}


def _size(dims: Dims, part: Part, flow: Flow | None) -> Size | None:
    """As stated, where that is a number; else as the new tokens have it, or the present."""
    if not part.is_whole:
        return part.sizes[part.index]
    is_open = not isinstance(dims.past[part.axis], int)
    if is_open and flow is not None and part in flow.new_sizes and part != flow.sequence:
        return flow.new_sizes[part]
    return dims.size(part.axis)


def _name_batch_and_heads(
    letters: dict[Part, str], rest: list[Part], sizes: dict[Part, Size | None], batch: Dim
) -> bool:
    own = None if batch is None else Size.of(batch)
    if len(rest) == 1:
        size = sizes[rest[0]]
        letters[rest[0]] = "B" if size is None or size == own or size.number == 1 else "(BH)"
        if size is not None and letters[rest[0]] == "(BH)" and own is not None:
            heads = size.over(own)
            if heads is None and len(size.terms) == 1 and size.number is None:
                letters[rest[0]] = "(BH)" if heads_of(size, own) else "B"
        return True
    if len(rest) != 2:
        return False
    first, last = rest
    fixed = [p for p in rest if (size := sizes[p]) is not None and size.number is not None]
    named = [p for p in rest if own is not None and sizes[p] == own]
    if len(fixed) == 1:
        place = last if fixed[0] == first else first
    elif len(named) == 1:
        place = named[0]
    else:
        place = first
    letters[place] = "B"
    letters[last if place == first else first] = "H"
    return True


def heads_of(size: Size, batch: Size | None) -> int | None:
    """How many heads share an axis with the batch: its size over the batch's."""
    if size.number is not None and (batch is None or batch.number is None):
        return size.number
    quotient = None if batch is None else size.over(batch)
    return None if quotient is None else quotient.number


def _checked(
    parts: list[Part],
    letters: dict[Part, str],
    sizes: dict[Part, Size | None],
    flow: Flow | None,
    batch: Dim,
) -> Layout | None:
    """The layout as a whole, its heads and depths numbers; None where they are not."""
    place = {letter: part for part, letter in letters.items()}
    halves = [stack for stack in (flow.stacks if flow else ()) if not stack.own_axis]
    if any(s.letter != "2" or s.axis != place["D"].axis for s in halves) or "D" not in place:
        return None
    depth = _number(sizes[place["D"]])
    head_dim = depth // (2 if halves else 1) if depth else flow.head_dim if flow else None
    own = None if batch is None else Size.of(batch)
    shared = sizes[place["(BH)"]] if "(BH)" in place else None
    if shared is not None:
        heads = heads_of(shared, own)
    else:
        heads = _number(sizes[place["H"]]) if "H" in place else 1
    if not heads or not head_dim:
        return None
    fixed = _number(sizes[place["B"]]) if "B" in place else None
    if shared is not None and shared.number is not None:
        fixed = shared.number // heads
    layers = [stack.num_parts for stack in (flow.stacks if flow else ()) if stack.letter == "L"]
    if halves:
        letters[place["D"]] = "2D"
    return Layout(
        axes=_spelled(parts, letters),
        num_layers=max(layers, default=1),
        num_kv_heads=heads,
        head_dim=head_dim,
        fixed_batch=fixed,
        capacity=_number(sizes[place["S"]]),
    )


def _number(size: Size | None) -> int | None:
    return None if size is None else size.number


def _spelled(parts: list[Part], letters: dict[Part, str]) -> str:
    """One letter an axis; those that share one in parentheses."""
    spelled = ""
    for axis in sorted({part.axis for part in parts}):
        inside = "".join(letters[part] for part in parts if part.axis == axis).strip("()")
        spelled += inside if len(inside) == 1 else f"({inside})"
    return spelled
