"""Evidence from the graph itself: which past input reaches which present output, and how.

Each input is walked forward through ops that only move data. The op that joins it with the
new tokens gives the update rule and the sequence axis; the product it then enters, before
or after the softmax, tells key from value; the graph outputs it reaches are its presents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortkv.schema.spec import Role, Update
    from ortkv.schema.wiring import Op, Wiring

Axes = tuple[int | None, ...] | None
"""For each axis of a value, the past's axis it is, or None; None as a whole once unknown."""


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
    """One past input that reaches a present output. Axes are those of the past input."""

    past: str
    present: str
    update: Update
    sequence_axis: int | None
    stacks: tuple[Stack, ...]
    role: Role | None
    head_dim: int | None
    order: int
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Join:
    """Where past meets new."""

    update: Update
    sequence_axis: int | None
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A walk's front: the wire reached and what is known of it."""

    wire: str
    axes: Axes
    path: tuple[str, ...]
    join: _Join | None = None
    picks: tuple[tuple[int, int], ...] = ()
    """(past's axis, part taken) for every time one part of the past was taken."""


@dataclass(frozen=True)
class _Findings:
    """What one input's walk came upon."""

    arrivals: dict[str, _Step] = field(default_factory=dict[str, _Step])
    roles: set[Role] = field(default_factory=set["Role"])
    orders: list[int] = field(default_factory=list[int])
    parts: dict[int, dict[int, set[Role]]] = field(
        default_factory=dict[int, "dict[int, set[Role]]"]
    )
    """past's axis -> part taken -> what that part is used as."""
    dropped: set[int] = field(default_factory=set[int])
    """Axes of the past that are gone once a part is taken."""
    partners: list[tuple[_Join, str, _Step]] = field(
        default_factory=list["tuple[_Join, str, _Step]"]
    )
    """What the past was concatenated with."""

    def used_as(self, role: Role, step: _Step, order: int) -> None:
        self.roles.add(role)
        self.orders.append(order)
        for axis, part in step.picks:
            self.parts.setdefault(axis, {}).setdefault(part, set()).add(role)


@dataclass(frozen=True, kw_only=True)
class _FusedOp:
    """How an attention op of its own names its cache: past input -> (present output, role)."""

    pairs: dict[int, tuple[int, Role]]
    lengths: tuple[int, ...] = ()
    """Inputs that state the true length: with them, the buffers may be longer (in place)."""
    share_flag: str = ""
    """Attribute that says past and present are one buffer."""


_KEY: Role = "key"
_VALUE: Role = "value"
_FUSED_OPS: dict[tuple[str, str], _FusedOp] = {
    ("com.microsoft", "GroupQueryAttention"): _FusedOp(
        pairs={3: (1, _KEY), 4: (2, _VALUE)}, lengths=(5, 6)
    ),
    ("com.microsoft", "MultiHeadAttention"): _FusedOp(
        pairs={6: (1, _KEY), 7: (2, _VALUE)}, lengths=(8,)
    ),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): _FusedOp(
        pairs={5: (1, _KEY), 6: (2, _VALUE)}, share_flag="past_present_share_buffer"
    ),
    ("com.microsoft", "Attention"): _FusedOp(
        pairs={4: (1, "key_value")}, share_flag="past_present_share_buffer"
    ),
    ("ai.onnx", "Attention"): _FusedOp(pairs={4: (1, _KEY), 5: (2, _VALUE)}),
}
"""Source: onnxruntime docs/ContribOperators.md; ONNX operator Attention, opset 23."""

_LEAST_CACHE_RANK = 3
_SAME_AXES = {"Identity", "Cast", "Slice", "Split", "Dropout"}
_UNKNOWN_AXES = {"Reshape", "Expand"}
_REARRANGING = {"Identity", "Cast", "Transpose", "Unsqueeze", "Squeeze", "Reshape"}
_SCORE_OPS = {
    "Add", "Cast", "Clip", "Concat", "Div", "Dropout", "Identity", "IsNaN", "Max", "Min", "Mul",
    "Reshape", "Slice", "Sub", "Tanh", "Transpose", "Where",
}  # fmt: skip
"""Ops between QKᵀ, the softmax and the product with V: scaling, masks, softcap, sinks."""


