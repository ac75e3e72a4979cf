"""A Llama of 80 layers and 10 GB, as optimum writes it, whose weights are a hole in a file.

Attention in single ops, 160 caches, every shape computed from the tokens'; no disk is used.
``python -m attacks.large_model FOLDER`` measures ``ortkv inspect`` on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

HIDDEN, MLP, VOCAB = 2048, 3584, 32_000
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 64
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
INFO = helper.make_tensor_value_info
LOW = -3.4e38


@dataclass
class Large:
    """Nodes and weights so far; every weight has the next bytes of one file."""

    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    weights: list[onnx.TensorProto] = field(default_factory=list[onnx.TensorProto])
    num_bytes: int = 0

    def add(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> str:
        outs = [f"n{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outs, **attributes))
        return outs[0]

    def const(self, value: list[int] | float) -> str:
        dims = [len(value)] if isinstance(value, list) else []
        dtype = FLOAT if isinstance(value, float) else INT64
        values = value if isinstance(value, list) else [value]
        return self.add("Constant", value=helper.make_tensor("", dtype, dims, values))

    def weight(self, *dims: int) -> str:
        tensor = TensorProto(name=f"w{len(self.weights)}", dims=dims, data_type=FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        length = 4 * prod(dims)
        places = {"location": "model.onnx_data", "offset": self.num_bytes, "length": length}
        for key, place in places.items():
            tensor.external_data.add(key=key, value=str(place))
        self.num_bytes += length
        self.weights.append(tensor)
        return tensor.name

    def linear(self, x: str, width: int, out: int) -> str:
        return self.add("MatMul", x, self.weight(width, out))

    def norm(self, x: str) -> str:
        mean = self.add("ReduceMean", self.add("Pow", x, self.const(2.0)), self.const([-1]))
        root = self.add("Sqrt", self.add("Add", mean, self.const(1e-5)))
        scaled = self.add("Mul", x, self.add("Div", self.const(1.0), root))
        return self.add("Mul", self.weight(HIDDEN), scaled)

    def sizes(self, x: str, *rest: int) -> str:
        """[batch, query_len, ...] of the shape of x."""
        two = [
            self.add("Unsqueeze", self.add("Gather", self.add("Shape", x), self.const(axis)),
                     self.const([0]))
            for axis in (0, 1)
        ]  # fmt: skip
        return self.add("Concat", *two, *(self.const([n]) for n in rest), axis=0)

    def heads(self, x: str, count: int) -> str:
        split = self.add("Reshape", x, self.sizes(x, count, HEAD_DIM))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def rotated(self, x: str, cos: str, sin: str) -> str:
        halves = [
            self.add("Slice", x, self.const([a]), self.const([b]), self.const([3]))
            for a, b in ((0, HEAD_DIM // 2), (HEAD_DIM // 2, HEAD_DIM))
        ]
        turned = self.add("Concat", self.add("Neg", halves[1]), halves[0], axis=-1)
        return self.add("Add", self.add("Mul", x, cos), self.add("Mul", turned, sin))

    def repeated(self, cache: str) -> str:
        """The heads of a cache, each for as many heads of the query."""
        groups, shape = HEADS // KV_HEADS, self.add("Shape", cache)
        batch, _, length, _ = (
            self.add("Unsqueeze", self.add("Gather", shape, self.const(i)), self.const([0]))
            for i in range(4)
        )
        one = self.add("Unsqueeze", cache, self.const([2]))
        dim = self.const([HEAD_DIM])
        target = self.add(
            "Concat", batch, self.const([KV_HEADS]), self.const([groups]), length, dim, axis=0
        )
        whole = self.add("Concat", batch, self.const([HEADS]), length, dim, axis=0)
        return self.add("Reshape", self.add("Expand", one, target), whole)

    def layer(self, x: str, index: int, angles: tuple[str, str], mask: str) -> str:
        normed = self.norm(x)
        query = self.rotated(self.heads(self.linear(normed, HIDDEN, HIDDEN), HEADS), *angles)
        wide = KV_HEADS * HEAD_DIM
        key = self.rotated(self.heads(self.linear(normed, HIDDEN, wide), KV_HEADS), *angles)
        value = self.heads(self.linear(normed, HIDDEN, wide), KV_HEADS)
        key, value = self.joined(key, index, "key"), self.joined(value, index, "value")
        turned = self.add("Transpose", self.repeated(key), perm=[0, 1, 3, 2])
        scores = self.add("Mul", self.add("MatMul", query, turned), self.const(0.125))
        shares = self.add("Softmax", self.add("Add", scores, mask), axis=-1)
        mixed = self.add("MatMul", shares, self.repeated(value))
        rows = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        flat = self.add("Reshape", rows, self.sizes(rows, HIDDEN))
        x = self.add("Add", x, self.linear(flat, HIDDEN, HIDDEN))
        normed = self.norm(x)
        gate = self.linear(normed, HIDDEN, MLP)
        gate = self.add("Mul", gate, self.add("Sigmoid", gate))
        down = self.linear(self.add("Mul", gate, self.linear(normed, HIDDEN, MLP)), MLP, HIDDEN)
        return self.add("Add", x, down)

    def joined(self, new: str, index: int, role: str) -> str:
        name = f"present.{index}.{role}"
        past = f"past_key_values.{index}.{role}"
        self.nodes.append(helper.make_node("Concat", [past, new], [name], axis=2))
        return name


def large(num_layers: int, *, idle: int = 0) -> tuple[onnx.ModelProto, int]:
    """The graph, and how many bytes its weights take. ``idle``: further nodes in each layer."""
    g = Large()
    x = g.add("Gather", g.weight(VOCAB, HIDDEN), "input_ids")
    positions = g.add("Cast", g.add("Unsqueeze", "position_ids", g.const([2])), to=FLOAT)
    angles = g.add("MatMul", positions, g.weight(1, HEAD_DIM))
    angles = g.add("Unsqueeze", angles, g.const([1]))
    pair = (g.add("Cos", angles), g.add("Sin", angles))
    keep = g.add("Cast", g.add("Unsqueeze", "attention_mask", g.const([1, 2])), to=FLOAT)
    mask = g.add("Mul", g.add("Sub", g.const(1.0), keep), g.const(LOW))
    for index in range(num_layers):
        x = g.layer(x, index, pair, mask)
        for _ in range(idle):
            x = g.add("Identity", x)
    logits = g.linear(g.norm(x), HIDDEN, VOCAB)
    g.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    return _model(g, num_layers), g.num_bytes


def _model(g: Large, num_layers: int) -> onnx.ModelProto:
    tokens = ["batch", "query_len"]
    inputs = [INFO("input_ids", INT64, tokens), INFO("position_ids", INT64, tokens),
              INFO("attention_mask", INT64, ["batch", "past_len + query_len"])]  # fmt: skip
    outputs = [INFO("logits", FLOAT, [*tokens, VOCAB])]
    for index in range(num_layers):
        for role in ("key", "value"):
            for values, side, length in ((inputs, "past_key_values", "past_len"),
                                         (outputs, "present", "past_len + query_len")):  # fmt: skip
                dims = ["batch", KV_HEADS, length, HEAD_DIM]
                values.append(INFO(f"{side}.{index}.{role}", FLOAT, dims))
    graph = helper.make_graph(g.nodes, "llama", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def save(folder: Path, num_layers: int) -> tuple[int, int]:
    """Write the model.   Returns: its number of nodes, and of bytes of weights."""
    model, num_bytes = large(num_layers)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with (folder / "model.onnx_data").open("wb") as file:
        file.truncate(num_bytes)
    return len(model.graph.node), num_bytes


@dataclass(frozen=True)
class Inspected:
    """One run of ``ortkv inspect``: what it found, and what it took of a process of its own."""

    num_entries: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


COMMAND = """
import atexit, runpy, sys
from pathlib import Path
lines = Path("/proc/self/status")
atexit.register(lambda: sys.stderr.write(lines.read_text()))
runpy.run_module("ortkv", run_name="__main__", alter_sys=True)
"""
"""The command, with the kernel's figures of the process at its end. (What wait4 says of memory
counts that of whoever started it, before it became a process of its own.)"""


def inspected(folder: Path) -> Inspected:
    start = time.perf_counter()
    command = [sys.executable, "-c", COMMAND, "inspect", str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        answer = process.stdout.read()
        figures = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return Inspected(
        num_entries=len(json.loads(answer)["entries"]),
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=1024 * int(figures.split("VmHWM:")[1].split()[0]),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    nodes, num_bytes = save(folder, 80)
    print(f"{nodes} nodes, {num_bytes / 1e9:.1f} GB of weights")
    for _ in range(5):
        run = inspected(folder)
        print(
            f"{run.num_entries} entries in {run.seconds:.2f} s ({run.cpu_seconds:.2f} s of one "
            f"core), at most {run.peak_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
