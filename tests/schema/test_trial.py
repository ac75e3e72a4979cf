"""Graphs built by hand, apart from graphs.py: a full run of plain onnxruntime is the answer."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from ortkv import Generator, inspect
from ortkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

VOCAB, DIM, HEADS, HEAD, ROPE, MOST = 29, 16, 4, 4, 4, 64
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2]]
BATCH = "batch"


class Nodes:
    """Nodes, weights, inputs and outputs, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._random, self._names = np.random.default_rng(5), count()

    def input(self, name: str, dtype: int, dims: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, dims))
        return name

    def output(self, name: str, dims: Sequence[int | str], wire: str) -> None:
        self.nodes.append(helper.make_node("Identity", [wire], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, FLOAT, dims))

    def const(self, value: object, dtype: type = np.int64) -> str:
        name = f"c{next(self._names)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def random(self, *dims: int, scale: float = 0.5) -> str:
        return self.const(self._random.standard_normal(dims) * scale, np.float32)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{next(self._names)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def cut(self, wire: str, start: int, end: int, axis: int) -> str:
        return self.op("Slice", wire, *(self.const([i]) for i in (start, end, axis)))

    def heads(self, wire: str, depth: int = HEAD) -> str:
        split = self.op("Reshape", wire, self.const([0, 0, HEADS, depth]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotated(self, wire: str, cos: str, sin: str) -> str:
        half = ROPE // 2
        swapped = self.op(
            "Concat", self.op("Neg", self.cut(wire, half, ROPE, -1)), self.cut(wire, 0, half, -1),
            axis=-1,
        )  # fmt: skip
        return self.op("Add", self.op("Mul", wire, cos), self.op("Mul", swapped, sin))

    def attention(self, query: str, key: str, value: str, bias: str) -> str:
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        weights = self.op("Softmax", self.op("Add", scores, bias), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.const([0, 0, DIM]))

    def save(self, path: Path) -> Path:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", 17)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def tables() -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(MOST)[:, None] / 100 ** (np.arange(0, ROPE, 2) / ROPE)
    angles = np.concatenate([angles, angles], axis=-1)
    return np.cos(angles), np.sin(angles)


def places(g: Nodes, ids: str, past: str, axis: int) -> tuple[str, str, str]:
    """0-d total, [query_len] rows and [total] columns."""
    past_len = g.op("Gather", g.op("Shape", past), g.const(axis))
    total = g.op("Add", past_len, g.op("Gather", g.op("Shape", ids), g.const(1)))
    rows = g.op("Range", past_len, total, g.const(1))
    return total, rows, g.op("Range", g.const(0), total, g.const(1))


def bias_of(g: Nodes, rows: str, columns: str, mask: str) -> str:
    causal = g.op(
        "LessOrEqual",
        g.op("Unsqueeze", columns, g.const([0])),
        g.op("Unsqueeze", rows, g.const([1])),
    )
    open_ = g.op("Unsqueeze", g.op("Cast", mask, to=TensorProto.BOOL), g.const([1, 2]))
    return g.op("Where", g.op("And", causal, open_), g.const(0, np.float32),
                g.const(-1e9, np.float32))  # fmt: skip


def started(g: Nodes) -> tuple[str, str, str, str]:
    ids = g.input("input_ids", INT64, [BATCH, "seq"])
    mask = g.input("attention_mask", INT64, [BATCH, "total"])
    positions = g.input("position_ids", INT64, [BATCH, "seq"])
    return ids, mask, positions, g.op("Gather", g.random(VOCAB, DIM, scale=1.0), ids)


def finished(g: Nodes, hidden: str) -> None:
    g.output("logits", [BATCH, "seq", VOCAB], g.op("MatMul", hidden, g.random(DIM, VOCAB)))


def rotated_after_the_join(path: Path, how: str) -> Path:
    """Keys cached as projected; ``how``: what rotates all of them in each run."""
    g = Nodes()
    ids, mask, positions, hidden = started(g)
    dims: list[int | str] = [BATCH, HEADS, "past", HEAD]
    past_key = g.input("past_key_values.0.key", FLOAT, dims)
    past_value = g.input("past_key_values.0.value", FLOAT, dims)
    total, rows, columns = places(g, ids, past_key, 2)
    cos, sin = (g.const(table, np.float32) for table in tables())
    all_positions = columns
    if how == "mask":
        summed = g.op("Sub", g.op("CumSum", mask, g.const(1)), g.const(1))
        all_positions = g.op("Max", summed, g.const(0))

    def of(table: str, at: str) -> str:
        found = g.op("Gather", table, at)
        return g.op("Unsqueeze", found, g.const([1])) if at != columns else found

    key_angles = [of(table, all_positions) for table in (cos, sin)]
    if how == "slice":
        end = g.op("Unsqueeze", total, g.const([0]))
        key_angles = [g.op("Slice", t, g.const([0]), end, g.const([0])) for t in (cos, sin)]
    query, key, value = (g.heads(g.op("MatMul", hidden, g.random(DIM, DIM))) for _ in range(3))
    key = g.op("Concat", past_key, key, axis=2)
    value = g.op("Concat", past_value, value, axis=2)
    query = g.rotated(query, of(cos, positions), of(sin, positions))
    bias = bias_of(g, rows, columns, mask)
    mixed = g.attention(query, g.rotated(key, key_angles[0], key_angles[1]), value, bias)
    finished(g, g.op("Add", hidden, mixed))
    g.output("present.0.key", [BATCH, HEADS, "total", HEAD], key)
    g.output("present.0.value", [BATCH, HEADS, "total", HEAD], value)
    return g.save(path)


def latent(path: Path, names: tuple[str, str, str, str]) -> Path:
    """Two caches [B, S, D]: a latent that keys and values are projected from, and rotated keys."""
    g = Nodes()
    ids, mask, positions, hidden = started(g)
    past_latent = g.input(names[0], FLOAT, [BATCH, "past", 6])
    past_rope = g.input(names[1], FLOAT, [BATCH, "past", ROPE])
    _, rows, columns = places(g, ids, past_latent, 1)
    cos, sin = (g.op("Gather", g.const(table, np.float32), positions) for table in tables())
    rope = g.rotated(g.op("MatMul", hidden, g.random(DIM, ROPE)), cos, sin)
    latents = g.op("Concat", past_latent, g.op("MatMul", hidden, g.random(DIM, 6)), axis=1)
    ropes = g.op("Concat", past_rope, rope, axis=1)
    query, key, value = (g.heads(g.op("MatMul", *pair)) for pair in (
        (hidden, g.random(DIM, DIM)), (latents, g.random(6, DIM)), (latents, g.random(6, DIM))
    ))  # fmt: skip
    rotated = g.heads(g.op("MatMul", hidden, g.random(DIM, DIM)))
    across = [g.op("Unsqueeze", wire, g.const([1])) for wire in (cos, sin, ropes)]
    query = g.op("Concat", query, g.rotated(rotated, across[0], across[1]), axis=-1)
    shared = g.op("Tile", across[2], g.const([1, HEADS, 1, 1]))
    key = g.op("Concat", key, shared, axis=-1)
    finished(
        g, g.op("Add", hidden, g.attention(query, key, value, bias_of(g, rows, columns, mask)))
    )
    g.output(names[2], [BATCH, "total", 6], latents)
    g.output(names[3], [BATCH, "total", ROPE], ropes)
    return g.save(path)


def full_run(path: Path) -> Callable[[list[int]], np.ndarray]:
    """The last token's logits by one run of plain onnxruntime over an empty cache."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    sizes: dict[Any, Any] = {BATCH: 1, "past": 0}
    pasts = {
        i.name: np.zeros([sizes.get(d, d) for d in i.shape], np.float32)
        for i in session.get_inputs() if "float" in i.type
    }  # fmt: skip

    def run(ids: list[int]) -> np.ndarray:
        feeds = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids))[None],
        }
        return np.asarray(session.run(["logits"], feeds | pasts)[0])[0, -1]

    return run


def check_rows(path: Path, generator: Generator) -> None:
    """Steps, a rewind and unequal rows give what full runs give."""
    run = full_run(path)
    sequence = generator.start(PROMPTS[0]).extend([7]).extend([2, 8])
    np.testing.assert_allclose(sequence.logits, run([*PROMPTS[0], 7, 2, 8]), atol=1e-3)
    sequence.rewind(2).extend([6])
    np.testing.assert_allclose(sequence.logits, run([*PROMPTS[0][:2], 6]), atol=1e-3)
    found = generator.generate_ids(PROMPTS, max_new_tokens=6, do_sample=False)
    for prompt, new in zip(PROMPTS, found, strict=True):
        assert len(new) == 6
        for i, token in enumerate(new):
            scores = run(prompt + new[:i])
            assert scores[token] > scores.max() - 1e-3


@pytest.mark.parametrize(("how", "ragged"), [("range", False), ("slice", False), ("mask", True)])
def test_keys_rotated_after_the_join(tmp_path: Path, how: str, ragged: bool) -> None:
    """Rotated by where they lie in the cache, padding would shift keys: no ragged rows."""
    path = rotated_after_the_join(tmp_path / "model.onnx", how)
    generator = Generator(path, certify=False)
    assert generator.schema.takes_ragged_rows is ragged
    check_rows(path, generator)
    assert Generator(path).schema == generator.schema


OWN = ("past_latent", "past_k_rope", "present_latent", "present_k_rope")
USUAL = ("past_key_values.0.key", "past_key_values.0.value", "present.0.key", "present.0.value")


def test_latents_run_as_the_message_says(tmp_path: Path) -> None:
    path = latent(tmp_path / "model.onnx", OWN)
    with pytest.raises(UnsupportedModel) as caught:
        inspect(path)
    settled = re.search(r'{"kv_map": (.*)} in ortkv.json', str(caught.value))
    assert settled is not None
    check_rows(path, Generator(path, kv_map=json.loads(settled[1])))


def test_latents_under_usual_names(tmp_path: Path) -> None:
    """The name says key and the rotated part is one: the message shows what to state."""
    path = latent(tmp_path / "model.onnx", USUAL)
    with pytest.raises(UnsupportedModel, match=r"the cache is incomplete.*kv_map.*0\.value"):
        inspect(path)
    entries = [
        {"past": USUAL[0], "role": "value", "layer": 0},
        {"past": USUAL[1], "role": "key", "layer": 0},
    ]
    check_rows(path, Generator(path, kv_map={"entries": entries}))


def test_tokens_without_a_batch_axis_are_refused_at_once(tmp_path: Path) -> None:
    path = rotated_after_the_join(tmp_path / "model.onnx", "range")
    model = onnx.load(path)
    ids = model.graph.input[0]
    del ids.type.tensor_type.shape.dim[0]
    axis = helper.make_tensor("axis", INT64, [1], [0])
    for node in model.graph.node:
        node.input[:] = ["ids2d" if name == "input_ids" else name for name in node.input]
    model.graph.initializer.append(axis)
    model.graph.node.insert(0, helper.make_node("Unsqueeze", ["input_ids", "axis"], ["ids2d"]))
    onnx.save(model, path)
    with pytest.raises(UnsupportedModel, match=r"input_ids.*without a batch axis"):
        inspect(path)