def flows(wiring: Wiring, inputs: dict[str, int], outputs: Iterable[str]) -> dict[str, Flow]:
    """The flow of each input that is a cache. ``inputs`` gives each one's rank."""
    targets = set(outputs)
    pasts = {name for name, rank in inputs.items() if rank >= _LEAST_CACHE_RANK}
    found = (_flow(wiring, name, rank, pasts, targets) for name, rank in inputs.items())
    return {flow.past: flow for flow in found if flow is not None}


def _flow(wiring: Wiring, past: str, rank: int, pasts: set[str], outputs: set[str]) -> Flow | None:
    findings = _walk(wiring, past, rank, pasts, outputs)
    arrivals = findings.arrivals or _arrivals_of_new(wiring, findings, outputs)
    if len(arrivals) != 1:
        return None
    ((present, arrival),) = arrivals.items()
    if arrival.join is None:
        return None
    return Flow(
        past=past,
        present=present,
        update=arrival.join.update,
        sequence_axis=arrival.join.sequence_axis,
        stacks=_stacks(findings, arrival.join.sequence_axis),
        role=_one_role(findings.roles),
        head_dim=arrival.join.head_dim,
        order=min(findings.orders, default=0),
        path=arrival.path,
    )


def _arrivals_of_new(wiring: Wiring, findings: _Findings, outputs: set[str]) -> dict[str, _Step]:
    """Where the past reaches no output: the outputs that what it was joined with is (delta)."""
    origins = {_origin(wiring, output): output for output in outputs}
    return {
        origins[_origin(wiring, partner)]: replace(step, join=replace(join, update="delta"))
        for join, partner, step in findings.partners
        if _origin(wiring, partner) in origins
    }


def _origin(wiring: Wiring, wire: str) -> str:
    """The wire that a value is, but for its axes' order and its dtype."""
    while (maker := wiring.makers.get(wire)) is not None and maker.kind in _REARRANGING:
        wire = maker.input(0)
    return wire


def _stacks(findings: _Findings, sequence_axis: int | None) -> tuple[Stack, ...]:
    return tuple(
        Stack(
            axis=axis,
            letter="2" if _tells_roles(parts) else "L",
            num_parts=len(parts),
            own_axis=axis in findings.dropped,
        )
        for axis, parts in sorted(findings.parts.items())
        if axis != sequence_axis
    )


def _tells_roles(parts: dict[int, set[Role]]) -> bool:
    """Whether one of two parts is always key and the other always value."""
    return len(parts) == 2 and sorted(map(sorted, parts.values())) == [["key"], ["value"]]


def _one_role(roles: set[Role]) -> Role | None:
    if len(roles) > 1:
        return "key_value"
    return next(iter(roles), None)


def _walk(wiring: Wiring, past: str, rank: int, pasts: set[str], outputs: set[str]) -> _Findings:
    findings = _Findings()
    front = [_Step(wire=past, axes=tuple(range(rank)), path=(past,))]
    seen: set[tuple[str, bool]] = set()
    while front:
        step = front.pop()
        if (step.wire, step.join is None) in seen:
            continue
        seen.add((step.wire, step.join is None))
        if step.wire in outputs:
            findings.arrivals.setdefault(step.wire, step)
        if step.wire in wiring.leaves:
            result = wiring.leaves[step.wire]
            front.append(replace(step, wire=result, path=(*step.path, "If")))
        for op in wiring.consumers(step.wire):
            front.extend(_next(wiring, op, step, pasts, findings))
    return findings


