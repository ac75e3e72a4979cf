"""Ops that compute with a past: products, attention ops, convolutions. They tell its role."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.schema.apart import new_beside
from ortkv.schema.findings import Join
from ortkv.schema.fused_ops import KEY, KEY_VALUE, VALUE
from ortkv.schema.joins import note_new_sizes
from ortkv.schema.moves import Part, axis_at, only_part
from ortkv.schema.products import use_in_product
from ortkv.schema.sizes import Size

if TYPE_CHECKING:
    from ortkv.schema.findings import Findings, Graph, Step
    from ortkv.schema.fused_ops import FusedOp
    from ortkv.schema.moves import Axis
    from ortkv.schema.products import Use
    from ortkv.schema.spec import Role
    from ortkv.schema.wiring import Op, Wiring


def note_product(graph: Graph, op: Op, step: Step, findings: Findings) -> None:
    """What a product shows of its operand: role, S and D.   Changes: findings."""
    dims = graph.sizes.of(step.wire)
    rank = len(step.axes) if step.axes is not None else len(dims or ())
    use = use_in_product(graph.wiring, op, step.wire, rank)
    if use is None:
        return
    findings.used_as(use.role, step, op)
    sequence = None if use.sequence is None else axis_at(step.axes, use.sequence)
    depth = None if use.depth is None else axis_at(step.axes, use.depth)
    findings.axes_used(sequence, depth)
    if step.join is None:
        _note_apart(graph, op, step, use, findings)


def _note_apart(graph: Graph, op: Op, step: Step, use: Use, findings: Findings) -> None:
    """New tokens that have a product of their own: the past stays as it is."""
    new = new_beside(graph.wiring, op, step.wire, use.role)
    if new is None:
        return
    axis = None if use.sequence is None else axis_at(step.axes, use.sequence)
    join = Join(update="delta", axis=axis, op=op)
    findings.joins.append(join)
    findings.partners.append((new, replace(step, join=join, computed=False)))
    note_new_sizes(graph, step.axes, new, findings)


def through_fused(
    graph: Graph, op: Op, table: FusedOp, step: Step, findings: Findings
) -> list[Step]:
    """What an attention op does with a past, or with the whole that it was joined to.

    Changes: findings.
    """
    index = op.inputs.index(step.wire)
    if index in table.operands and step.join is not None:
        _note_operand(graph, op, table.operands[index], step, findings)
        return []
    if index not in table.pairs:
        return []
    output, role = table.pairs[index]
    findings.used_as(role, step, op)
    if role == KEY_VALUE:
        findings.parts[Part(0)] = {0: {KEY}, 1: {VALUE}}
        findings.dropped.add(Part(0))
    sequence, depth = axis_at(step.axes, -2), axis_at(step.axes, -1)
    findings.axes_used(sequence, depth)
    row_lengths = op.input(table.row_lengths) if table.row_lengths is not None else ""
    findings.row_lengths.add(row_lengths)
    if not op.output(output):
        return []
    join = Join(
        update="in_place" if _shares_buffer(graph, op, table) else "concat",
        axis=sequence,
        op=op,
        head_dim=_head_dim(graph.wiring, op),
        row_lengths=row_lengths,
    )
    path = (*step.path, op.kind)
    return [replace(step, wire=op.output(output), join=join, path=path)]


def _note_operand(graph: Graph, op: Op, role: Role, step: Step, findings: Findings) -> None:
    """The whole key or value of an attention op: [B, H, S, D], or [B, S, H*D]."""
    findings.used_as(role, step, op)
    if step.axes is not None and len(step.axes) == len("BHSD"):
        findings.axes_used(step.axes[2], step.axes[3])
    elif step.axes is not None and len(step.axes) == len("BSD"):
        findings.axes_used(step.axes[1], _depth_in(graph, op, step))


def _depth_in(graph: Graph, op: Op, step: Step) -> Axis:
    """The part of the last axis, of heads and depths, that is a head's depth by the op's count."""
    last = step.axes[-1] if step.axes else ()
    heads, axis = op.int_attribute("kv_num_heads", 0), only_part(last)
    size = next(iter((graph.sizes.of(step.wire) or ())[-1:]), None)
    width = None if size is None else size.number
    if axis is None or not axis.is_whole or heads < 2 or not width or width % heads:
        return last
    return (Part(axis.axis, 1, (Size.of(heads), Size.of(width // heads))),)


def _head_dim(wiring: Wiring, op: Op) -> int | None:
    """The query's width over the heads in it; without a key input it holds all three."""
    width, num_heads = wiring.width(op.input(0)), op.int_attribute("num_heads", 0)
    if op.kind not in ("GroupQueryAttention", "MultiHeadAttention") or not width or not num_heads:
        return None
    packed = not op.input(1)
    num_kv_heads = op.int_attribute("kv_num_heads", num_heads)
    return width // (num_heads + 2 * num_kv_heads * packed)


def _shares_buffer(graph: Graph, op: Op, table: FusedOp) -> bool:
    """True where the op learns the past's length from elsewhere than the past's own shape."""
    if table.share_flag:
        return op.int_attribute(table.share_flag, 0) == 1
    if any(out in graph.wiring.leaves for out in op.outputs):
        return False  # the other branch starts a cache as long as its tokens
    lengths = [op.input(i) for i in table.lengths if op.input(i)]
    return bool(lengths) and not graph.measured and graph.of_pasts.isdisjoint(lengths)


def kernel(graph: Graph, op: Op) -> int:
    """The tokens that a causal convolution looks at, from its weights' last dim."""
    dims = graph.sizes.of(op.input(1)) or ()
    last = next(iter(dims[-1:]), None)
    return (last.number or 1) if last is not None else 1
