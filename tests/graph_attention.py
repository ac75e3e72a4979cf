"""Attention over a cache, in the forms graphs have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from graph_design import ENCODER_LEN, groups, rotary_tables, weights
from graph_layouts import (
    ROLES,
    from_layout,
    pair,
    pair_part,
    past_len,
    past_part,
    past_tensor,
    to_layout,
)
from graph_masks import batch_of, bias, new_len, rotary, rotated, write_places
from graph_nodes import TO_THE_END
from graph_scores import MIXES, apart, scaled_dot
from graph_updates import joined

if TYPE_CHECKING:
    from graph_nodes import Graph

INT32 = TensorProto.INT32
MICROSOFT = "com.microsoft"
Presents = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Wires that every layer reads; empty where the design has no use for them."""

    bias: str = ""
    rotary: tuple[str, ...] = ()
    seqlens: tuple[str, ...] = ()


def shared(g: Graph) -> Shared:
    """Computed once, before the first layer."""
    design = g.design
    form = design.attention
    turned = design.positions in ("rotary", "rotary_computed", "rotary_op")
    return Shared(
        bias="" if form in UNBIASED or (form, design.mask) == ("attention_nonpad", "") else bias(g),
        rotary=tuple(rotary(g)) if turned else (),
        seqlens=_seqlens(g) if form.startswith("gqa") else (),
    )