def _next(wiring: Wiring, op: Op, step: _Step, pasts: set[str], findings: _Findings) -> list[_Step]:
    """Where the value on ``step.wire`` goes through ``op``; notes what ``op`` says of it."""
    if (op.domain, op.kind) in _FUSED_OPS:
        return _through_fused(wiring, op, step, pasts, findings)
    if op.kind in ("MatMul", "Einsum"):
        role = _role_in_product(wiring, op, step.wire)
        if role is not None:
            findings.used_as(role, step, op.order)
        return []
    if op.kind == "Concat":
        return _through_concat(op, step, findings)
    if op.input(0) != step.wire:
        return []
    step = replace(step, path=(*step.path, op.kind))
    if op.kind == "Split" and step.join is None:
        return _split(op, step)
    moved = _moved(wiring, op, step, findings)
    if moved is None:
        return []
    return [replace(moved, wire=out) for out in op.outputs if out]


def _split(op: Op, step: _Step) -> list[_Step]:
    """A part on each output."""
    axis = None if step.axes is None else step.axes[op.int_attribute("axis", 0)]
    return [
        replace(step, wire=out, picks=step.picks if axis is None else (*step.picks, (axis, part)))
        for part, out in enumerate(op.outputs)
    ]


def _through_fused(
    wiring: Wiring, op: Op, step: _Step, pasts: set[str], findings: _Findings
) -> list[_Step]:
    fused = _FUSED_OPS[op.domain, op.kind]
    index = op.inputs.index(step.wire)
    if index not in fused.pairs or fused.pairs[index][0] >= len(op.outputs):
        return []
    output, role = fused.pairs[index]
    findings.used_as(role, step, op.order)
    if role == "key_value":
        findings.parts[0] = {0: {"key"}, 1: {"value"}}
        findings.dropped.add(0)
    sequence = -2
    join = _Join(
        update="in_place" if _shares_buffer(wiring, op, fused, pasts) else "concat",
        sequence_axis=None if step.axes is None else step.axes[sequence],
        head_dim=_head_dim(wiring, op),
    )
    path = (*step.path, op.kind)
    return [replace(step, wire=op.outputs[output], join=join, path=path)]


def _head_dim(wiring: Wiring, op: Op) -> int | None:
    """The query's width over the heads in it; without a key input it holds all three."""
    width, num_heads = wiring.width(op.input(0)), op.int_attribute("num_heads", 0)
    if op.kind not in ("GroupQueryAttention", "MultiHeadAttention") or not width or not num_heads:
        return None
    packed = not op.input(1)
    num_kv_heads = op.int_attribute("kv_num_heads", num_heads)
    return width // (num_heads + 2 * num_kv_heads * packed)


def _shares_buffer(wiring: Wiring, op: Op, fused: _FusedOp, pasts: set[str]) -> bool:
    """True where the op learns the past's length from elsewhere than the past's own shape."""
    if fused.share_flag:
        return op.int_attribute(fused.share_flag, 0) == 1
    lengths = [op.input(i) for i in fused.lengths if op.input(i)]
    # A graph that measures the past itself (for positions, say) would see the capacity.
    measured = any(taker.kind == "Shape" for past in pasts for taker in wiring.consumers(past))
    return bool(lengths) and not measured and not _depends_on(wiring, lengths, pasts)


def _depends_on(wiring: Wiring, wires: list[str], sources: set[str]) -> bool:
    front, seen = list(wires), set[str]()
    while front:
        wire = front.pop()
        if wire in sources:
            return True
        if wire not in seen and wire in wiring.makers:
            front.extend(wiring.makers[wire].inputs)
        seen.add(wire)
    return False


def _through_concat(op: Op, step: _Step, findings: _Findings) -> list[_Step]:
    """The first concatenation joins past and new; a later one stacks what was split before."""
    axis = op.int_attribute("axis", 0)
    join = step.join
    if join is None:
        past_axis = None if step.axes is None else step.axes[axis]
        join = _Join(update="concat", sequence_axis=past_axis)
        others = [name for name in op.inputs if name != step.wire]
        findings.partners.extend((join, other, step) for other in others)
    return [replace(step, wire=op.outputs[0], join=join, path=(*step.path, "Concat"))]


