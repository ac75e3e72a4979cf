"""Ops that move a past, or what it was joined to, and those that take a part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.schema.moves import axis_at, is_move, moved, only_part
from ortkv.schema.reordered import without

if TYPE_CHECKING:
    from ortkv.schema.findings import Findings, Graph, Step
    from ortkv.schema.moves import Axes
    from ortkv.schema.wiring import Op


def through_move(graph: Graph, op: Op, step: Step, findings: Findings) -> list[Step]:
    """The steps behind an op that hands its first input on, or a part of it. Changes: findings."""
    step = replace(step, path=(*step.path, op.kind))
    if op.kind == "Split":
        return _split(op, step)
    if op.kind == "Slice":
        step = _sliced(graph, op, step)
    elif op.kind == "Gather":
        step = _gathered(graph, op, step, findings)
    elif not is_move(op):
        return []
    else:
        if op.kind == "Transpose" and step.join is None:
            findings.transposes.append(op)
        if op.kind == "Squeeze" and step.axes is not None:
            _note_dropped(step.axes, moved(graph.sizes, op, step.axes), findings)
        step = replace(step, axes=moved(graph.sizes, op, step.axes))
    return [replace(step, wire=out) for out in op.outputs if out]


def _note_dropped(before: Axes, after: Axes | None, findings: Findings) -> None:
    left = {part for axis in after or () for part in axis}
    findings.dropped.update(part for axis in before for part in axis if part not in left)


def _split(op: Op, step: Step) -> list[Step]:
    """A part on each output."""
    cut = axis_at(step.axes, op.int_attribute("axis", 0))
    axis = only_part(cut)
    return [
        replace(step, wire=out, picks=step.picks if axis is None else (*step.picks, (axis, part)))
        for part, out in enumerate(op.outputs)
    ]


def _sliced(graph: Graph, op: Op, step: Step) -> Step:
    """A part of one axis, told by where it starts; along the sequence, what is kept of it."""
    starts, axes = graph.sizes.ints(op.input(1)), graph.wiring.ints(op.input(3))
    cut = axis_at(step.axes, axes[0]) if axes is not None and len(axes) == 1 else None
    axis = only_part(cut)
    if axis is None:
        return step
    start = None if not starts or starts[0] is None else starts[0].number
    if step.join is None or step.join.axis is None or cut != step.join.axis:
        return step if start is None else replace(step, picks=(*step.picks, (axis, start)))
    return _cut(graph, op, step, start)


def _cut(graph: Graph, op: Op, step: Step, start: int | None) -> Step:
    """After the join, along the sequence: the newest tokens alone (delta), or the last so many."""
    join = step.join
    if join is None or start == 0:
        return step
    if start is not None and start < 0:
        return replace(step, window=-start, join=replace(join, update="window"))
    starts, dims = graph.sizes.ints(op.input(1)), graph.sizes.of(step.path[0])
    axis = only_part(join.axis)
    past_len = None if axis is None or dims is None else dims[axis.axis]
    if past_len is not None and starts and starts[0] == past_len:
        return replace(step, join=replace(join, update="delta"))
    if start is not None and join.update == "concat":
        return replace(step, query_len=start, join=replace(join, update="window"))
    if step.placed:
        return replace(step, join=replace(join, update="window"))
    return replace(step, fault="cuts the joined tokens in a way that ortkv does not understand")


def _gathered(graph: Graph, op: Op, step: Step, findings: Findings) -> Step:
    """One part of an axis, by a constant index; or rows in another order, by a computed one."""
    axis, index = op.int_attribute("axis", 0), graph.wiring.ints(op.input(1))
    if step.axes is None:
        return step
    dims, axes = graph.sizes.of(op.input(1)), step.axes
    if index is None or len(index) != 1:
        return step if dims is not None and len(dims) == 1 else replace(step, axes=None)
    picked = axis_at(axes, axis)
    place = only_part(picked)
    if place is not None:
        step = replace(step, picks=(*step.picks, (place, index[0])))
    if not graph.wiring.is_scalar(op.input(1)):
        return step
    if place is not None:
        findings.dropped.add(place)
    return replace(step, axes=without(axes, [axis]))