def attention(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    """[batch, query_len, width], before the output's projection; and the presents by role."""
    form = FORMS.get(g.design.attention, _joined_attention)
    return form(g, layer, x, given)


def _projected(g: Graph, layer: int, x: str, given: Shared, *, split: bool) -> list[str]:
    """q, k, v, turned: [batch, query_len, width], or its last axis ``split`` into heads."""
    design = g.design
    wires = [g.add("MatMul", x, f"{part}_{layer}") for part in ("wq", "wk", "wv")]
    if design.positions == "rotary_op":
        places, *tables = given.rotary
        for i in (0, 1):
            inputs = [wires[i], places, *tables]
            wires[i] = g.add("RotaryEmbedding", *inputs, domain=MICROSOFT)
    turned = len(given.rotary) == 2
    if split or turned:
        counts = (design.num_heads, design.kv_heads, design.kv_heads)
        wires = [
            g.reshape(wire, [0, 0, count, design.head_dim])
            for wire, count in zip(wires, counts, strict=True)
        ]
    if turned:
        wires[:2] = [rotated(g, wire, [*given.rotary]) for wire in wires[:2]]
    return wires if split or not turned else [g.reshape(wire, [0, 0, -1]) for wire in wires]


def _joined_attention(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    """The graph joins past and new itself, then attends."""
    design = g.design
    inputs = [*_projected(g, layer, x, given, split=True), given.bias]
    whole = design.stack_join == "whole"
    if g.with_past:
        roles = ROLES[:1] if whole else ROLES
        inputs += [(past_tensor if whole else past_part)(g, layer, role) for role in roles]
    write = write_places(g, layer)
    inputs += [write] if write else []
    if design.in_function:
        mixed, *presents = _called(g, inputs)
    else:
        mixed, *presents = _join_and_attend(g, layer, inputs)
    roles = ("key_value",) if whole else ROLES
    return mixed, dict(zip(roles, presents, strict=True))


def _called(g: Graph, inputs: list[str]) -> list[str]:
    """``_join_and_attend`` as a function of the model's own, one for all layers."""
    count = 2 if g.design.stack_join == "whole" else 3
    if "Attend" not in g.functions:
        body = g.inner()
        formal = [f"in_{i}" for i in range(len(inputs))]
        outs = _join_and_attend(body, 0, formal)
        opsets = [helper.make_opsetid("", g.design.opset)]
        g.functions["Attend"] = helper.make_function(
            "local", "Attend", formal, outs, body.nodes, opsets
        )
    return g.many("Attend", inputs, count, domain="local")


def _join_and_attend(g: Graph, layer: int, inputs: list[str]) -> list[str]:
    """Mixed and presents. inputs: q, k, v [batch, query_len, heads, head_dim], bias, pasts, write.

    Reads no other wires, so that it can be a function's body.
    """
    design = g.design
    q, k, v, added, *rest = inputs
    inner = [design.join_layout or layout for layout in design.layouts]
    new = [to_layout(g, wire, layout) for wire, layout in zip((k, v), inner, strict=True)]
    count = 1 if design.stack_join == "whole" else 2
    pasts = [_turned_in(g, *pair) for pair in zip(rest[:count], design.layouts, strict=False)]
    write = rest[-1] if len(rest) > count else ""
    if design.attention == "apart":
        return [_apart(g, q, pasts, new, added), *new]
    if design.stack_join == "whole":
        layout = inner[0] if design.stacked == "2D" else "2" + inner[0]
        both, present = joined(g, pasts[0], pair(g, new), layout, write, (layer, "key"))
        wholes, presents = [pair_part(g, both, role) for role in ROLES], [present]
    else:
        pairs = [
            joined(g, past, wire, layout, write, (layer, role))
            for past, wire, layout, role in zip(pasts or ["", ""], new, inner, ROLES, strict=True)
        ]
        wholes, presents = [w for w, _ in pairs], [p for _, p in pairs]
    presents = [_turned_out(g, *pair) for pair in zip(presents, design.layouts, strict=False)]
    return [_over(g, q, wholes, inner, added, write), *presents]


def _turned_in(g: Graph, past: str, layout: str) -> str:
    """A past as it is joined, after whatever does nothing to it."""
    past = _idle(g, past) if g.design.idle_nodes else past
    return g.transpose(past, layout, g.design.join_layout) if g.design.join_layout else past


def _turned_out(g: Graph, present: str, layout: str) -> str:
    """A present in the cache's layout."""
    if g.design.join_layout:
        present = g.transpose(present, g.design.join_layout, layout)
    return _idle(g, present) if g.design.idle_nodes else present


def _idle(g: Graph, wire: str) -> str:
    """The same numbers after Identity, Unsqueeze, Squeeze, Slice and Reshape."""
    whole = g.squeeze(g.unsqueeze(g.add("Identity", wire), 0), 0)
    ends = [g.const([0]), g.const([TO_THE_END]), g.const([0])]
    return g.add("Reshape", g.add("Slice", whole, *ends), g.add("Shape", wire))


def _over(g: Graph, q: str, wholes: list[str], layouts: list[str], added: str, write: str) -> str:
    """[batch, query_len, width]: queries over whole caches."""
    design = g.design
    if design.attention == "einsum":
        return _einsum(g, q, wholes, layouts, added)
    merged = all(groups(layout)[0] == "BH" for layout in layouts)
    if merged and design.kv_heads == design.num_heads and design.attention == "plain":
        return _batched(g, q, wholes, added)
    mix = MIXES.get(design.attention)
    k, v = _heads_of(g, q, wholes, layouts, "BHDS" if mix else "BHSD")
    q = g.transpose(q, "BSHD", "BHSD")
    lengths = []
    if design.attention == "attention_nonpad":
        lengths = ["", "", g.add("Add", write, g.length(q, 2))]
    mixed = mix(g, q, k, v, added) if mix else g.add("Attention", q, k, v, added, *lengths)
    return g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, design.width])


def _heads_of(
    g: Graph, q: str, caches: list[str], layouts: list[str], keys: str
) -> tuple[str, str]:
    """Key with the axes ``keys`` and value BHSD, of as many heads as the attention needs."""
    batch = g.length(q, 0)
    k, v = (
        _repeated(g, from_layout(g, wire, layout, wanted, batch), wanted)
        for wire, layout, wanted in zip(caches, layouts, (keys, "BHSD"), strict=True)
    )
    return k, v


