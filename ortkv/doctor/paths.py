"""Ops that a whole cache goes through in each step, from its input to where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.schema.wiring import Op, Wiring

MOVES = frozenset(
    {
        "Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Ops that carry a tensor on, its values unchanged but for rounding."""


def ops_on(wiring: Wiring, past: str) -> list[Op]:
    """The moving ops a past goes through, in the order met; a product or a fused op ends a path."""
    found: list[Op] = []
    front, seen = [past], {past}
    while front:
        wire = front.pop(0)
        for op in wiring.consumers(wire):
            if op.kind not in MOVES or (op.kind != "Concat" and op.input(0) != wire):
                continue
            if op not in found:
                found.append(op)
            front.extend(out for out in op.outputs if out and out not in seen)
            seen.update(op.outputs)
    return found


def is_free(wiring: Wiring, op: Op) -> bool:
    """Whether a Transpose costs nothing.

    onnxruntime takes a swap of the last two axes into the MatMul behind it, and a scale between.
    Source: onnxruntime, matmul_transpose_fusion.cc, matmul_scale_fusion.cc.
    """
    perm = op.attribute("perm")
    order = [] if perm is None else list(perm.ints)
    rank = len(order)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    takers = wiring.consumers(op.outputs[0])
    scales = [taker for taker in takers if taker.kind in ("Mul", "Div")]
    takers = [taker for taker in takers if taker not in scales]
    takers += [taker for scale in scales for taker in wiring.consumers(scale.outputs[0])]
    return rank >= 2 and order == swapped and all(t.kind == "MatMul" for t in takers)
