"""Evidence from the graph itself: which past input reaches which present output, and how.

Each input is walked forward through ops that only move data. The op that joins it with the
new tokens gives the update rule and the sequence axis; the product it then enters, before
or after the softmax, tells key from value; the graph outputs it reaches are its presents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ortkv.schema.apart import new_beside
from ortkv.schema.fused_ops import KEY, KEY_VALUE, VALUE, fused
from ortkv.schema.moves import (
    REARRANGING,
    Part,
    axis_at,
    is_move,
    moved,
    whole_axes,
    without,
)
from ortkv.schema.products import PRODUCTS, use_in_product
from ortkv.schema.sizes import Size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ortkv.schema.fused_ops import FusedOp
    from ortkv.schema.moves import Axes, Axis
    from ortkv.schema.products import Use
    from ortkv.schema.sizes import GraphSizes
    from ortkv.schema.spec import Role, RowAlignment, Update
    from ortkv.schema.wiring import Op, Wiring


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An axis of the past along which the graph takes it apart.

    letter: '2' where the parts are key and value, 'L' where they are layers.
    own_axis: False where the parts lie side by side on an axis that also has another meaning.
    """

    axis: int
    letter: str
    num_parts: int
    own_axis: bool


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How one past input goes through the graph. Axes are those of the past input.

    present: the output it becomes, None where there is none.
    update: None where it is only read.
    sequence, depth: the axes that the graph shows to be S and D.   splits: axes taken apart.
    new_sizes: the dims of the new tokens, by the past's axes.
    window: the most tokens that a present keeps, where it drops older ones and says how many.
    query_len: the one number of new tokens a run may have, where what is dropped fixes it.
    alignment: at which end of a window of fixed size its tokens are.
    fault: what keeps the present from being the past with the new tokens after it; '' if nothing.
    row_lengths: wires with each row's own length, for ops that take one; '' for one that does not.
    kernel: the tokens that a convolution it enters spans; None where it enters none.
    transposed: whether its axes are put in another order before the join.
    path: the ops it goes through to its present.   join: the op that adds the new tokens.
    readers: the ops that told a role.
    """

    past: str
    present: str | None
    update: Update | None
    sequence: Part | None
    depth: Part | None
    splits: tuple[tuple[Part, ...], ...]
    new_sizes: dict[Part, Size]
    stacks: tuple[Stack, ...]
    role: Role | None
    head_dim: int | None
    order: int
    window: int | None
    query_len: int | None
    alignment: RowAlignment
    fault: str
    row_lengths: frozenset[str]
    kernel: int | None
    transposed: bool
    path: tuple[str, ...]
    join: Op | None
    readers: tuple[tuple[Role, Op], ...]


@dataclass(frozen=True, kw_only=True)
class _Join:
    """Where past meets new."""

    update: Update
    axis: Axis | None
    op: Op
    head_dim: int | None = None
    row_lengths: str = ""
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A walk's front: the wire reached and what is known of it."""

    wire: str
    axes: Axes | None
    path: tuple[str, ...]
    join: _Join | None = None
    picks: tuple[tuple[Part, int], ...] = ()
    """(past's axis, part taken) for every time one part of the past was taken."""
    window: int | None = None
    query_len: int | None = None
    fault: str = ""
    placed: bool = False
    """Whether the new tokens were written at a place of their own after they were joined."""
    computed: bool = False
    """Whether arithmetic has been done on it: still good to tell a role, no present any more."""


@dataclass(frozen=True)
class _Findings:
    """What one input's walk came upon."""

    arrivals: dict[str, _Step] = field(default_factory=dict[str, _Step])
    roles: set[Role] = field(default_factory=set["Role"])
    orders: list[int] = field(default_factory=list[int])
    readers: list[tuple[Role, Op]] = field(default_factory=list["tuple[Role, Op]"])
    sequences: list[Axis] = field(default_factory=list["Axis"])
    depths: list[Axis] = field(default_factory=list["Axis"])
    parts: dict[Part, dict[int, set[Role]]] = field(
        default_factory=dict[Part, "dict[int, set[Role]]"]
    )
    """past's axis -> part taken -> what that part is used as."""
    dropped: set[Part] = field(default_factory=set[Part])
    """Axes of the past that are gone once a part is taken."""
    partners: list[tuple[str, _Step]] = field(default_factory=list["tuple[str, _Step]"])
    """What the past was joined with, and the step after the join."""
    new_sizes: dict[Part, Size] = field(default_factory=dict[Part, "Size"])
    joins: list[_Join] = field(default_factory=list["_Join"])
    row_lengths: set[str] = field(default_factory=set[str])
    kernels: list[int] = field(default_factory=list[int])
    transposes: list[Op] = field(default_factory=list["Op"])

    def used_as(self, role: Role, step: _Step, op: Op) -> None:
        self.roles.add(role)
        self.orders.append(op.order)
        self.readers.append((role, op))
        for axis, part in step.picks:
            self.parts.setdefault(axis, {}).setdefault(part, set()).add(role)


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """What every walk of one graph shares."""

    wiring: Wiring
    sizes: GraphSizes
    pasts: frozenset[str]
    outputs: frozenset[str]

    @cached_property
    def measured(self) -> bool:
        """Whether the graph takes a past's shape, for positions say: it would see the capacity."""
        takers = (op for past in self.pasts for op in self.wiring.consumers(past))
        return any(op.kind == "Shape" for op in takers)

    @cached_property
    def of_pasts(self) -> set[str]:
        """The pasts, and every wire that is computed from one."""
        found = set(self.pasts)
        for op in self.wiring.ops:
            if not found.isdisjoint(op.inputs):
                found.update(out for out in op.outputs if out)
        return found


