"""Tiny decoders with their schemas written out: a graph's layers each of a rule of their own.

Every layer adds to a residual stream of token and position embeddings. ``full_logits`` is the
same decoder in numpy, every token at once and without a cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from ortkv.decoder import LoadedGraph
from ortkv.runtime import CPU
from ortkv.schema import CacheEntry, CacheSchema, HelperInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HEADS, DEPTH, VOCAB, KERNEL, MOST = 2, 4, 11, 3, 96
WIDTH = HEADS * DEPTH


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. kind: 'attention', 'cross', 'conv' or 'recurrent'; the rest is its cache's.

    sees_shifted: a window's attention looks at what it keeps, the new tokens among it.
    mask: the input that says which keys are seen.
    """

    kind: str = "attention"
    update: Any = "concat"
    layouts: tuple[str, str] = ("BHSD", "BHSD")
    capacity: int | None = None
    window: int | None = None
    sees_shifted: bool = False
    mask: str = "mask"

    @property
    def reach(self) -> int:
        """How many tokens before itself a query sees."""
        slides = self.update == "window" or self.window is not None
        most = (self.capacity or self.window) if slides else None
        return MOST if most is None else most - self.sees_shifted


@dataclass(frozen=True, kw_only=True)
class Design:
    """A decoder. masks: (name, kind, values, dtype, fixed width) each.

    cross: where a cross-attention's keys come from: 'if' (a branch of the graph for first runs),
    'first' (this is the graph of first runs) or 'read' (they are only read).
    """

    layers: tuple[Layer, ...]
    masks: tuple[tuple[str, Any, Any, str, int | None], ...] = (
        ("mask", "mask_4d", "keep", "bool", None),
    )
    row_alignment: Any = "end"
    fixed_query_len: int | None = None
    cross: str = "if"
    embeds: bool = False
    logits_dtype: str = "float32"


def weights(design: Design) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)

    def draw(*shape: int) -> NDArray[np.float32]:
        return random.normal(0.0, 0.5, shape).astype(np.float32)

    found = {"tokens": draw(VOCAB, WIDTH), "places": draw(MOST, WIDTH), "head": draw(WIDTH, VOCAB)}
    for i in range(len(design.layers)):
        found |= {f"{part}{i}": draw(WIDTH, WIDTH) for part in ("q", "k", "v", "o")}
        found |= {f"taps{i}": draw(KERNEL, WIDTH), f"gain{i}": 0.2 * draw(WIDTH)}
    return found


