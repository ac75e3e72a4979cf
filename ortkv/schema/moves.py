"""Ops that move data and compute nothing: which axis of the result is which of the source.

An axis is the tuple of ``Part``s that share it, outermost first; () is an axis that the source
does not have. A source's axis is one part until a Reshape splits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.schema.reordered import squeezed, transposed, unsqueezed
from ortkv.schema.sizes import Size, product

if TYPE_CHECKING:
    from collections.abc import Callable

    from ortkv.schema.sizes import GraphSizes, Sizes
    from ortkv.schema.wiring import Op


@dataclass(frozen=True)
class Part:
    """One of the source's axes, or the ``index``-th of ``sizes`` that it was split into."""

    axis: int
    index: int = 0
    sizes: Sizes = (None,)

    @property
    def is_whole(self) -> bool:
        """Whether it is the axis itself."""
        return len(self.sizes) == 1


Axis = tuple[Part, ...]
Axes = tuple[Axis, ...]

AS_THEY_ARE = frozenset(
    {"Identity", "Cast", "Dropout", "Slice", "Split", "QuantizeLinear", "DequantizeLinear", "Tile"}
)
REARRANGING = frozenset({"Identity", "Cast", "Transpose", "Unsqueeze", "Squeeze", "Reshape"})
"""Ops whose result holds the very numbers of their first input."""


def whole_axes(rank: int) -> Axes:
    """The axes of a source itself."""
    return tuple((Part(axis),) for axis in range(rank))


def moved(sizes: GraphSizes, op: Op, axes: Axes | None) -> Axes | None:
    """The axes after an op of this module's kinds; None where they are not known."""
    if op.kind in AS_THEY_ARE or axes is None:
        return axes
    if op.kind == "Transpose":
        return transposed(op, axes)
    if op.kind == "Unsqueeze":
        return unsqueezed(sizes.wiring, op, axes, ())
    if op.kind == "Squeeze":
        return squeezed(sizes.wiring, op, axes)
    if op.kind == "Expand":
        rank = len(sizes.ints(op.input(1)) or sizes.of(op.output()) or axes)
        return ((),) * (rank - len(axes)) + axes
    if op.kind == "Reshape":
        return _reshaped(axes, sizes.of(op.input(0)), sizes.of(op.output()))
    return None


def axis_at(axes: Axes | None, place: int) -> Axis | None:
    """One of the axes, from the front or the back; None where there is no such axis."""
    if axes is None or not -len(axes) <= place < len(axes):
        return None
    return axes[place]


def only_part(axis: Axis | None) -> Part | None:
    """The part that an axis is, where it is no more than one."""
    return axis[0] if axis is not None and len(axis) == 1 else None


def is_move(op: Op) -> bool:
    """Whether ``moved`` knows the op."""
    return op.kind in AS_THEY_ARE or op.kind in (
        "Transpose", "Unsqueeze", "Squeeze", "Expand", "Reshape",
    )  # fmt: skip


def _reshaped(axes: Axes, before: Sizes | None, after: Sizes | None) -> Axes | None:
    """The axes of a reshape; sizes that only have other symbols are taken for one another."""
    if before is None or after is None or len(before) != len(axes):
        return None
    if len(before) == len(after) and _agree(before, after):
        return axes
    return _matched(axes, before, after, _equal) or _matched(axes, before, after, _may_be_equal)


def _matched(
    axes: Axes, before: Sizes, after: Sizes, same: Callable[[Size | None, Size | None], bool]
) -> Axes | None:
    """Match the dims before and after from both ends; what is left between is one group."""
    most, head, tail = min(len(before), len(after)), 0, 0
    while head < most and same(before[head], after[head]):
        head += 1
    while tail < most - head and same(before[-1 - tail], after[-1 - tail]):
        tail += 1
    old, new = len(before) - head - tail, len(after) - head - tail
    middle = _regrouped(
        axes[head : head + old], before[head : head + old], after[head : head + new]
    )
    if middle is None:
        return None
    return (*axes[:head], *middle, *axes[len(axes) - tail :])


def _regrouped(axes: Axes, before: Sizes, after: Sizes) -> Axes | None:
    """Several axes become one, or one becomes several; or groups of these, matched by product."""
    if len(after) == 1:
        return (tuple(part for axis in axes for part in axis),)
    if len(axes) == 1:
        return _split(axes[0], after)
    for i in range(1, len(before)):
        for j in range(1, len(after)):
            left, right = product(before[:i]), product(after[:j])
            if left is not None and left == right:
                first = _regrouped(axes[:i], before[:i], after[:j])
                rest = _regrouped(axes[i:], before[i:], after[j:])
                return None if first is None or rest is None else (*first, *rest)
    return None


def _split(axis: Axis, after: Sizes) -> Axes | None:
    if not axis:
        return ((),) * len(after)
    ones = [i for i, size in enumerate(after) if size is not None and size.number == 1]
    wide = [size for size in after if size is None or size.number != 1]
    if len(wide) == len(axis):
        parts = iter(axis)
        return tuple(() if i in ones else (next(parts),) for i in range(len(after)))
    whole = next(iter(axis))
    if len(axis) > 1 or not whole.is_whole:
        return None
    return tuple((Part(whole.axis, i, after),) for i in range(len(after)))


def _agree(before: Sizes, after: Sizes) -> bool:
    """Whether a reshape of one rank changes nothing: at most one dim may differ in its name."""
    return sum(not _equal(a, b) for a, b in zip(before, after, strict=True)) <= 1


def _equal(a: Size | None, b: Size | None) -> bool:
    return a is not None and a == b


def _may_be_equal(a: Size | None, b: Size | None) -> bool:
    if a is None or b is None:
        return (a or b or Size.of("")).number is None
    return a == b or (a.number is None and b.number is None)
