"""What a mask must hold, told by what the graph does with it on its way to the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortkv.schema.fused_ops import fused
from ortkv.schema.products import leads_to_softmax

if TYPE_CHECKING:
    from ortkv.schema.spec import MaskValues
    from ortkv.schema.wiring import Op, Wiring

_LOW = -1e3
"""A number added to scores that shuts a token out; exporters write -1e4, -65504, -1e9, -inf."""
_PASS_ON = frozenset(
    {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice",
     "Gather", "Tile", "And", "Or", "Concat", "Pad", "Mul", "Add", "Max", "Min", "ScatterND",
     "GatherND", "Clip", "Flatten", "GatherElements", "Greater"}
)  # fmt: skip
_COUNTS = frozenset({"ReduceSum", "CumSum"})
_ARITHMETIC = _PASS_ON | {"Sub", "Range", "ReduceMax", "CumSum", "Where"}


@dataclass(frozen=True, kw_only=True)
class _State:
    """A wire the mask's values reach. ``seen``: what a token that may be seen has there."""

    wire: str
    flipped: bool = False
    added: bool = True
    """Whether no op has turned marks into numbers to add yet, nor has compared them."""


def mask_values(wiring: Wiring, name: str, dtype: str) -> MaskValues | None:
    """'keep', 'drop' or 'additive'; None where the mask does not reach any scores."""
    front, known = [_State(wire=name)], set[tuple[str, bool]]()
    while front:
        state = front.pop(0)
        if (state.wire, state.flipped) in known:
            continue
        known.add((state.wire, state.flipped))
        for op in wiring.consumers(state.wire):
            verdict = _verdict(wiring, op, state, dtype)
            if verdict is not None:
                return verdict
            after = _after(wiring, op, state)
            if after is not None:
                front.extend(replace(after, wire=out) for out in op.outputs if out)
        if state.wire in wiring.leaves:
            front.append(replace(state, wire=wiring.leaves[state.wire]))
    return None


def _verdict(wiring: Wiring, op: Op, state: _State, dtype: str) -> MaskValues | None:
    if op.kind in _COUNTS and _leads_to_lengths(wiring, op):
        return _kept(seen=not state.flipped)
    table = fused(op)
    if table is not None:
        places = [i for i in table.masks if op.input(i) == state.wire]
        is_bias = dtype.startswith(("float", "bfloat")) and state.added and not state.flipped
        return None if not places else "additive" if is_bias else _kept(seen=not state.flipped)
    if op.kind == "Where" and op.input(0) == state.wire:
        if _is_low(wiring, op.input(1)):
            return _kept(seen=state.flipped)
        return _kept(seen=not state.flipped) if _is_low(wiring, op.input(2)) else None
    others = [name for name in op.inputs if name != state.wire]
    if op.kind == "Mul" and any(_is_low(wiring, name) for name in others):
        return _kept(seen=state.flipped)
    if op.kind == "Mul" and any(_is_high(wiring, name) for name in others):
        return _kept(seen=not state.flipped)
    if op.kind == "Add" and state.added and not state.flipped and not dtype.startswith("bool"):
        return "additive" if leads_to_softmax(wiring, op.output()) else None
    return None


def _leads_to_lengths(wiring: Wiring, count: Op) -> bool:
    """Whether a count of marks tells an attention its lengths, or tokens their positions."""
    front, seen = list(count.outputs), set(count.outputs)
    while front:
        wire = front.pop()
        for op in wiring.consumers(wire):
            table = fused(op)
            if table is not None and op.inputs.index(wire) in table.lengths:
                return True
            if op.kind in ("Softmax", "Cos", "RotaryEmbedding"):
                return True
            if op.kind == "Gather" and op.input(1) == wire:
                return True
            new = [out for out in op.outputs if op.kind in _ARITHMETIC and out not in seen]
            seen.update(new)
            front.extend(new)
    return False


def _kept(*, seen: bool) -> MaskValues:
    return "keep" if seen else "drop"


def _after(wiring: Wiring, op: Op, state: _State) -> _State | None:
    """The state behind an op that the marks go through; None where they end."""
    if op.kind == "Not":
        return replace(state, flipped=not state.flipped, added=False)
    if op.kind == "Sub":
        is_from_one = op.input(1) == state.wire and wiring.number(op.input(0)) == 1
        return replace(state, flipped=state.flipped ^ is_from_one, added=False)
    if op.kind in ("Equal", "Less", "LessOrEqual"):
        other = op.input(1) if op.input(0) == state.wire else op.input(0)
        is_zero = op.kind != "Equal" or wiring.number(other) == 0
        return replace(state, flipped=state.flipped ^ is_zero, added=False)
    if op.kind == "Where":
        return state if op.input(0) != state.wire else None
    if op.kind == "Gather" and op.input(0) != state.wire:
        return None
    return state if op.kind in _PASS_ON else None


def _is_low(wiring: Wiring, wire: str) -> bool:
    number = _constant(wiring, wire)
    return number is not None and number <= _LOW


def _is_high(wiring: Wiring, wire: str) -> bool:
    number = _constant(wiring, wire)
    return number is not None and number >= -_LOW


def _constant(wiring: Wiring, wire: str) -> float | None:
    """The one number that a wire is filled with, if it is constant."""
    while (op := wiring.makers.get(wire)) is not None and wire not in wiring.constants:
        if op.kind == "ConstantOfShape":
            value = op.attribute("value")
            return 0.0 if value is None else wiring.number_in(value.t)
        if op.kind not in ("Cast", "Expand", "Unsqueeze", "Reshape", "Identity", "CastLike"):
            return None
        wire = op.input(0)
    return wiring.number(wire)
