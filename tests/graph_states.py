"""Layers whose cache is a state of fixed size: a causal convolution, a recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

from graph_masks import new_len
from graph_reference import DECAY

if TYPE_CHECKING:
    from graph_nodes import Graph

FLOAT = TensorProto.FLOAT


def declare_states(g: Graph) -> None:
    design = g.design
    batch, heads, size = design.batch or "batch", design.num_heads, design.head_dim
    dims = {"C": [batch, design.width, design.conv_state_len], "R": [batch, heads, size, size]}
    for layer, kind in enumerate(design.kinds):
        if kind != "A":
            role = "conv" if kind == "C" else "recurrent"
            g.input(design.name("past", layer, role), FLOAT, dims[kind])
            g.output(design.name("present", layer, role), FLOAT, dims[kind])


def convolution(g: Graph, layer: int, x: str) -> tuple[str, str]:
    """LFM2's: depthwise over the state and the new tokens; and the state that follows."""
    design = g.design
    state = design.name("past", layer, "conv")
    whole = g.add("Concat", state, g.add("Transpose", x, perm=[0, 2, 1]), axis=2)
    mixed = g.add("Conv", whole, f"kernel_{layer}", group=design.width)
    if design.conv_state_len > 2:
        mixed = g.last(mixed, new_len(g), 2)
    return g.add("Transpose", mixed, perm=[0, 2, 1]), g.last(whole, design.conv_state_len, 2)


def recurrence(g: Graph, layer: int, x: str) -> tuple[str, str]:
    """Linear attention with decay; and the state that follows."""
    design = g.design
    state = design.name("past", layer, "recurrent")
    qkv = [
        g.transpose(
            g.reshape(g.add("MatMul", x, f"{part}_{layer}"),
                      [0, 0, design.num_heads, design.head_dim]),
            "BSHD", "BHSD",
        )
        for part in ("wq", "wk", "wv")
    ]  # fmt: skip
    if design.recurrence == "step":
        *parts, axis = (*(g.squeeze(wire, 2) for wire in qkv), 2)
        after, mixed = _step(g, state, *parts)
        mixed = g.unsqueeze(mixed, axis)
    else:
        after, mixed = g.many(
            "Scan", [state, *qkv], 2, num_scan_inputs=3, body=_scan_body(g, layer),
            scan_input_axes=[2, 2, 2], scan_output_axes=[2],
        )  # fmt: skip
    mixed = g.add("Div", mixed, g.const(design.width, np.float32))
    mixed = g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, design.width])
    return g.add("MatMul", mixed, f"wo_{layer}"), after


def _step(g: Graph, state: str, q: str, k: str, v: str) -> tuple[str, str]:
    """State and output after one token; q, k, v [batch, num_heads, head_dim]."""
    kept = g.add("Mul", state, g.const(DECAY, np.float32))
    after = g.add("Add", kept, g.add("Mul", g.unsqueeze(k, 3), g.unsqueeze(v, 2)))
    return after, g.squeeze(g.add("MatMul", g.unsqueeze(q, 2), after), 2)


def _scan_body(g: Graph, layer: int) -> onnx.GraphProto:
    body = g.inner(prefix=f"scan{layer}_")
    names = [f"scan{layer}_{part}" for part in ("state", "q", "k", "v")]
    after, mixed = _step(body, *names)
    inputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in names]
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in (after, mixed)]
    return helper.make_graph(body.nodes, "step", inputs, outputs)
