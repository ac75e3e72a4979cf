"""Tiny attention decoders as ONNX graphs, their axes chosen by the caller.

Residual attention layers over a token embedding, no MLP, no positions but the causal mask:
all that a cache needs to matter. Weights are seeded; all but the cache is float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

INPUT_IDS, MASK, LOGITS, USE_CACHE = "input_ids", "attention_mask", "logits", "use_cache_branch"
CANONICAL = "BHSD"


def optimum_name(side: str, layer: int, role: str) -> str:
    """optimum's and the ONNX Runtime GenAI builder's names."""
    return f"{'past_key_values' if side == 'past' else 'present'}.{layer}.{role}"


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a graph is like. ``name`` gives a cache tensor's name from side, layer and role.

    attention: 'plain' (MatMul and Softmax), 'gqa_mask' (GroupQueryAttention, its lengths
    from the mask) or 'gqa_shape' (its lengths from the past's own shape).
    layouts: of the key and of the value.   merged: an ``If`` over use_cache_branch.
    update: 'concat' or 'delta' (presents are the new tokens alone).
    stacked: what one tensor holds: '' a key or a value; '2' a layer's key and value on an axis
    in front, '2D' side by side on the last axis; 'L' every layer's keys (or values); 'L2' all.
    """

    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 4
    vocab_size: int = 11
    seed: int = 0
    attention: str = "plain"
    layouts: tuple[str, str] = (CANONICAL, CANONICAL)
    name: Callable[[str, int, str], str] = optimum_name
    merged: bool = False
    update: str = "concat"
    stacked: str = ""
    cache_dtype: int = TensorProto.FLOAT

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


def weights(design: Design) -> dict[str, NDArray[np.float32]]:
    """Every weight by the name it has in the graph."""
    random = np.random.default_rng(design.seed)
    width, vocab = design.width, design.vocab_size

    def draw(*shape: int) -> NDArray[np.float32]:
        return random.normal(0.0, 0.6, shape).astype(np.float32)

    found = {"embedding": draw(vocab, width), "head": draw(width, vocab)}
    for layer in range(design.num_layers):
        found |= {f"{part}_{layer}": draw(width, width) for part in ("wq", "wk", "wv", "wo")}
    return found