def _apart(g: Graph, q: str, pasts: list[str], new: list[str], added: str) -> str:
    layouts = [*g.design.layouts]
    old, fresh = ([*_heads_of(g, q, caches, layouts, "BHDS")] for caches in (pasts, new))
    mixed = apart(g, g.transpose(q, "BSHD", "BHSD"), old, fresh, added)
    return g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, g.design.width])


def _repeated(g: Graph, wire: str, letters: str) -> str:
    """Each kv head for all the heads that share it, by Expand and Reshape; 'attention' can."""
    design = g.design
    times = design.num_heads // design.kv_heads
    if times == 1 or design.attention.startswith("attention"):
        return wire
    sizes: list[str | int] = [design.head_dim if x == "D" else g.length(wire, i)
                              for i, x in enumerate(letters)]  # fmt: skip
    one, rest = g.unsqueeze(wire, 2), [sizes[0], design.kv_heads, times, *sizes[2:]]
    spread = g.add("Expand", one, g.vector(rest))
    return g.reshape(spread, [sizes[0], design.num_heads, *sizes[2:]])


def _batched(g: Graph, q: str, wholes: list[str], added: str) -> str:
    """BLOOM's: matrices of rank 3, batch and heads on one axis."""
    design = g.design
    batch, new = g.length(q, 0), g.length(q, 1)
    rows = g.add("Mul", batch, g.const(design.num_heads))
    q = g.reshape(g.transpose(q, "BSHD", "BHSD"), [rows, new, design.head_dim])
    letters = [layout.replace("(BH)", "N") for layout in design.layouts]
    k = g.transpose(wholes[0], letters[0], "NDS")
    v = g.transpose(wholes[1], letters[1], "NSD")
    root = g.const(np.sqrt(design.head_dim), np.float32)
    scores = g.add("Div", g.add("MatMul", q, k), root)
    keys = g.length(k, 2)
    split = g.add("Add", g.reshape(scores, [batch, design.num_heads, new, keys]), added)
    shares = g.reshape(g.add("Softmax", split, axis=-1), [rows, new, keys])
    mixed = g.reshape(g.add("MatMul", shares, v), [batch, design.num_heads, new, design.head_dim])
    return g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, design.width])


def _einsum(g: Graph, q: str, wholes: list[str], layouts: list[str], added: str) -> str:
    """Straight over the caches' own axes; G are the heads that share a kv head."""
    design = g.design
    times = design.num_heads // design.kv_heads
    grouped, both = ("bqhgd", "hg") if times > 1 else ("bqhd", "h")
    if times > 1:
        q, added = g.reshape(q, [0, 0, design.kv_heads, times, -1]), g.unsqueeze(added, 2)
    k_axes, v_axes = (layout.lower().replace("s", "k") for layout in layouts)
    scores = g.add("Einsum", q, wholes[0], equation=f"{grouped},{k_axes}->b{both}qk")
    scores = g.add("Div", scores, g.const(np.sqrt(design.head_dim), np.float32))
    shares = g.add("Softmax", g.add("Add", scores, added), axis=-1)
    mixed = g.add("Einsum", shares, wholes[1], equation=f"b{both}qk,{v_axes}->{grouped}")
    return g.reshape(mixed, [0, 0, design.width])


def _standard(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    """The standard Attention, which joins past and new itself; 4-D inputs or 3-D."""
    design = g.design
    flat = design.attention == "attention_3d"
    qkv = _projected(g, layer, x, given, split=not flat)
    attributes: dict[str, Any] = {}
    if flat:
        attributes = {"q_num_heads": design.num_heads, "kv_num_heads": design.kv_heads}
    else:
        qkv = [g.transpose(wire, "BSHD", "BHSD") for wire in qkv]
    pasts = [past_part(g, layer, role) for role in ROLES] if g.with_past else []
    mixed, *presents = g.many("Attention", [*qkv, given.bias, *pasts], 3, **attributes)
    if not flat:
        mixed = g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, design.width])
    return mixed, dict(zip(ROLES, presents, strict=True))


