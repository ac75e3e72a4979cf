"""What the graph does with an input that is not cache: the evidence that needs no name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortkv.schema.mask_values import mask_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortkv.schema.spec import HelperKind, MaskValues
    from ortkv.schema.wiring import Op, Wiring
    from ortkv.signature import TensorSpec

_MOVES = frozenset(
    {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice",
     "Flatten", "Clip", "Gather"}
)  # fmt: skip
_SHIFTS = frozenset({"Add", "Sub", "Mod", "Neg"})
_ROTARY = frozenset({"Cos", "Sin", "RotaryEmbedding"})
_ANGLES = frozenset({"MatMul", "Mul", "Einsum", "Concat"})
_PROJECTIONS = frozenset(
    {"MatMul", "Gemm", "MatMulNBits", "DynamicQuantizeMatMul", "DynamicQuantizeLinear"}
)
MEASURES = frozenset({"Shape", "Size"})
"""Ops that take a tensor's dims, not what it holds."""
_PLACES = _MOVES | _SHIFTS | {"Range", "Concat", "Tile", "Mul", "Equal", "Where", "Max", "Min"}
"""Ops on the way from a place to what writes there."""
_INDICES = (("ScatterND", 1), ("ScatterElements", 1), ("TensorScatter", 2))
"""Inputs that say where an op writes."""
_SLOTS: dict[tuple[str, str, int], HelperKind] = {
    ("com.microsoft", "GroupQueryAttention", 5): "last_positions",
    ("com.microsoft", "GroupQueryAttention", 6): "total_length",
    ("com.microsoft", "GroupQueryAttention", 9): "positions",
    ("com.microsoft", "MultiHeadAttention", 8): "past_length",
    ("com.microsoft", "DecoderMaskedMultiHeadAttention", 7): "past_length",
    ("com.microsoft", "Attention", 6): "past_length",
    ("ai.onnx", "Attention", 6): "total_length",
    ("ai.onnx", "TensorScatter", 2): "past_length",
    ("ai.onnx", "If", 0): "use_cache_branch",
}
"""Inputs of ops that say by themselves what is fed to them, unchanged."""


@dataclass(frozen=True)
class Uses:
    """tables: (rows, width) of the constant tables an input indexes.   slots: what ops take it as.

    rotary: whether it turns into angles.   writes: whether it says where to write.
    moves_rows: whether it picks rows of a cache.   mask: what it holds if it masks scores.
    total: whether the new tokens' number is taken from it.   projected: whether it is multiplied
    by weights.   used: whether any op takes it to compute with.
    weighed: whether what it holds is taken, not its shape alone.
    """

    tables: list[tuple[int, int]] = field(default_factory=list["tuple[int, int]"])
    slots: set[HelperKind] = field(default_factory=set["HelperKind"])
    rotary: bool = False
    writes: bool = False
    moves_rows: bool = False
    mask: MaskValues | None = None
    total: bool = False
    projected: bool = False
    used: bool = True
    weighed: bool = True


def uses_of(wiring: Wiring, spec: TensorSpec, pasts: Iterable[str]) -> Uses:
    """Follow an input through ops that leave its values whole, or shift them."""
    found, rows = Uses(), set(pasts)
    tables, slots = found.tables, found.slots
    rotary = moves_rows = False
    front, seen, whole = [spec.name], {spec.name}, {spec.name}
    while front:
        wire = front.pop()
        for op in wiring.consumers(wire):
            place = op.inputs.index(wire)
            slot = _SLOTS.get((op.domain, op.kind, place))
            if slot is not None and wire in whole:
                slots.add(slot)
            if op.kind == "Slice" and place == 1 and wire not in whole:
                slots.add("num_logits_to_keep")
            table = _table(wiring, op, place)
            if table is not None:
                tables.append(table)
            moves_rows |= op.kind == "Gather" and place == 1 and op.input(0) in rows
            rotary |= op.kind in _ROTARY
            if _goes_on(op, wire) and op.output() not in seen:
                seen.add(op.output())
                front.append(op.output())
                if op.kind in _MOVES and wire in whole:
                    whole.add(op.output())
    return Uses(
        tables=tables,
        slots=slots,
        rotary=rotary,
        writes=_is_place(wiring, spec.name, rows),
        moves_rows=moves_rows,
        total=_is_total(wiring, spec.name),
        mask=mask_values(wiring, spec.name, spec.dtype),
        projected=any(op.kind in _PROJECTIONS for op in wiring.consumers(spec.name)),
        used=_is_read(wiring, spec.name),
        weighed=any(op.kind not in MEASURES for op in wiring.consumers(spec.name)),
    )


