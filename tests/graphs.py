"""Tiny attention decoders as ONNX graphs, their axes chosen by the caller (``Design``).

Residual attention layers over a token embedding, no MLP: all that a cache needs to matter.
Weights are seeded; all but the cache is float32. ``full_logits`` is the same in numpy.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from graph_attention import attention, cross_attention, shared
from graph_design import (
    CANONICAL,
    INPUT_IDS,
    LOGITS,
    MASK,
    USE_CACHE,
    Design,
    layout_of,
    optimum_name,
    tensors,
    weights,
)
from graph_layouts import declare_caches, present_tensors
from graph_masks import declare_mask, new_len, positions_from, tokens_name
from graph_nodes import Graph
from graph_reference import full_logits
from graph_states import convolution, declare_states, recurrence

__all__ = [
    "CANONICAL",
    "INPUT_IDS",
    "LOGITS",
    "MASK",
    "USE_CACHE",
    "Design",
    "build",
    "decoder",
    "embedding_model",
    "full_logits",
    "layout_of",
    "optimum_name",
    "tensors",
    "weights",
]

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
IR_VERSIONS = {14: 7, 15: 8, 16: 8, 17: 9, 18: 9, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12}


def decoder(design: Design) -> onnx.ModelProto:
    """The graph of a design."""
    return model_of(build(design))


def model_of(g: Graph) -> onnx.ModelProto:
    design = g.design
    arrays = g.weights if "inputs_embeds" not in design.extras else {
        name: array for name, array in g.weights.items() if name != "embedding"
    }  # fmt: skip
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    inputs, outputs = list(g.inputs.values()), list(g.outputs.values())
    if design.order is not None:
        random = np.random.default_rng(design.order)
        inputs = [inputs[i] for i in random.permutation(len(inputs))]
        outputs = [outputs[i] for i in random.permutation(len(outputs))]
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, constants)
    domains = {"": design.opset, "com.microsoft": 1} | ({"local": 1} if g.functions else {})
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
        ir_version=IR_VERSIONS[design.opset],
        functions=[*g.functions.values()],
    )


def embedding_model(design: Design) -> onnx.ModelProto:
    """The graph beside a decoder that takes inputs_embeds: from token ids to those."""
    g = Graph(design)
    dims = [design.batch or "batch", design.query_len or "query_len"]
    g.input(design.label("tokens"), design.id_dtype, dims)
    g.output(design.label("inputs_embeds"), FLOAT, [*dims, design.width])
    g.weights["embedding_table"] = weights(design)["embedding"]
    wire = g.add("Gather", "embedding_table", design.label("tokens"))
    g.rename(wire, design.label("inputs_embeds"))
    return model_of(g)


def build(design: Design) -> Graph:
    """A design's graph with what each helper input is for."""
    g = Graph(design, with_past=design.past)
    g.weights |= weights(design)
    _declare(g)
    if design.merged:
        flag = g.input(design.label("use_cache"), TensorProto.BOOL, [1], "use_cache_branch")
        branches = {
            label: _branch(g, label, with_past=label == "then_branch")
            for label in ("then_branch", "else_branch")
        }
        g.many_named("If", [flag], list(g.outputs), **branches)
    else:
        for name, wire in body(g).items():
            g.rename(wire, name)
    return g


def _declare(g: Graph) -> None:
    """Inputs and outputs that every design has; the others are declared where they are read."""
    design = g.design
    batch, new = design.batch or "batch", design.query_len or "query_len"
    embedded = "inputs_embeds" in design.extras
    g.input(tokens_name(design), *((FLOAT, [batch, new, design.width]) if embedded else
                                   (design.id_dtype, [batch, new])))  # fmt: skip
    kept = "kept" if "num_logits_to_keep" in design.extras else new
    g.output(design.label("logits"), FLOAT, [batch, kept, design.vocab_size])
    declare_mask(g)
    declare_caches(g)
    declare_states(g)
    if "beam_indices" in design.extras:
        g.input(design.label("beam_indices"), TensorProto.INT32, [batch], "beam_indices")
    if design.write_from == "layer_lengths":
        for layer in range(design.num_layers):
            g.output(design.name("present", layer, "length"), INT64, [])


def _branch(g: Graph, label: str, *, with_past: bool) -> onnx.GraphProto:
    """optimum's merged decoder has two: one reads the past, one does not."""
    inner = g.inner(with_past=with_past)
    outputs = []
    wires = body(inner)
    for name, value in g.outputs.items():
        inner.rename(wires[name], f"{label}/{name}")
        out = onnx.ValueInfoProto(name=f"{label}/{name}")
        out.type.tensor_type.elem_type = value.type.tensor_type.elem_type
        outputs.append(out)
    return helper.make_graph(inner.nodes, label, [], outputs)


def body(g: Graph) -> dict[str, str]:
    """Every layer; the wire of each output by its name."""
    design = g.design
    x = _embedded(g)
    given = shared(g)
    parts: dict[tuple[int, str], str] = {}
    found: dict[str, str] = {}
    for layer, kind in enumerate(design.kinds):
        if kind == "A":
            mixed, presents = attention(g, layer, x, given)
            parts |= {(layer, role): wire for role, wire in presents.items()}
            mixed = g.add("MatMul", mixed, f"wo_{layer}")
        else:
            mixed, state = (convolution if kind == "C" else recurrence)(g, layer, x)
            found[design.name("present", layer, "conv" if kind == "C" else "recurrent")] = state
        x = g.add("Add", x, mixed)
        if kind == "A" and design.cross:
            mixed, presents = cross_attention(g, layer, x)
            found |= {design.name("present", layer, r): wire for r, wire in presents.items()}
            x = g.add("Add", x, mixed)
    logits = {design.label("logits"): _logits(g, x)}
    return logits | present_tensors(g, parts) | found | _lengths(g)


def _embedded(g: Graph) -> str:
    design = g.design
    x = tokens_name(design)
    if "inputs_embeds" not in design.extras:
        x = g.add("Gather", "embedding", x)
    if design.positions == "learned":
        table = g.add("Gather", "position_table", positions_from(g, design.position_input))
        x = g.add("Add", x, table)
    if "token_types" in design.extras:
        dims = [design.batch or "batch", design.query_len or "query_len"]
        types = g.input(design.label("token_types"), design.id_dtype, dims, "token_types")
        x = g.add("Add", x, g.add("Gather", "type_table", types))
    if "unknown" in design.extras:
        x = g.add("Mul", x, g.input(design.label("unknown"), FLOAT, [], "unknown"))
    return x


def _logits(g: Graph, x: str) -> str:
    design = g.design
    if "num_logits_to_keep" in design.extras:
        name = design.label("num_logits_to_keep")
        x = g.last(x, g.input(name, INT64, [], "num_logits_to_keep"), 1)
    return g.add("MatMul", x, "head")


def _lengths(g: Graph) -> dict[str, str]:
    """The counters that go out again, where each layer has one."""
    design = g.design
    if design.write_from != "layer_lengths":
        return {}
    new = new_len(g)
    return {
        design.name("present", layer, "length"): g.add(
            "Add", design.name("past", layer, "length"), new
        )
        for layer in range(design.num_layers)
    }
