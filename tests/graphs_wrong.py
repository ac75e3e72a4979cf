"""Sound graphs that look like a usual one and are not: what a careless derivation gets wrong.

Each runs in onnxruntime. Each docstring says what the graph does and what a right derivation
must do; ``WRONG`` lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

from graph_design import LOGITS, MASK, Design
from graphs import build, decoder, model_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from graph_nodes import Graph

WIDE = Design(attention="gqa_mask", head_dim=16)


def _only(g: Graph, kind: str) -> onnx.NodeProto:
    """The first node of an op."""
    return next(node for node in g.nodes if node.op_type == kind)


def _insert(g: Graph, after: onnx.NodeProto, found: list[onnx.NodeProto]) -> None:
    place = g.nodes.index(after) + 1
    g.nodes[place:place] = found


def gqa_lengths_from_the_masks_shape() -> onnx.ModelProto:
    """GroupQueryAttention's seqlens_k is the mask's width, whatever the mask says.

    Must: hold rows of a batch to one length (equal rows), for zeros in the mask mask nothing.
    """
    g = build(WIDE)
    place = g.nodes.index(_only(g, "ReduceSum"))
    counted = g.nodes[place].output[0]
    lengths = g.inner(prefix="wrong_")
    width = lengths.length(MASK, 1)
    lengths.add("Expand", width, lengths.unsqueeze(lengths.length(MASK, 0), 0))
    lengths.nodes[-1].output[0] = counted
    g.nodes[place : place + 1] = lengths.nodes
    return model_of(g)


def mask_whose_values_are_ignored() -> onnx.ModelProto:
    """A concatenating graph takes the count of keys from the mask's shape, and no more.

    Must: hold rows of a batch to one length, for padding would be attended.
    """
    g = build(Design(mask="", positions="rotary"))
    g.input(MASK, TensorProto.INT64, ["batch", "kv_len"], "mask_2d")
    causal = _only(g, "GreaterOrEqual")
    counted = g.inner(prefix="wrong_")
    line = counted.range(counted.length(MASK, 1))
    causal.input[1] = line
    place = g.nodes.index(causal)
    g.nodes[place:place] = counted.nodes
    return model_of(g)


def additive_mask_of_rank_2() -> onnx.ModelProto:
    """attention_mask is float32 [batch, kv_len], added to the scores: 0 attends, -1e9 does not.

    Must: feed 0 for a row's own tokens and a large negative number elsewhere, or refuse; 1 and 0
    run without an error and mask next to nothing.
    """
    g = build(Design(mask="", positions="rotary"))
    g.input(MASK, TensorProto.FLOAT, ["batch", "kv_len"], "mask_2d")
    causal = _only(g, "Where")
    added = g.inner(prefix="wrong_")
    total = added.add("Add", causal.output[0], added.unsqueeze(MASK, 1, 2))
    for node in g.nodes:
        node.input[:] = [total if name == causal.output[0] else name for name in node.input]
    _insert(g, causal, added.nodes)
    return model_of(g)


def multi_head_attention_in_a_shared_buffer() -> onnx.ModelProto:
    """MultiHeadAttention with past_sequence_length, though the dims read past_len and kv_len: the
    past is a buffer of some capacity, written in place.

    Must: say in_place (or refuse), never concat: a past of exactly the tokens so far has no room.
    """
    return decoder(Design(attention="mha_buffer", mask="", query_len=1))


def presents_given_out_twice() -> onnx.ModelProto:
    """Every present of GroupQueryAttention goes out again, by Identity, as copy_of_….

    Must: pair each past with the op's own output once and leave the copy, or refuse and name both;
    never take the copy for another layer's, nor share a buffer with it.
    """
    g = build(WIDE)
    for name in [name for name in g.outputs if name != LOGITS]:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(g.outputs[name])
        copy.name = f"copy_of_{name}"
        g.outputs[copy.name] = copy
        g.nodes.append(helper.make_node("Identity", [name], [copy.name]))
    return model_of(g)


def new_tokens_before_the_past() -> onnx.ModelProto:
    """Presents are Concat(new, past), and the mask's keys are in that order.

    Must: refuse, or keep tokens in this order: never concat as if the newest came last.
    """
    g = build(Design(positions="rotary"))
    pasts = {name for name in g.inputs if name.startswith("past_key_values")}
    for node in g.nodes:
        if node.op_type == "Concat" and node.input[0] in pasts:
            node.input[:] = [node.input[1], node.input[0]]
    seen = _only(g, "GreaterOrEqual")
    turned = g.inner(prefix="wrong_")
    new = turned.length("input_ids", 1)
    ends = turned.unsqueeze(turned.add("Sub", turned.length(seen.output[0], 3), new), 0)
    zero, axis = turned.const([0]), turned.const([3])
    far = turned.const([np.iinfo(np.int64).max])
    old = turned.add("Slice", seen.output[0], zero, ends, axis)
    fresh = turned.add("Slice", seen.output[0], ends, far, axis)
    both = turned.add("Concat", fresh, old, axis=3)
    _only(g, "And").input[0] = both
    _insert(g, seen, turned.nodes)
    return model_of(g)


def present_in_another_order_than_past() -> onnx.ModelProto:
    """Pasts are [batch, heads, length, head_dim], presents [batch, length, heads, head_dim].

    Must: refuse, or turn each present before it is fed: never one layout for both.
    """
    g = build(Design())
    for name in [name for name in g.outputs if name != LOGITS]:
        for node in g.nodes:
            node.input[:] = [f"inner_{name}" if one == name else one for one in node.input]
            node.output[:] = [f"inner_{name}" if one == name else one for one in node.output]
        g.nodes.append(helper.make_node("Transpose", [f"inner_{name}"], [name], perm=[0, 2, 1, 3]))
        dims = g.outputs[name].type.tensor_type.shape.dim
        kept = [dims[i] for i in (0, 2, 1, 3)]
        copies = [onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString()) for d in kept]
        del dims[:]
        dims.extend(copies)
    return model_of(g)


def hidden_states_alone() -> onnx.ModelProto:
    """The only float output beside the cache is last_hidden_state [batch, query_len, width].

    Must: refuse for want of logits: hidden states are no scores of tokens.
    """
    design = Design()
    g = build(replace(design, label=lambda what: {"logits": "last_hidden_state"}.get(
        what, design.label(what))))  # fmt: skip
    head = next(node for node in g.nodes if "last_hidden_state" in node.output)
    x = head.input[0]
    g.nodes.remove(head)
    g.output("last_hidden_state", TensorProto.FLOAT, ["batch", "query_len", design.width])
    g.rename(x, "last_hidden_state")
    del g.weights["head"]
    return model_of(g)


WRONG: dict[str, Callable[[], onnx.ModelProto]] = {
    "A3a": gqa_lengths_from_the_masks_shape,
    "A3b": mask_whose_values_are_ignored,
    "A3c": additive_mask_of_rank_2,
    "A3d": multi_head_attention_in_a_shared_buffer,
    "A3e": presents_given_out_twice,
    "A4": new_tokens_before_the_past,
    "A5": present_in_another_order_than_past,
    "A8": hidden_states_alone,
}