def _moved(wiring: Wiring, op: Op, step: _Step, findings: _Findings) -> _Step | None:
    """The step after an op that only moves data; None where the op computes."""
    if op.kind == "Slice" and step.join is None:
        return _sliced(wiring, op, step)
    if op.kind in _SAME_AXES:
        return step
    if op.kind in _UNKNOWN_AXES:
        return replace(step, axes=None)
    if step.axes is None:
        return step if op.kind in ("Transpose", "Squeeze", "Unsqueeze", "Gather") else None
    if op.kind == "Transpose":
        perm = op.attribute("perm")
        order = list(perm.ints) if perm is not None else list(reversed(range(len(step.axes))))
        return replace(step, axes=tuple(step.axes[i] for i in order))
    if op.kind == "Unsqueeze":
        return replace(step, axes=_with_new_axes(wiring, op, step.axes))
    if op.kind == "Squeeze":
        return _without_axes(step, _axes_argument(wiring, op), findings)
    if op.kind == "Gather":
        return _gathered(wiring, op, step, findings)
    return None


def _sliced(wiring: Wiring, op: Op, step: _Step) -> _Step:
    """A part of one axis, told by where it starts."""
    starts, axes = wiring.ints(op.input(1)), wiring.ints(op.input(3))
    if step.axes is None or starts is None or axes is None or len(axes) != 1:
        return step
    axis = step.axes[axes[0]]
    return step if axis is None else replace(step, picks=(*step.picks, (axis, starts[0])))


def _gathered(wiring: Wiring, op: Op, step: _Step, findings: _Findings) -> _Step:
    """One part of an axis, by a constant index; the axis goes where the index is a scalar."""
    axis, index = op.int_attribute("axis", 0), wiring.ints(op.input(1))
    if step.axes is None or index is None or len(index) != 1:
        return replace(step, axes=None)
    place = step.axes[axis]
    if place is not None and step.join is None:
        step = replace(step, picks=(*step.picks, (place, index[0])))
    return _without_axes(step, [axis] if wiring.is_scalar(op.input(1)) else [], findings)


def _axes_argument(wiring: Wiring, op: Op) -> list[int] | None:
    """``axes``: an attribute up to opset 12, an input from 13 on."""
    attribute = op.attribute("axes")
    return list(attribute.ints) if attribute is not None else wiring.ints(op.input(1))


def _with_new_axes(wiring: Wiring, op: Op, axes: tuple[int | None, ...]) -> Axes:
    new = _axes_argument(wiring, op)
    if new is None:
        return None
    rank = len(axes) + len(new)
    places = {i % rank for i in new}
    old = iter(axes)
    return tuple(None if i in places else next(old) for i in range(rank))


def _without_axes(step: _Step, dropped: list[int] | None, findings: _Findings) -> _Step:
    """Drop axes, and note which of the past's they were."""
    if step.axes is None or dropped is None:
        return replace(step, axes=None)
    gone = {i % len(step.axes) for i in dropped}
    findings.dropped.update(axis for i in gone if (axis := step.axes[i]) is not None)
    kept = tuple(axis for i, axis in enumerate(step.axes) if i not in gone)
    return replace(step, axes=kept)


def _role_in_product(wiring: Wiring, op: Op, wire: str) -> Role | None:
    """Key: the product goes into a softmax. Value: it is taken with what comes out of one."""
    if _leads_to_softmax(wiring, op.outputs[0]):
        return "key"
    others = [name for name in op.inputs if name != wire]
    return "value" if _comes_from_softmax(wiring, others) else None


def _leads_to_softmax(wiring: Wiring, start: str) -> bool:
    front, seen = [start], {start}
    while front:
        for op in wiring.consumers(front.pop()):
            if op.kind == "Softmax":
                return True
            if op.kind in _SCORE_OPS and op.outputs[0] not in seen:
                seen.add(op.outputs[0])
                front.append(op.outputs[0])
    return False


def _comes_from_softmax(wiring: Wiring, starts: list[str]) -> bool:
    front, seen = list(starts), set(starts)
    while front:
        op = wiring.makers.get(front.pop())
        if op is None:
            continue
        if op.kind == "Softmax":
            return True
        if op.kind in _SCORE_OPS:
            front.extend(name for name in op.inputs if name and name not in seen)
            seen.update(op.inputs)
    return False