def _heads(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(len(x), HEADS, DEPTH).swapaxes(0, 1)


def full_logits(
    design: Design, tokens: Sequence[int], states: NDArray[Any] | None = None
) -> NDArray[np.float32]:
    """[vocab]: the scores after the last token. states: [source_len, width] a row's own."""
    w = {name: array.astype(np.float64) for name, array in weights(design).items()}
    count = len(tokens)
    x = w["tokens"][np.array(tokens)] + w["places"][:count]
    distance = np.arange(count)[:, None] - np.arange(count)
    for i, layer in enumerate(design.layers):
        if layer.kind == "conv":
            padded = np.concatenate([np.zeros((KERNEL - 1, WIDTH)), x])
            x = x + sum(w[f"taps{i}"][k] * padded[k : k + count] for k in range(KERNEL))
        elif layer.kind == "recurrent":
            x = x + np.cumsum(x, axis=0) * w[f"gain{i}"]
        else:
            seen = x if layer.kind == "attention" else states
            assert seen is not None
            q, k, v = (_heads(a @ w[f"{n}{i}"]) for a, n in ((x, "q"), (seen, "k"), (seen, "v")))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(DEPTH)
            if layer.kind == "attention":
                scores = np.where((distance >= 0) & (distance <= layer.reach), scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (shares / shares.sum(-1, keepdims=True)) @ v
            x = x + mixed.swapaxes(0, 1).reshape(count, WIDTH) @ w[f"o{i}"]
    return (x @ w["head"])[-1].astype(np.float32)


def loaded(design: Design, **more: Any) -> LoadedGraph:
    """The design's graph, ready for a Decoder."""
    builder = _Builder(design)
    return LoadedGraph(session=builder.session(), schema=builder.schema(), device=CPU, **more)


def embedding_session(design: Design) -> Any:
    """[batch, query_len] int32 'ids' -> [batch, query_len, width] 'embeds'."""
    node = helper.make_node("Gather", ["tokens", "ids"], ["embeds"])
    ids = helper.make_tensor_value_info("ids", TensorProto.INT32, ["b", "q"])
    out = helper.make_tensor_value_info("embeds", TensorProto.FLOAT, ["b", "q", WIDTH])
    table = numpy_helper.from_array(weights(design)["tokens"], "tokens")
    return _session(helper.make_graph([node], "embedding", [ids], [out], [table]))


def _session(graph: onnx.GraphProto) -> Any:
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


ONNX = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


class _Builder:
    """Writes the nodes of one design, and what its schema says of each tensor."""

    def __init__(self, design: Design) -> None:
        self.design = design
        self.nodes: list[onnx.NodeProto] = []
        self.constants = [numpy_helper.from_array(a, n) for n, a in weights(design).items()]
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.helpers: list[HelperInput] = []
        self.entries: list[CacheEntry] = []
        self._build()

    def session(self) -> Any:
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self.constants)
        return _session(graph)

    def schema(self) -> CacheSchema:
        design = self.design
        return CacheSchema(
            tokens="new",
            tokens_dtype="float32" if design.embeds else "int64",
            fixed_batch=None,
            fixed_query_len=design.fixed_query_len,
            one_token_steps=False,
            quantized=False,
            row_alignment=design.row_alignment,
            takes_ragged_rows=True,
            helpers=tuple(self.helpers),
            logits="logits",
            logits_dtype=design.logits_dtype,
            logits_dims=("b", "q", VOCAB),
            entries=tuple(self.entries),
            embeds=design.embeds,
        )

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def number(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def take(self, name: str, dtype: str, dims: Sequence[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, ONNX[dtype], dims))
        return name

    def give(self, wire: str, name: str, dims: Sequence[Any], dtype: str = "float32") -> None:
        self.nodes.append(helper.make_node("Cast", [wire], [name], to=ONNX[dtype]))
        self.outputs.append(helper.make_tensor_value_info(name, ONNX[dtype], dims))

    def help(
        self, name: str, kind: Any, dtype: str, dims: Sequence[Any], values: Any = "keep"
    ) -> str:
        self.helpers.append(
            HelperInput(name=name, kind=kind, dtype=dtype, dims=tuple(dims), values=values)
        )
        return self.take(name, dtype, dims)

    def size(self, wire: str, axis: int) -> str:
        """[1]: one axis' size."""
        return self.add("Shape", wire, start=axis, end=axis + 1)

    def up_to(self, size: str) -> str:
        return self.add("Range", self.number(0), self.add("Squeeze", size), self.number(1))

    def _build(self) -> None:
        design = self.design
        if design.embeds:
            x = self.take("new", "float32", ["b", "q", WIDTH])
        else:
            x = self.add("Gather", "tokens", self.take("new", "int64", ["b", "q"]))
        self.batch, self.query_len = self.size("new", 0), self.size("new", 1)
        x = self.add(
            "Add",
            x,
            self.add("Gather", "places", self.help("at", "positions", "int64", ["b", "q"])),
        )
        self.masks = {mask[0]: self._mask(*mask) for mask in design.masks}
        if any(layer.update == "scatter" for layer in design.layers):
            is_start = design.row_alignment == "start"
            kind = "past_length" if is_start else "cache_position"
            self.help("write", kind, "int64", ["b" if is_start else "q"])
        if any(layer.kind == "cross" for layer in design.layers):
            self._cross_helpers()
        for i, layer in enumerate(design.layers):
            x = self.add("Add", x, getattr(self, f"_{layer.kind}")(i, layer, x))
        self.give(self.add("MatMul", x, "head"), "logits", ["b", "q", VOCAB], design.logits_dtype)

    def _mask(self, name: str, kind: Any, values: Any, dtype: str, width: int | None) -> str:
        """[batch, 1, query_len, key_len] float: what to add to the scores."""
        dims = ["b", width or f"{name}_len"]
        if kind == "mask_4d":
            dims[1:1] = [1, "q"]
        mask = self.help(name, kind, dtype, dims, values)
        if kind == "mask_2d":
            mask = self.add("Unsqueeze", mask, self.number([1, 2]))
        if values == "additive":
            return self.add("Cast", mask, to=1)
        shown = self.add("Cast", mask, to=9)
        wires = [self.number(0.0, np.float32), self.number(-1e9, np.float32)]
        return self.add("Where", shown, *(wires if values == "keep" else wires[::-1]))

    def _cross_helpers(self) -> None:
        design = self.design
        shown = self.add(
            "Cast", self.help("source_mask", "encoder_mask", "int64", ["b", "s"]), to=9
        )
        shown = self.add("Unsqueeze", shown, self.number([1, 2]))
        wires = [self.number(0.0, np.float32), self.number(-1e9, np.float32)]
        self.masks["source"] = self.add("Where", shown, *wires)
        if design.cross != "read":
            self.help("source", "encoder_states", "float32", ["b", "s", WIDTH])
        if design.cross == "if":
            self.help("use_cache", "use_cache_branch", "bool", [1])

    def _split(self, x: str, weight: str) -> str:
        """[batch, heads, length, head_dim]."""
        shape = self.number([0, 0, HEADS, DEPTH])
        return self.add(
            "Transpose",
            self.add("Reshape", self.add("MatMul", x, weight), shape),
            perm=[0, 2, 1, 3],
        )

    def _entry(self, i: int, layer: Layer, role: Any, layout: str, **more: Any) -> tuple[str, str]:
        past, present = f"past.{i}.{role}", f"present.{i}.{role}"
        fields: dict[str, Any] = {
            "layer": i, "role": role, "past": past, "present": present, "layout": layout,
            "update": layer.update, "dtype": "float32", "num_kv_heads": HEADS, "head_dim": DEPTH,
            "evidence": (), "capacity": layer.capacity, "window": layer.window,
        }  # fmt: skip
        self.entries.append(CacheEntry(**(fields | more)))
        return past, present

    def _attention(self, i: int, layer: Layer, x: str) -> str:
        keys = []
        for role, layout in zip(("key", "value"), layer.layouts, strict=True):
            past, present = self._entry(i, layer, role, layout)
            rank = len(re.findall(r"\(.*?\)|.", layout))
            old = self._canonical(
                self.take(past, "float32", [f"{past}.{n}" for n in range(rank)]), layout
            )
            new = self._split(x, f"{role[0]}{i}")
            seen, kept = self._updated(layer, old, new)
            self.give(
                self._in_layout(kept, layout), present, [f"{present}.{n}" for n in range(rank)]
            )
            keys.append(seen)
        mask = self.masks[layer.mask]
        if (
            layer.update in ("window", "delta")
            and layer.capacity is None
            and layer.window is not None
        ):
            start = self.add("Neg", self.size(keys[0], 2))
            mask = self.add("Slice", mask, start, self.number([MOST]), self.number([3]))
        return self._mixed(i, x, keys[0], keys[1], mask)

    def _mixed(self, i: int, x: str, keys: str, values: str, mask: str) -> str:
        query = self.add("Div", self._split(x, f"q{i}"), self.number(np.sqrt(DEPTH), np.float32))
        scores = self.add("MatMul", query, self.add("Transpose", keys, perm=[0, 1, 3, 2]))
        shares = self.add("Softmax", self.add("Add", scores, mask), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", shares, values), perm=[0, 2, 1, 3])
        return self.add("MatMul", self.add("Reshape", mixed, self.number([0, 0, WIDTH])), f"o{i}")

    def _updated(self, layer: Layer, old: str, new: str) -> tuple[str, str]:
        """The keys that attention sees, and what is given out."""
        if layer.update == "scatter":
            written = self._scattered(old, new)
            return written, written
        joined = self.add("Concat", old, new, axis=2)
        if layer.update == "delta":
            return joined, new
        if layer.update == "window":
            most = layer.capacity or layer.window or 0
            kept = self.add(
                "Slice", joined, self.number([-most]), self.number([MOST]), self.number([2])
            )
            return (kept if layer.sees_shifted else joined), kept
        return joined, joined

    def _scattered(self, old: str, new: str) -> str:
        """Every row's new tokens at 'write' and after, or all rows' at the places of 'write'."""
        if self.design.row_alignment == "start":
            first = self.add("Unsqueeze", "write", self.number([1]))
            places = self.add("Add", first, self.up_to(self.query_len))
        else:
            places = self.add("Unsqueeze", "write", self.number([0]))
        slots = self.up_to(self.size(old, 2))
        hits = self.add(
            "Equal",
            self.add("Unsqueeze", places, self.number([1])),
            self.add("Unsqueeze", slots, self.number([1])),
        )
        hits = self.add("Unsqueeze", self.add("Cast", hits, to=1), self.number([1]))
        hit = self.add("ReduceSum", hits, self.number([-1]), keepdims=1)
        untouched = self.add("Mul", old, self.add("Sub", self.number(1.0, np.float32), hit))
        return self.add("Add", untouched, self.add("MatMul", hits, new))

    def _canonical(self, wire: str, layout: str) -> str:
        letters = re.sub(r"[()]", "", layout)
        sizes = {"B": self.batch, "H": self.number([HEADS]), "D": self.number([DEPTH])}
        sizes["S"] = self.number([-1])
        # An empty past has no size to infer another from: take it from the axis itself.
        axis = next(n for n, m in enumerate(re.findall(r"\(.*?\)|.", layout)) if m == "S")
        sizes["S"] = self.size(wire, axis)
        shape = self.add("Concat", *(sizes[letter] for letter in letters), axis=0)
        full = self.add("Reshape", wire, shape, allowzero=1)
        return self.add("Transpose", full, perm=[letters.index(letter) for letter in "BHSD"])

    def _in_layout(self, wire: str, layout: str) -> str:
        letters = re.sub(r"[()]", "", layout)
        turned = self.add("Transpose", wire, perm=["BHSD".index(letter) for letter in letters])
        sizes = {
            "B": self.batch, "H": self.number([HEADS]), "S": self.number([-1]),
            "D": self.number([DEPTH]), "(BH)": self.add("Mul", self.batch, self.number([HEADS])),
            "(HD)": self.number([WIDTH]),
        }  # fmt: skip
        groups = re.findall(r"\(.*?\)|.", layout)
        return self.add("Reshape", turned, self.add("Concat", *(sizes[g] for g in groups), axis=0))

    def _cross(self, i: int, layer: Layer, x: str) -> str:
        keys = []
        for role in ("cross_key", "cross_value"):
            fields: dict[str, Any] = {"update": "constant"}
            if self.design.cross == "first":
                fields["past"] = None
            if self.design.cross == "read":
                fields["present"] = None
            past, present = self._entry(i, layer, role, "BHSD", **fields)
            dims = ["b", HEADS, "s", DEPTH]
            if self.design.cross != "first":
                self.take(past, "float32", dims)
            keys.append(self._cross_keys(past, f"{role[6]}{i}"))
            if self.design.cross != "read":
                self.give(keys[-1], present, dims)
        return self._mixed(i, x, keys[0], keys[1], self.masks["source"])

    def _cross_keys(self, past: str, weight: str) -> str:
        if self.design.cross == "read":
            return past
        if self.design.cross == "first":
            return self._split("source", weight)
        computed, first_node = "", len(self.nodes)
        computed = self._split("source", weight)
        branches = {
            "then_branch": [helper.make_node("Identity", [past], [f"{past}.then"])],
            "else_branch": [
                *self.nodes[first_node:],
                helper.make_node("Identity", [computed], [f"{past}.else"]),
            ],
        }
        del self.nodes[first_node:]
        graphs = {
            label: helper.make_graph(
                nodes, label, [],
                [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
            )
            for label, nodes in branches.items()
        }  # fmt: skip
        self.nodes.append(
            helper.make_node("If", ["use_cache"], [f"{past}.whole"], **cast("Any", graphs))
        )
        return f"{past}.whole"

    def _conv(self, i: int, layer: Layer, x: str) -> str:
        """The state: [batch, width, kernel - 1], the inputs before."""
        past, present = self._entry(
            i, layer, "conv", "BXX", update="replace", state_dims=(WIDTH, KERNEL - 1)
        )
        dims = ["b", WIDTH, KERNEL - 1]
        turned = self.add("Transpose", x, perm=[0, 2, 1])
        joined = self.add("Concat", self.take(past, "float32", dims), turned, axis=2)
        last = [self.number([1 - KERNEL]), self.number([MOST]), self.number([2])]
        self.give(self.add("Slice", joined, *last), present, dims)
        rows = self.add("Transpose", joined, perm=[0, 2, 1])
        total = ""
        for k in range(KERNEL):
            start = self.number([k])
            stop = self.add("Add", start, self.query_len)
            part = self.add("Slice", rows, start, stop, self.number([1]))
            tap = self.add("Gather", f"taps{i}", self.number(k))
            part = self.add("Mul", part, tap)
            total = self.add("Add", total, part) if total else part
        return total

    def _recurrent(self, i: int, layer: Layer, x: str) -> str:
        """The state: [batch, width], the sum of the inputs before."""
        past, present = self._entry(
            i, layer, "recurrent", "BX", update="replace", state_dims=(WIDTH,)
        )
        before = self.add("Unsqueeze", self.take(past, "float32", ["b", WIDTH]), self.number([1]))
        sums = self.add("Add", self.add("CumSum", x, self.number(1)), before)
        last = self.add("Gather", sums, self.number(-1), axis=1)
        self.give(last, present, ["b", WIDTH])
        return self.add("Mul", sums, f"gain{i}")
