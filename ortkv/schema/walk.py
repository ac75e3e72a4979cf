"""A walk from a past input along the wires, through the ops that keep it a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.schema.cuts import through_move
from ortkv.schema.findings import Findings, Step
from ortkv.schema.fused_ops import fused
from ortkv.schema.joins import SCATTERS, blended, through_concat, through_scatter
from ortkv.schema.moves import whole_axes
from ortkv.schema.products import PRODUCTS
from ortkv.schema.readers import kernel, note_product, through_fused

if TYPE_CHECKING:
    from ortkv.schema.findings import Graph
    from ortkv.schema.wiring import Op


def walk(graph: Graph, past: str, rank: int) -> Findings:
    """What a past of a rank comes upon."""
    start = Step(wire=past, axes=whole_axes(rank), path=(past,))
    return follow(graph, start)


def follow(graph: Graph, start: Step) -> Findings:
    """What a walk from a step on comes upon."""
    findings = Findings()
    front, seen = [start], set[tuple[str, bool, bool]]()
    while front:
        step = front.pop()
        if (step.wire, step.join is None, step.computed) in seen:
            continue
        seen.add((step.wire, step.join is None, step.computed))
        if step.join is not None and step.join not in findings.joins:
            findings.joins.append(step.join)
        if step.wire in graph.outputs and not step.computed:
            findings.arrivals.setdefault(step.wire, step)
        if step.wire in graph.wiring.leaves:
            result = graph.wiring.leaves[step.wire]
            front.append(replace(step, wire=result, path=(*step.path, "If")))
        for op in graph.wiring.consumers(step.wire):
            front.extend(_next(graph, op, step, findings))
    return findings


def _next(graph: Graph, op: Op, step: Step, findings: Findings) -> list[Step]:
    """Where the value on ``step.wire`` goes through ``op``; notes what ``op`` says of it."""
    table = fused(op)
    if table is not None:
        return through_fused(graph, op, table, step, findings)
    if op.kind in PRODUCTS:
        note_product(graph, op, step, findings)
        return []
    if op.kind in ("Conv", "CausalConvWithState"):
        findings.orders.append(op.order)
        findings.kernels.append(kernel(graph, op))
    elif op.kind == "Concat":
        return through_concat(graph, op, step, findings)
    elif op.kind in SCATTERS:
        return through_scatter(graph, op, step, findings) if op.input(0) == step.wire else []
    elif op.kind == "Where" and step.wire in op.inputs[1:] and step.join is None:
        return [blended(graph, op, step, findings)]
    elif op.kind in ("Mul", "Div", "Neg"):
        return [replace(step, wire=op.output(), computed=True, path=(*step.path, op.kind))]
    elif op.kind == "Add" and step.computed:
        return [
            blended(graph, op, step, findings)
            if step.join is None
            else replace(step, wire=op.output())
        ]
    elif op.input(0) == step.wire:
        return through_move(graph, op, step, findings)
    return []
