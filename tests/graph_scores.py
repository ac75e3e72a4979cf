"""Scores, softmax and mixing, in the pieces that exporters break them into.

q, v and the result are [batch, heads, length, head_dim]; k is [batch, heads, head_dim, length].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graph_nodes import Graph


def scaled_dot(g: Graph, q: str, k: str, v: str, added: str) -> str:
    """The usual: MatMul, Div, Add, Softmax, MatMul; ``added`` may be empty."""
    return g.add("MatMul", g.add("Softmax", _scores(g, q, k, added), axis=-1), v)


def _scores(g: Graph, q: str, k: str, added: str) -> str:
    root = g.const(np.sqrt(g.design.head_dim), np.float32)
    scores = g.add("Div", g.add("MatMul", q, k), root)
    return g.add("Add", scores, added) if added else scores


def by_exponents(g: Graph, q: str, k: str, v: str, added: str) -> str:
    """Softmax in arithmetic; its sum divides the mixed values."""
    scores = _scores(g, q, k, added)
    if g.design.opset < 18:
        top = g.add("ReduceMax", scores, axes=[-1], keepdims=1)
    else:
        top = g.add("ReduceMax", scores, g.const([-1]), keepdims=1)
    powers = g.add("Exp", g.add("Sub", scores, top))
    total = g.add("ReduceSum", powers, g.const([-1]), keepdims=1)
    return g.add("Div", g.add("MatMul", powers, v), total)


def scaled_both(g: Graph, q: str, k: str, v: str, added: str) -> str:
    """torch's dynamo exporter: queries and keys each take half of the scale."""
    half = g.const(g.design.head_dim**-0.25, np.float32)
    scores = g.add("MatMul", g.add("Mul", q, half), g.add("Mul", k, half))
    return g.add("MatMul", g.add("Softmax", g.add("Add", scores, added), axis=-1), v)


def turned(g: Graph, q: str, k: str, v: str, added: str) -> str:
    """Caches on the left: (K Qᵀ)ᵀ and (Vᵀ Pᵀ)ᵀ."""

    def back(wire: str) -> str:
        return g.add("Transpose", wire, perm=[0, 1, 3, 2])

    root = g.const(np.sqrt(g.design.head_dim), np.float32)
    scores = back(g.add("Div", g.add("MatMul", back(k), back(q)), root))
    shares = g.add("Softmax", g.add("Add", scores, added), axis=-1)
    return back(g.add("MatMul", back(v), back(shares)))


def head_by_head(g: Graph, q: str, k: str, v: str, added: str) -> str:
    """NPU exporters: one small attention a head."""
    count = g.design.num_heads
    sizes = g.const([1] * count)
    split = [g.many("Split", [wire, sizes], count, axis=1) for wire in (q, k, v)]
    mixed = [scaled_dot(g, a, b, c, added) for a, b, c in zip(*split, strict=True)]
    return g.add("Concat", *mixed, axis=1)


def apart(g: Graph, q: str, past: list[str], new: list[str], added: str) -> str:
    """Past and new are never joined: their scores are, and their mixed values are added.

    past, new: key and value.
    """
    root = g.const(np.sqrt(g.design.head_dim), np.float32)
    both = [g.add("MatMul", q, keys) for keys in (past[0], new[0])]
    scores = g.add("Div", g.add("Concat", *both, axis=-1), root)
    shares = g.add("Softmax", g.add("Add", scores, added), axis=-1)
    split = g.add("Concat", *(g.unsqueeze(g.length(keys, 3), 0) for keys in (past[0], new[0])),
                  axis=0)  # fmt: skip
    halves = g.many("Split", [shares, split], 2, axis=3)
    mixed = [g.add("MatMul", half, v) for half, v in zip(halves, (past[1], new[1]), strict=True)]
    return g.add("Add", *mixed)


MIXES = {
    "plain": scaled_dot,
    "exp": by_exponents,
    "scaled_both": scaled_both,
    "turned": turned,
    "head_by_head": head_by_head,
}