def _is_place(wiring: Wiring, name: str, pasts: set[str]) -> bool:
    """Whether an input says where in a cache the new tokens go: an index, or a mask of places."""
    front, seen = [name], {name}
    while front:
        wire = front.pop()
        for op in wiring.consumers(wire):
            if (op.kind, op.inputs.index(wire)) in _INDICES:
                return True
            of_past = any(_unpacked(wiring, data) in pasts for data in op.inputs if data != wire)
            if op.kind in ("Where", "Mul") and of_past:
                return True
            goes_on = op.kind in _PLACES and (op.kind != "Gather" or op.input(0) == wire)
            new = [out for out in op.outputs if goes_on and out not in seen]
            seen.update(new)
            front.extend(new)
    return False


def _is_total(wiring: Wiring, name: str) -> bool:
    """Whether a number counts the new tokens too: the graph takes their number from it."""
    front, seen = [name], {name}
    while front:
        wire = front.pop()
        for op in wiring.consumers(wire):
            if op.kind == "Sub" and op.input(0) == wire and wiring.number(op.input(1)) is None:
                return True
            if op.kind in _MOVES and op.input(0) == wire and op.output() not in seen:
                seen.add(op.output())
                front.append(op.output())
    return False


def _is_read(wiring: Wiring, name: str) -> bool:
    """Whether anything but an output that hands it on takes an input."""
    front = [name]
    while front:
        for op in wiring.consumers(front.pop()):
            if op.kind != "Identity":
                return True
            front.extend(op.outputs)
    return False


def _table(wiring: Wiring, op: Op, place: int) -> tuple[int, int] | None:
    """The size of a constant table that an input picks rows of."""
    if op.kind == "EmbedLayerNormalization":
        weights = {0: op.input(2), 1: op.input(4), 7: op.input(3)}.get(place, "")
    elif op.kind in ("Gather", "GatherBlockQuantized") and place == 1:
        weights = _unpacked(wiring, op.input(0))
        if op.int_attribute("axis", op.int_attribute("gather_axis", 0)) != 0:
            return None
    else:
        return None
    constant = wiring.constants.get(weights)
    dims = () if constant is None else tuple(constant.dims)
    return (dims[0], dims[-1]) if len(dims) >= 2 else None


def _unpacked(wiring: Wiring, wire: str) -> str:
    while (op := wiring.makers.get(wire)) is not None and op.kind in (
        "Cast", "DequantizeLinear", "Identity", "Transpose",
    ):  # fmt: skip
        wire = op.input(0)
    return wire


def _goes_on(op: Op, wire: str) -> bool:
    if op.kind in _MOVES:
        return op.input(0) == wire
    return op.kind in _SHIFTS or op.kind in _ANGLES


def values_reach(wiring: Wiring, start: str, targets: Iterable[str]) -> bool:
    """Whether what a tensor holds, not only its shape, has a part in any of some wires."""
    wanted = set(targets)
    front, seen = [start], {start}
    while front:
        wire = front.pop()
        if wire in wanted:
            return True
        after = [out for op in wiring.consumers(wire) if op.kind not in MEASURES
                 for out in op.outputs]  # fmt: skip
        if wire in wiring.leaves:
            after.append(wiring.leaves[wire])
        for out in after:
            if out and out not in seen:
                seen.add(out)
                front.append(out)
    return False