def _multi_head(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    design = g.design
    qkv = _projected(g, layer, x, given, split=False)
    pasts = [past_part(g, layer, role) for role in ROLES] if g.with_past else ["", ""]
    mixed, *presents = g.many(
        "MultiHeadAttention", [*qkv, "", "", given.bias, *pasts], 3, MICROSOFT,
        num_heads=design.num_heads,
    )  # fmt: skip
    return mixed, dict(zip(ROLES, presents, strict=True))


def _multi_head_in_place(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    """With past_sequence_length the past is a buffer, and the presents are it, written."""
    design = g.design
    qkv = _projected(g, layer, x, given, split=False)
    pasts = [past_part(g, layer, role) for role in ROLES]
    length = g.input(design.label("past_length"), INT32, [], "past_length")
    mixed, *presents = g.many(
        "MultiHeadAttention", [*qkv, "", "", "", *pasts, length], 3, MICROSOFT,
        num_heads=design.num_heads, unidirectional=1,
    )  # fmt: skip
    return mixed, dict(zip(ROLES, presents, strict=True))


def _decoder_masked(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    """One token a run, written into the past's buffer."""
    design = g.design
    qkv = _projected(g, layer, x, given, split=False)
    pasts = [past_part(g, layer, role) for role in ROLES]
    length = g.input(design.label("past_length"), INT32, [1], "past_length")
    mask = g.cast(design.label("mask"), INT32) if design.mask else ""
    mixed, *presents = g.many(
        "DecoderMaskedMultiHeadAttention", [*qkv, mask, "", *pasts, length], 3, MICROSOFT,
        num_heads=design.num_heads, past_present_share_buffer=1,
    )  # fmt: skip
    return mixed, dict(zip(ROLES, presents, strict=True))


def _fused(g: Graph, layer: int, x: str, _: Shared) -> tuple[str, Presents]:
    """com.microsoft's Attention: projections, cache [2, B, H, S, D] and attention in one."""
    design = g.design
    found = weights(design)
    qkv = np.concatenate([found[f"{part}_{layer}"] for part in ("wq", "wk", "wv")], axis=1)
    weight = g.weight(f"wqkv_{layer}", qkv)
    zeros = g.weight(f"bqkv_{layer}", np.zeros(qkv.shape[1], np.float32))
    mask = g.cast(design.label("mask"), INT32) if design.mask else ""
    past = [past_tensor(g, layer, "key")] if g.with_past else []
    mixed, present = g.many(
        "Attention", [x, weight, zeros, mask, *past], 2, MICROSOFT,
        num_heads=design.num_heads, unidirectional=1,
    )  # fmt: skip
    return mixed, {"key_value": present}


def _seqlens(g: Graph) -> tuple[str, ...]:
    """seqlens_k [batch] and total_sequence_length, int32 both."""
    design = g.design
    if design.attention == "gqa_inputs":
        batch = design.batch or "batch"
        last = g.input(design.label("last_positions"), INT32, [batch], "last_positions")
        return last, g.input(design.label("total_length"), INT32, [], "total_length")
    if design.attention == "gqa_mask":
        mask = g.cast(design.label("mask"), TensorProto.INT64)
        counted = g.add("ReduceSum", mask, g.const([1]), keepdims=0)
        last, total = g.add("Sub", counted, g.const(1)), g.length(design.label("mask"), 1)
    else:
        total = g.add("Add", past_len(g) if g.with_past else g.const(0), new_len(g))
        last = g.add("Expand", g.add("Sub", total, g.const(1)), g.unsqueeze(batch_of(g), 0))
    return g.cast(last, INT32), g.cast(total, INT32)


def _group_query(g: Graph, layer: int, x: str, given: Shared) -> tuple[str, Presents]:
    design = g.design
    qkv = _projected(g, layer, x, given, split=False)
    if design.packed:
        qkv = [g.add("Concat", *qkv, axis=-1), "", ""]
    pasts = [past_part(g, layer, role) for role in ROLES] if g.with_past else ["", ""]
    attributes: dict[str, Any] = {}
    tables: list[str] = []
    if design.positions == "rotary_inside":
        attributes = {"do_rotary": 1}
        cos, sin = rotary_tables(design)
        tables = [g.weight("cos_table", cos), g.weight("sin_table", sin)]
    mixed, *presents = g.many(
        "GroupQueryAttention", [*qkv, *pasts, *given.seqlens, *tables], 3, MICROSOFT,
        num_heads=design.num_heads, kv_num_heads=design.kv_heads, **attributes,
    )  # fmt: skip
    return mixed, dict(zip(ROLES, presents, strict=True))


UNBIASED = ("mha_buffer", "gqa_mask", "gqa_shape", "gqa_inputs", "fused", "dmmha")
FORMS = {
    "attention": _standard,
    "attention_3d": _standard,
    "mha": _multi_head,
    "mha_buffer": _multi_head_in_place,
    "dmmha": _decoder_masked,
    "fused": _fused,
    "gqa_mask": _group_query,
    "gqa_shape": _group_query,
    "gqa_inputs": _group_query,
}


def cross_attention(g: Graph, layer: int, x: str) -> tuple[str, Presents]:
    """Over an encoder's output, whose keys and values are BHSD; and those, where they go out."""
    design = g.design
    q = g.reshape(g.add("MatMul", x, f"cwq_{layer}"), [0, 0, design.num_heads, design.head_dim])
    computed = design.cross == "hidden" or not g.with_past
    parts = {
        f"cross_{role}": _encoder_part(g, layer, weight)
        if computed
        else design.name("past", layer, f"cross_{role}")
        for role, weight in zip(ROLES, ("cwk", "cwv"), strict=True)
    }
    k = _repeated(g, g.transpose(parts["cross_key"], "BHSD", "BHDS"), "BHDS")
    v = _repeated(g, parts["cross_value"], "BHSD")
    mixed = scaled_dot(g, g.transpose(q, "BSHD", "BHSD"), k, v, _encoder_bias(g))
    mixed = g.reshape(g.transpose(mixed, "BHSD", "BSHD"), [0, 0, design.width])
    out = g.add("MatMul", mixed, f"cwo_{layer}")
    if design.cross == "first_only" and g.with_past:
        shape = [0, design.kv_heads, 1, design.head_dim]
        nothing = g.add("ConstantOfShape", g.const(shape))
        return out, {role: g.add("Identity", nothing) for role in parts}
    return out, parts if design.cross in ("passed", "first", "first_only") else {}


def _encoder_part(g: Graph, layer: int, weight: str) -> str:
    design = g.design
    dims = [design.batch or "batch", "encoder_len", design.width]
    name = design.label("encoder_states")
    states = g.input(name, TensorProto.FLOAT, dims, "encoder_states")
    wire = g.reshape(
        g.add("MatMul", states, f"{weight}_{layer}"), [0, 0, design.kv_heads, design.head_dim]
    )
    return g.transpose(wire, "BSHD", "BHSD")


def _encoder_bias(g: Graph) -> str:
    """Nothing, or float32 [batch, 1, 1, encoder_len] from the encoder's mask."""
    design = g.design
    if "encoder_mask" not in design.extras:
        return ""
    dims = [design.batch or "batch", ENCODER_LEN if design.cross != "hidden" else "encoder_len"]
    name = design.label("encoder_attention_mask")
    mask = g.input(name, TensorProto.INT64, dims, "encoder_mask")
    kept = g.cast(g.unsqueeze(mask, 1, 2), TensorProto.BOOL)
    return g.add("Where", kept, g.const(0.0, np.float32), g.const(-1e9, np.float32))
