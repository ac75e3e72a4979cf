"""Key or value: what a product does with a cached tensor, and which axes that makes S and D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.schema.fused_ops import KEY, VALUE

if TYPE_CHECKING:
    from ortkv.schema.spec import Role
    from ortkv.schema.wiring import Op, Wiring

SCORE_OPS = frozenset(
    {"Add", "Cast", "Clip", "Concat", "Div", "Dropout", "Identity", "IsNaN", "Max", "Min", "Mul",
     "Reshape", "Slice", "Split", "Sub", "Tanh", "Transpose", "Where", "Unsqueeze", "Squeeze"}
)  # fmt: skip
"""Ops between QKᵀ, the softmax and the product with V: scaling, masks, softcap, sinks."""
SOFTMAX = frozenset({"Softmax", "Exp"})
"""The softmax, or its numerator where a graph spells it out."""
PRODUCTS = frozenset({"MatMul", "Einsum", "FusedMatMul"})


@dataclass(frozen=True, kw_only=True)
class Use:
    """A tensor's role in one product. Axes are the operand's own, None where they stay open."""

    role: Role
    sequence: int | None
    depth: int | None


def use_in_product(wiring: Wiring, op: Op, wire: str, rank: int) -> Use | None:
    """Key: the product goes into a softmax. Value: it is taken with what comes out of one."""
    if leads_to_softmax(wiring, op.output()):
        role = KEY
    elif _comes_from_softmax(wiring, [name for name in op.inputs if name != wire]):
        role = VALUE
    else:
        return None
    axes = _einsum_axes(op, wire) if op.kind == "Einsum" else _matmul_axes(op, wire, rank)
    summed, kept = axes or (None, None)
    return Use(
        role=role,
        sequence=kept if role == KEY else summed,
        depth=summed if role == KEY else kept,
    )


def _matmul_axes(op: Op, wire: str, rank: int) -> tuple[int, int] | None:
    """(the axis summed over, the operand's other axis)."""
    if rank < 2:
        return None
    first, last = rank - 2, rank - 1
    if op.input(0) == wire:
        return (first, last) if op.int_attribute("transA", 0) else (last, first)
    return (last, first) if op.int_attribute("transB", 0) else (first, last)


def _einsum_axes(op: Op, wire: str) -> tuple[int, int] | None:
    attribute = op.attribute("equation")
    equation = "" if attribute is None else attribute.s.decode(errors="replace").replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(op.inputs):
        return None
    own = terms[list(op.inputs).index(wire)]
    others = "".join(term for i, term in enumerate(terms) if op.inputs[i] != wire)
    summed = [i for i, letter in enumerate(own) if letter not in out]
    kept = [i for i, letter in enumerate(own) if letter in out and letter not in others]
    return (summed[0], kept[0]) if len(summed) == len(kept) == 1 else None


def leads_to_softmax(wiring: Wiring, start: str) -> bool:
    """Whether a value is among the scores that a softmax is taken of."""
    front, seen = [start], {start}
    while front:
        for op in wiring.consumers(front.pop()):
            if op.kind in SOFTMAX:
                return True
            new = [out for out in op.outputs if op.kind in SCORE_OPS and out not in seen]
            seen.update(new)
            front.extend(new)
    return False


def _comes_from_softmax(wiring: Wiring, starts: list[str]) -> bool:
    front, seen = list(starts), set(starts)
    while front:
        op = wiring.makers.get(front.pop())
        if op is None:
            continue
        if op.kind in SOFTMAX:
            return True
        if op.kind in SCORE_OPS:
            front.extend(name for name in op.inputs if name and name not in seen)
            seen.update(op.inputs)
    return False
