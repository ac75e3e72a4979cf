"""Ops that put past and new tokens together, and what that shows: update rule, axis, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.schema.findings import Join
from ortkv.schema.moves import axis_at, is_move, only_part

if TYPE_CHECKING:
    from ortkv.schema.findings import Findings, Graph, Step
    from ortkv.schema.moves import Axes
    from ortkv.schema.spec import Update
    from ortkv.schema.wiring import Op, Wiring

SCATTERS = frozenset({"ScatterND", "ScatterElements", "TensorScatter", "Scatter"})


def through_concat(graph: Graph, op: Op, step: Step, findings: Findings) -> list[Step]:
    """The first concatenation joins past and new; a later one stacks what was split before.

    Changes: findings.
    """
    after = replace(step, wire=op.output(), path=(*step.path, "Concat"))
    if step.join is not None or _of_one_source(graph, op, step):
        return [after]
    axis = axis_at(step.axes, op.int_attribute("axis", 0))
    fault = "" if op.input(0) == step.wire else "puts the new tokens before the past"
    dropped = [start for part, start in step.picks if axis == (part,) and start > 0]
    update: Update = "window" if dropped else "concat"
    after = replace(
        after,
        join=Join(update=update, axis=axis, op=op, fault=fault),
        picks=tuple(pick for pick in step.picks if axis != (pick[0],)),
        query_len=dropped[0] if dropped else None,
    )
    partners = [name for name in op.inputs if name != step.wire]
    findings.partners.extend((name, after) for name in partners)
    for partner in partners[:1]:
        note_new_sizes(graph, step.axes, partner, findings)
    return [after]


def _of_one_source(graph: Graph, op: Op, step: Step) -> bool:
    """Whether all that is concatenated comes from one tensor, as when halves are swapped."""
    origins = {_origin(graph.wiring, name) for name in op.inputs}
    return len(origins) == 1 and len(op.inputs) > 1 and _origin(graph.wiring, step.wire) in origins


def _origin(wiring: Wiring, wire: str) -> str:
    """The wire that a value was moved or scaled from."""
    while (op := wiring.makers.get(wire)) is not None and (is_move(op) or op.kind == "Neg"):
        wire = op.input(0)
    return wire


def through_scatter(graph: Graph, op: Op, step: Step, findings: Findings) -> list[Step]:
    """New tokens written into the past at given places.   Changes: findings."""
    place = {"ScatterND": 0, "TensorScatter": op.int_attribute("axis", -2)}.get(
        op.kind, op.int_attribute("axis", 0)
    )
    axis = axis_at(step.axes, place)
    lengths = op.input(2) if op.kind == "TensorScatter" else ""
    if op.kind == "TensorScatter":
        findings.row_lengths.add(lengths)
    join = Join(update="scatter", axis=axis, op=op, row_lengths=lengths)
    note_new_sizes(graph, step.axes, op.input(1 if op.kind == "TensorScatter" else 2), findings)
    after = replace(step, wire=op.output(), join=step.join or join, path=(*step.path, op.kind))
    return [replace(after, placed=step.join is not None)]


def blended(graph: Graph, op: Op, step: Step, findings: Findings) -> Step:
    """New tokens take the past's place by a mask; the axis is for the product to tell.

    Changes: findings.
    """
    join = Join(update="scatter", axis=None, op=op)
    after = replace(step, wire=op.output(), join=join, computed=False, path=(*step.path, op.kind))
    new = next((name for name in op.inputs if name != step.wire), "")
    note_new_sizes(graph, step.axes, new, findings)
    return after


def note_new_sizes(graph: Graph, axes: Axes | None, new: str, findings: Findings) -> None:
    """The dims of what the past is joined with: the graph computes them, heads and all.

    Changes: findings.
    """
    dims = graph.sizes.of(new)
    if axes is None or dims is None or len(dims) != len(axes):
        return
    for axis, size in zip(axes, dims, strict=True):
        part = only_part(axis)
        if part is not None and size is not None:
            findings.new_sizes.setdefault(part, size)