def full_logits(design: Design, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[len(tokens), vocab_size]: the decoder in numpy, every token at once, no cache."""
    w = {name: array.astype(np.float64) for name, array in weights(design).items()}
    x = w["embedding"][np.array(tokens)]
    for layer in range(design.num_layers):
        q, k, v = (
            (x @ w[f"{part}_{layer}"]).reshape(-1, design.num_heads, design.head_dim).swapaxes(0, 1)
            for part in ("wq", "wk", "wv")
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(design.head_dim)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(len(tokens), -1) @ w[f"wo_{layer}"]
    return (x @ w["head"]).astype(np.float32)


def decoder(design: Design) -> onnx.ModelProto:
    """The graph of a design."""
    inputs = [
        helper.make_tensor_value_info(INPUT_IDS, TensorProto.INT64, ["batch", "query_len"]),
        helper.make_tensor_value_info(MASK, TensorProto.INT64, ["batch", "kv_len"]),
    ]
    outputs = [_value(LOGITS, ["batch", "query_len", design.vocab_size])]
    for layer, role in tensors(design):
        inputs.append(_cache_value(design, "past", layer, role))
        outputs.append(_cache_value(design, "present", layer, role))
    nodes = _body(design, with_past=True)
    if design.merged:
        inputs.append(helper.make_tensor_value_info(USE_CACHE, TensorProto.BOOL, [1]))
        nodes = [_merged(design, [value.name for value in outputs])]
    constants = [
        numpy_helper.from_array(a, n) for n, a in (weights(design) | _numbers(design)).items()
    ]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _value(name: str, dims: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def tensors(design: Design) -> list[tuple[int, str]]:
    """(first layer, role) of each cache tensor; role 'key_value' where it holds both."""
    layers = [0] if design.stacked in ("L", "L2") else range(design.num_layers)
    roles = ["key_value"] if design.stacked in ("2", "2D", "L2") else ["key", "value"]
    return [(layer, role) for layer in layers for role in roles]


def layout_of(design: Design, role: str) -> str:
    """A tensor's axes; 'd' is the last axis of '2D', twice head_dim."""
    plain = design.layouts[1] if role == "value" else design.layouts[0]
    if design.stacked == "2D":
        return plain.replace("D", "d")
    return {"": "", "2": "2", "L": "L", "L2": "L2"}[design.stacked] + plain


def _cache_value(design: Design, side: str, layer: int, role: str) -> onnx.ValueInfoProto:
    lengths = {"past": "past_len", "present": "kv_len"}
    if design.update == "delta":
        lengths["present"] = "query_len"
    sizes: dict[str, Any] = {
        "B": "batch",
        "H": design.num_heads,
        "D": design.head_dim,
        "d": 2 * design.head_dim,
        "S": lengths[side],
        "2": 2,
        "L": design.num_layers,
    }
    dims = [sizes[letter] for letter in layout_of(design, role)]
    return helper.make_tensor_value_info(design.name(side, layer, role), design.cache_dtype, dims)


def _numbers(design: Design) -> dict[str, NDArray[Any]]:
    return {
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "axis_0": np.array([0], np.int64),
        "axis_1": np.array([1], np.int64),
        "axes_1_2": np.array([1, 2], np.int64),
        "halves": np.array([design.head_dim] * 2, np.int64),
        "open": np.array(0.0, np.float32),
        "shut": np.array(-1e9, np.float32),
    }


@dataclass
class _Nodes:
    """Nodes so far. ``add`` returns the name of what it makes."""

    found: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])

    def add(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        out = to or f"v{len(self.found)}_{kind}"
        self.found.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out


def _body(design: Design, *, with_past: bool) -> list[onnx.NodeProto]:
    nodes = _Nodes()
    helpers = (_plain_helpers if design.attention == "plain" else _gqa_helpers)(
        design, nodes, with_past
    )
    presents: dict[tuple[int, str], str] = {}
    x = nodes.add("Gather", "embedding", INPUT_IDS)
    for layer in range(design.num_layers):
        qkv = [nodes.add("MatMul", x, f"{part}_{layer}") for part in ("wq", "wk", "wv")]
        if design.attention == "plain":
            mixed = _plain_attention(design, nodes, layer, qkv, helpers, with_past, presents)
        else:
            mixed = _gqa(design, nodes, layer, qkv, helpers, with_past)
        x = nodes.add("Add", x, nodes.add("MatMul", mixed, f"wo_{layer}"))
    nodes.add("MatMul", x, "head", to=LOGITS)
    if presents:
        _put_out(design, nodes, presents)
    return nodes.found


def _put_out(design: Design, nodes: _Nodes, presents: dict[tuple[int, str], str]) -> None:
    """Stack the layers' presents as the design wants them, under their output names."""
    if design.cache_dtype != TensorProto.FLOAT:
        presents = {key: _cast(nodes, wire, design.cache_dtype) for key, wire in presents.items()}
    for layer, role in tensors(design):
        out = design.name("present", layer, role)
        roles = ["key", "value"] if role == "key_value" else [role]
        if design.stacked == "":
            nodes.add("Identity", presents[layer, role], to=out)
        elif design.stacked == "2D":
            last = design.layouts[0].index("D")
            nodes.add("Concat", *(presents[layer, r] for r in roles), to=out, axis=last)
        else:
            layers = range(design.num_layers) if "L" in design.stacked else [layer]
            stacks = [
                _stack(nodes, [presents[i, r] for r in roles]) if "2" in design.stacked
                else presents[i, role]
                for i in layers
            ]  # fmt: skip
            whole = _stack(nodes, stacks) if "L" in design.stacked else stacks[0]
            nodes.add("Identity", whole, to=out)


def _stack(nodes: _Nodes, parts: list[str]) -> str:
    return nodes.add("Concat", *(nodes.add("Unsqueeze", p, "axis_0") for p in parts), axis=0)


def _past_part(design: Design, nodes: _Nodes, layer: int, role: str) -> str:
    """The past of one layer and role, in its own layout, out of whatever tensor it is in."""
    if design.stacked == "":
        return design.name("past", layer, role)
    both = design.stacked != "L"
    first = 0 if "L" in design.stacked else layer
    part = design.name("past", first, "key_value" if both else role)
    if design.stacked == "2D":
        return _half(design, nodes, part, layer, role)
    if "L" in design.stacked:
        part = nodes.add("Gather", part, nodes.add("Constant", value_int=layer), axis=0)
    if "2" in design.stacked:
        index = nodes.add("Constant", value_int=("key", "value").index(role))
        part = nodes.add("Gather", part, index, axis=0)
    return part


def _half(design: Design, nodes: _Nodes, part: str, layer: int, role: str) -> str:
    """Key or value from side by side on the last axis, by Split."""
    outs = [f"half_{layer}_{role}_{i}" for i in range(2)]
    nodes.found.append(
        helper.make_node("Split", [part, "halves"], outs, axis=design.layouts[0].index("D"))
    )
    return outs[("key", "value").index(role)]


def _merged(design: Design, outputs: list[str]) -> onnx.NodeProto:
    """optimum's merged decoder: one branch with the past, one without."""
    branches = {}
    for label, with_past in (("then_branch", True), ("else_branch", False)):
        graph = helper.make_graph(_body(design, with_past=with_past), label, [], [])
        for node in graph.node:
            renamed = [f"{label}/{name}" if name in outputs else name for name in node.output]
            node.output[:] = renamed
        graph.output.extend(onnx.ValueInfoProto(name=f"{label}/{name}") for name in outputs)
        for value in graph.output:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        # Presents are read again within the branch under their new names.
        for node in graph.node:
            node.input[:] = [f"{label}/{n}" if n in outputs else n for n in node.input]
        branches[label] = graph
    return helper.make_node("If", [USE_CACHE], outputs, **branches)


def _length(nodes: _Nodes, source: str, axis: int) -> str:
    """A scalar: one axis' size."""
    index = nodes.add("Constant", value_int=axis)
    return nodes.add("Gather", nodes.add("Shape", source), index, axis=0)


def _past_len(design: Design, nodes: _Nodes, with_past: bool) -> str:
    if not with_past:
        return "zero"
    layer, role = tensors(design)[0]
    axis = layout_of(design, role).index("S")
    return _length(nodes, design.name("past", layer, role), axis)


def _plain_helpers(design: Design, nodes: _Nodes, with_past: bool) -> list[str]:
    """[batch, 1, query_len, kv_len]: what to add to the scores, causal and masked."""
    past_len = _past_len(design, nodes, with_past)
    kv_len = nodes.add("Add", past_len, _length(nodes, INPUT_IDS, 1))
    queries = nodes.add("Unsqueeze", nodes.add("Range", past_len, kv_len, "one"), "axis_1")
    keys = nodes.add("Unsqueeze", nodes.add("Range", "zero", kv_len, "one"), "axis_0")
    causal = nodes.add("GreaterOrEqual", queries, keys)
    own = _cast(nodes, nodes.add("Unsqueeze", MASK, "axes_1_2"), TensorProto.BOOL)
    seen = nodes.add("And", causal, own)
    return [nodes.add("Where", seen, "open", "shut")]


def _plain_attention(
    design: Design,
    nodes: _Nodes,
    layer: int,
    qkv: list[str],
    helpers: list[str],
    with_past: bool,
    presents: dict[tuple[int, str], str],
) -> str:
    heads = nodes.add("Constant", value_ints=[0, 0, design.num_heads, design.head_dim])
    q, *new = (_transposed(nodes, nodes.add("Reshape", x, heads), "BSHD", to)
               for x, to in zip(qkv, (CANONICAL, *design.layouts), strict=True))  # fmt: skip
    whole = []
    for role, layout, fresh in zip(("key", "value"), design.layouts, new, strict=True):
        joined = fresh
        if with_past:
            past = _past_part(design, nodes, layer, role)
            if design.cache_dtype != TensorProto.FLOAT:
                past = _cast(nodes, past, TensorProto.FLOAT)
            joined = nodes.add("Concat", past, fresh, axis=layout.index("S"))
        presents[layer, role] = fresh if design.update == "delta" else joined
        wanted = "BHDS" if role == "key" else CANONICAL
        whole.append(_transposed(nodes, joined, layout, wanted))
    root = nodes.add("Constant", value_float=float(np.sqrt(design.head_dim)))
    scores = nodes.add("Div", nodes.add("MatMul", q, whole[0]), root)
    shares = nodes.add("Softmax", nodes.add("Add", scores, helpers[0]), axis=-1)
    mixed = _transposed(nodes, nodes.add("MatMul", shares, whole[1]), CANONICAL, "BSHD")
    return nodes.add("Reshape", mixed, nodes.add("Constant", value_ints=[0, 0, design.width]))


def _transposed(nodes: _Nodes, source: str, old: str, new: str) -> str:
    if old == new:
        return source
    return nodes.add("Transpose", source, perm=[old.index(letter) for letter in new])


def _gqa_helpers(design: Design, nodes: _Nodes, with_past: bool) -> list[str]:
    """seqlens_k [batch] and total_sequence_length, int32 both."""
    if design.attention == "gqa_mask":
        counted = nodes.add("ReduceSum", MASK, "axis_1", keepdims=0)
        last, total = nodes.add("Sub", counted, "one"), _length(nodes, MASK, 1)
    else:
        past_len = _past_len(design, nodes, with_past)
        total = nodes.add("Add", past_len, _length(nodes, INPUT_IDS, 1))
        batch = nodes.add("Unsqueeze", _length(nodes, INPUT_IDS, 0), "axis_0")
        last = nodes.add("Expand", nodes.add("Sub", total, "one"), batch)
    return [_cast(nodes, name, TensorProto.INT32) for name in (last, total)]


def _gqa(
    design: Design, nodes: _Nodes, layer: int, qkv: list[str], helpers: list[str], with_past: bool
) -> str:
    roles = ("key", "value")
    past = [design.name("past", layer, role) if with_past else "" for role in roles]
    out = f"mixed_{layer}"
    nodes.found.append(
        helper.make_node(
            "GroupQueryAttention",
            [*qkv, *past, *helpers],
            [out, *(design.name("present", layer, role) for role in roles)],
            domain="com.microsoft",
            num_heads=design.num_heads,
            kv_num_heads=design.num_heads,
        )
    )
    return out


def _cast(nodes: _Nodes, source: str, dtype: int) -> str:
    out = f"{source}_as_{dtype}"
    nodes.found.append(helper.make_node("Cast", [source], [out], to=dtype))
    return out