LEAST_CACHE_RANK = 3
SCATTERS = {"ScatterND", "ScatterElements", "TensorScatter", "Scatter"}


def flows(
    wiring: Wiring, sizes: GraphSizes, inputs: dict[str, int], outputs: Iterable[str]
) -> dict[str, Flow]:
    """The flow of each input that is joined with new tokens or read by an attention.

    inputs: the rank of each input that may be a cache.
    """
    pasts = frozenset(name for name, rank in inputs.items() if rank >= LEAST_CACHE_RANK)
    graph = _Graph(wiring=wiring, sizes=sizes, pasts=pasts, outputs=frozenset(outputs))
    found = (_flow(graph, name, inputs[name]) for name in inputs if name in pasts)
    return {flow.past: flow for flow in found if flow is not None}


def _flow(graph: _Graph, past: str, rank: int) -> Flow | None:
    findings = _walk(graph, past, rank)
    joined = {name: s for name, s in findings.arrivals.items() if s.join is not None}
    arrivals = joined or _arrivals_of_new(graph, findings)
    if not arrivals and not findings.roles and not findings.kernels:
        return None
    present = min(arrivals, key=lambda name: (len(arrivals[name].path), name), default=None)
    arrival = None if present is None else arrivals[present]
    join = next(iter(findings.joins), None) if arrival is None else arrival.join
    at_join = None if join is None or join.axis is None else _one(join.axis)
    sequence = at_join or _most_agreed(findings.sequences)
    return Flow(
        past=past,
        present=present or next(iter(findings.arrivals), None),
        update=None if join is None else join.update,
        sequence=sequence,
        depth=_most_agreed(findings.depths),
        splits=_splits(findings),
        new_sizes=findings.new_sizes,
        stacks=_stacks(findings, sequence),
        role=_one_role(findings.roles),
        head_dim=None if join is None else join.head_dim,
        order=min(findings.orders, default=0),
        window=None if arrival is None else arrival.window,
        query_len=None if arrival is None else arrival.query_len,
        alignment="start" if arrival is not None and arrival.placed else "end",
        fault=_fault(arrival),
        row_lengths=frozenset(findings.row_lengths),
        kernel=None if findings.roles else max(findings.kernels, default=None),
        transposed=bool(findings.transposes),
        path=(past,) if arrival is None else arrival.path,
        join=None if join is None else join.op,
        readers=tuple(findings.readers),
    )


def _fault(arrival: _Step | None) -> str:
    if arrival is None or arrival.join is None:
        return ""
    if arrival.join.fault or arrival.fault:
        return arrival.join.fault or arrival.fault
    own = [axis[0].axis for axis in arrival.axes or () if len(axis) == 1 and axis[0].is_whole]
    return "gives the present out in another order of axes" if own != sorted(own) else ""


def _one(axis: Axis) -> Part | None:
    return axis[0] if len(axis) == 1 else None


def _most_agreed(axes: list[Axis]) -> Part | None:
    parts = [part for axis in axes if (part := _one(axis)) is not None]
    return max(parts, key=parts.count, default=None)


def _splits(findings: _Findings) -> tuple[tuple[Part, ...], ...]:
    """Axes of which a part turned out to be S or D."""
    named = [*findings.sequences, *findings.depths]
    parts = {part for axis in named for part in axis if not part.is_whole}
    wholes = {(part.axis, part.sizes) for part in parts}
    return tuple(
        tuple(Part(axis, i, sizes) for i in range(len(sizes)))
        for axis, sizes in sorted(wholes, key=lambda whole: whole[0])
    )


def _arrivals_of_new(graph: _Graph, findings: _Findings) -> dict[str, _Step]:
    """Where the past reaches no output: the outputs that what it was joined with is (delta)."""
    arrivals: dict[str, _Step] = {}
    for partner, step in findings.partners:
        if step.join is None:
            continue
        join = replace(step.join, update="delta")
        for wire, axes in _sources(graph, partner, step.axes):
            start = replace(step, wire=wire, axes=axes, join=join)
            arrivals |= _follow(graph, start, _Findings()).arrivals
    return arrivals


_UNDONE = REARRANGING | {"Expand", "Tile"}
"""Ops before which new tokens may be given out: they are put in order, or shared by more heads."""


def _sources(graph: _Graph, wire: str, axes: Axes | None) -> Iterator[tuple[str, Axes | None]]:
    """A wire and those it was only rearranged from, each with its axes."""
    yield wire, axes
    while (maker := graph.wiring.makers.get(wire)) is not None and maker.kind in _UNDONE:
        perm = maker.attribute("perm")
        if maker.kind == "Transpose" and axes is not None and perm is not None:
            axes = _unpermuted(axes, list(perm.ints))
        elif maker.kind not in ("Identity", "Cast"):
            axes = None
        wire = maker.input(0)
        yield wire, axes


def _unpermuted(axes: Axes, perm: list[int]) -> Axes | None:
    """The axes before a Transpose that gave these; None where it is none of theirs."""
    if sorted(perm) != list(range(len(axes))):
        return None
    return tuple(axes[perm.index(i)] for i in range(len(axes)))


def _stacks(findings: _Findings, sequence: Part | None) -> tuple[Stack, ...]:
    return tuple(
        Stack(
            axis=part.axis,
            letter="2" if _tells_roles(taken) else "L",
            num_parts=len(taken),
            own_axis=part in findings.dropped,
        )
        for part, taken in sorted(findings.parts.items(), key=lambda item: item[0].axis)
        if part != sequence and (part in findings.dropped or _tells_roles(taken))
    )


def _tells_roles(parts: dict[int, set[Role]]) -> bool:
    """Whether one of two parts is always key and the other always value."""
    return len(parts) == 2 and sorted(map(sorted, parts.values())) == [["key"], ["value"]]


def _one_role(roles: set[Role]) -> Role | None:
    if len(roles) > 1:
        return KEY_VALUE
    return next(iter(roles), None)


def _walk(graph: _Graph, past: str, rank: int) -> _Findings:
    start = _Step(wire=past, axes=whole_axes(rank), path=(past,))
    return _follow(graph, start, _Findings())


def _follow(graph: _Graph, start: _Step, findings: _Findings) -> _Findings:
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


def _next(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> list[_Step]:
    """Where the value on ``step.wire`` goes through ``op``; notes what ``op`` says of it."""
    table = fused(op)
    if table is not None:
        return _through_fused(graph, op, table, step, findings)
    if op.kind in PRODUCTS:
        _note_product(graph, op, step, findings)
        return []
    if op.kind in ("Conv", "CausalConvWithState"):
        findings.orders.append(op.order)
        findings.kernels.append(_kernel(graph, op))
    elif op.kind == "Concat":
        return _through_concat(graph, op, step, findings)
    elif op.kind in SCATTERS:
        return _through_scatter(graph, op, step, findings) if op.input(0) == step.wire else []
    elif op.kind == "Where" and step.wire in op.inputs[1:] and step.join is None:
        return [_blended(graph, op, step, findings)]
    elif op.kind in ("Mul", "Div", "Neg"):
        return [replace(step, wire=op.output(), computed=True, path=(*step.path, op.kind))]
    elif op.kind == "Add" and step.computed:
        return [
            _blended(graph, op, step, findings)
            if step.join is None
            else replace(step, wire=op.output())
        ]
    elif op.input(0) == step.wire:
        return _through_move(graph, op, step, findings)
    return []


def _kernel(graph: _Graph, op: Op) -> int:
    """The tokens that a causal convolution looks at, from its weights' last dim."""
    dims = graph.sizes.of(op.input(1)) or ()
    last = next(iter(dims[-1:]), None)
    return (last.number or 1) if last is not None else 1


def _note_product(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> None:
    dims = graph.sizes.of(step.wire)
    rank = len(step.axes) if step.axes is not None else len(dims or ())
    use = use_in_product(graph.wiring, op, step.wire, rank)
    if use is None:
        return
    findings.used_as(use.role, step, op)
    sequence = None if use.sequence is None else axis_at(step.axes, use.sequence)
    depth = None if use.depth is None else axis_at(step.axes, use.depth)
    if sequence is not None and depth is not None:
        findings.sequences.append(sequence)
        findings.depths.append(depth)
    if step.join is None:
        _note_apart(graph, op, step, use, findings)


def _note_apart(graph: _Graph, op: Op, step: _Step, use: Use, findings: _Findings) -> None:
    new = new_beside(graph.wiring, op, step.wire, use.role)
    if new is None:
        return
    axis = None if use.sequence is None else axis_at(step.axes, use.sequence)
    join = _Join(update="delta", axis=axis, op=op)
    findings.joins.append(join)
    findings.partners.append((new, replace(step, join=join, computed=False)))
    _note_new_sizes(graph, step.axes, new, findings)


def _through_fused(
    graph: _Graph, op: Op, table: FusedOp, step: _Step, findings: _Findings
) -> list[_Step]:
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
    if sequence is not None and depth is not None:
        findings.sequences.append(sequence)
        findings.depths.append(depth)
    row_lengths = op.input(table.row_lengths) if table.row_lengths is not None else ""
    findings.row_lengths.add(row_lengths)
    if not op.output(output):
        return []
    join = _Join(
        update="in_place" if _shares_buffer(graph, op, table) else "concat",
        axis=sequence,
        op=op,
        head_dim=_head_dim(graph.wiring, op),
        row_lengths=row_lengths,
    )
    path = (*step.path, op.kind)
    return [replace(step, wire=op.output(output), join=join, path=path)]


def _note_operand(graph: _Graph, op: Op, role: Role, step: _Step, findings: _Findings) -> None:
    """The whole key or value of an attention op: [B, H, S, D], or [B, S, H*D]."""
    findings.used_as(role, step, op)
    if step.axes is not None and len(step.axes) in (len("BSD"), len("BHSD")):
        findings.sequences.append(step.axes[2 if len(step.axes) == 4 else 1])
        findings.depths.append(step.axes[3] if len(step.axes) == 4 else _depth_in(graph, op, step))


def _depth_in(graph: _Graph, op: Op, step: _Step) -> Axis:
    """The part of the last axis, of heads and depths, that is a head's depth by the op's count."""
    last = step.axes[-1] if step.axes else ()
    heads, axis = op.int_attribute("kv_num_heads", 0), _one(last)
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


def _shares_buffer(graph: _Graph, op: Op, table: FusedOp) -> bool:
    """True where the op learns the past's length from elsewhere than the past's own shape."""
    if table.share_flag:
        return op.int_attribute(table.share_flag, 0) == 1
    if any(out in graph.wiring.leaves for out in op.outputs):
        return False  # the other branch starts a cache as long as its tokens
    lengths = [op.input(i) for i in table.lengths if op.input(i)]
    return bool(lengths) and not graph.measured and graph.of_pasts.isdisjoint(lengths)


def _through_concat(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> list[_Step]:
    """The first concatenation joins past and new; a later one stacks what was split before."""
    after = replace(step, wire=op.output(), path=(*step.path, "Concat"))
    if step.join is not None or _of_one_source(graph, op, step):
        return [after]
    axis = axis_at(step.axes, op.int_attribute("axis", 0))
    fault = "" if op.input(0) == step.wire else "puts the new tokens before the past"
    dropped = [start for part, start in step.picks if axis == (part,) and start > 0]
    update: Update = "window" if dropped else "concat"
    after = replace(
        after,
        join=_Join(update=update, axis=axis, op=op, fault=fault),
        picks=tuple(pick for pick in step.picks if axis != (pick[0],)),
        query_len=dropped[0] if dropped else None,
    )
    partners = [name for name in op.inputs if name != step.wire]
    findings.partners.extend((name, after) for name in partners)
    for partner in partners[:1]:
        _note_new_sizes(graph, step.axes, partner, findings)
    return [after]


def _of_one_source(graph: _Graph, op: Op, step: _Step) -> bool:
    """Whether all that is concatenated comes from one tensor, as when halves are swapped."""
    origins = {_origin(graph.wiring, name) for name in op.inputs}
    return len(origins) == 1 and len(op.inputs) > 1 and _origin(graph.wiring, step.wire) in origins


def _origin(wiring: Wiring, wire: str) -> str:
    """The wire that a value was moved or scaled from."""
    while (op := wiring.makers.get(wire)) is not None and (is_move(op) or op.kind == "Neg"):
        wire = op.input(0)
    return wire


def _through_scatter(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> list[_Step]:
    """New tokens written into the past at given places."""
    place = {"ScatterND": 0, "TensorScatter": op.int_attribute("axis", -2)}.get(
        op.kind, op.int_attribute("axis", 0)
    )
    axis = axis_at(step.axes, place)
    lengths = op.input(2) if op.kind == "TensorScatter" else ""
    if op.kind == "TensorScatter":
        findings.row_lengths.add(lengths)
    join = _Join(update="scatter", axis=axis, op=op, row_lengths=lengths)
    _note_new_sizes(graph, step.axes, op.input(1 if op.kind == "TensorScatter" else 2), findings)
    after = replace(step, wire=op.output(), join=step.join or join, path=(*step.path, op.kind))
    return [replace(after, placed=step.join is not None)]


def _blended(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> _Step:
    """New tokens take the past's place by a mask; the axis is for the product to tell."""
    join = _Join(update="scatter", axis=None, op=op)
    after = replace(step, wire=op.output(), join=join, computed=False, path=(*step.path, op.kind))
    new = next((name for name in op.inputs if name != step.wire), "")
    _note_new_sizes(graph, step.axes, new, findings)
    return after


def _note_new_sizes(graph: _Graph, axes: Axes | None, new: str, findings: _Findings) -> None:
    """The dims of what the past is joined with: the graph computes them, heads and all."""
    dims = graph.sizes.of(new)
    if axes is None or dims is None or len(dims) != len(axes):
        return
    for axis, size in zip(axes, dims, strict=True):
        part = _one(axis)
        if part is not None and size is not None:
            findings.new_sizes.setdefault(part, size)


def _through_move(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> list[_Step]:
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


def _note_dropped(before: Axes, after: Axes | None, findings: _Findings) -> None:
    left = {part for axis in after or () for part in axis}
    findings.dropped.update(part for axis in before for part in axis if part not in left)


def _split(op: Op, step: _Step) -> list[_Step]:
    """A part on each output."""
    cut = axis_at(step.axes, op.int_attribute("axis", 0))
    axis = None if cut is None else _one(cut)
    return [
        replace(step, wire=out, picks=step.picks if axis is None else (*step.picks, (axis, part)))
        for part, out in enumerate(op.outputs)
    ]


def _sliced(graph: _Graph, op: Op, step: _Step) -> _Step:
    """A part of one axis, told by where it starts; along the sequence, what is kept of it."""
    starts, axes = graph.sizes.ints(op.input(1)), graph.wiring.ints(op.input(3))
    cut = axis_at(step.axes, axes[0]) if axes is not None and len(axes) == 1 else None
    axis = None if cut is None else _one(cut)
    if axis is None:
        return step
    start = None if not starts or starts[0] is None else starts[0].number
    if step.join is None or step.join.axis is None or cut != step.join.axis:
        return step if start is None else replace(step, picks=(*step.picks, (axis, start)))
    return _cut(graph, op, step, start)


def _cut(graph: _Graph, op: Op, step: _Step, start: int | None) -> _Step:
    """After the join, along the sequence: the newest tokens alone (delta), or the last so many."""
    join = step.join
    if join is None or start == 0:
        return step
    if start is not None and start < 0:
        return replace(step, window=-start, join=replace(join, update="window"))
    starts, dims = graph.sizes.ints(op.input(1)), graph.sizes.of(step.path[0])
    axis = None if join.axis is None else _one(join.axis)
    past_len = None if axis is None or dims is None else dims[axis.axis]
    if past_len is not None and starts and starts[0] == past_len:
        return replace(step, join=replace(join, update="delta"))
    if start is not None and join.update == "concat":
        return replace(step, query_len=start, join=replace(join, update="window"))
    if step.placed:
        return replace(step, join=replace(join, update="window"))
    return replace(step, fault="cuts the joined tokens in a way that ortkv does not understand")


def _gathered(graph: _Graph, op: Op, step: _Step, findings: _Findings) -> _Step:
    """One part of an axis, by a constant index; or rows in another order, by a computed one."""
    axis, index = op.int_attribute("axis", 0), graph.wiring.ints(op.input(1))
    if step.axes is None:
        return step
    dims, axes = graph.sizes.of(op.input(1)), step.axes
    if index is None or len(index) != 1:
        return step if dims is not None and len(dims) == 1 else replace(step, axes=None)
    picked = axis_at(axes, axis)
    place = None if picked is None else _one(picked)
    if place is not None:
        step = replace(step, picks=(*step.picks, (place, index[0])))
    if not graph.wiring.is_scalar(op.input(1)):
        return step
    if place is not None:
        findings.dropped.add(place)
    return replace(step, axes=without(axes, [axis]))
