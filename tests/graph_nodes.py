"""A graph in the making: nodes, constants, inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from graph_design import Design

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
TO_THE_END = np.iinfo(np.int64).max


@dataclass
class Graph:
    """Nodes so far, and the inputs, outputs and functions that all of its branches share.

    Wires are names; a scalar wire is an int64 of rank 0. ``kinds``: of each helper input.
    """

    design: Design
    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    inputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict[str, Any])
    outputs: dict[str, onnx.ValueInfoProto] = field(default_factory=dict[str, Any])
    kinds: dict[str, str] = field(default_factory=dict[str, str])
    weights: dict[str, Any] = field(default_factory=dict[str, Any])
    functions: dict[str, onnx.FunctionProto] = field(default_factory=dict[str, Any])
    with_past: bool = True
    prefix: str = "v"

    def inner(self, *, with_past: bool = True, prefix: str = "v") -> Graph:
        """Of no nodes yet: a branch, a loop's or a function's body; wires begin with ``prefix``."""
        return replace(self, nodes=[], with_past=with_past, prefix=prefix)

    def add(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """One node of one output, whose name is returned."""
        return self.many(kind, [*inputs], 1, domain=domain, **attributes)[0]

    def many(
        self, kind: str, inputs: list[str], count: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """One node of ``count`` outputs."""
        outs = [
            f"{self.prefix}{len(self.nodes)}_{kind}{f'_{i}' if i else ''}" for i in range(count)
        ]
        self.nodes.append(helper.make_node(kind, inputs, outs, domain=domain, **attributes))
        return outs

    def many_named(self, kind: str, inputs: list[str], outs: list[str], **attributes: Any) -> None:
        """One node whose outputs are named by the caller."""
        self.nodes.append(helper.make_node(kind, inputs, outs, **attributes))

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        tensor = numpy_helper.from_array(np.array(value, dtype))
        return self.add("Constant", value=tensor)

    def weight(self, name: str, array: np.ndarray) -> str:
        """An initializer that is no weight of the reference: tables, kernels of identities."""
        self.weights[name] = array
        return name

    def input(self, name: str, dtype: int, dims: list[Any], kind: str = "") -> str:
        """Declares an input, once; ``kind`` where it is a helper."""
        self.inputs[name] = self._value(name, dtype, dims)
        if kind:
            self.kinds[name] = kind
        return name

    def output(self, name: str, dtype: int, dims: list[Any]) -> str:
        self.outputs[name] = self._value(name, dtype, dims)
        return name

    def _value(self, name: str, dtype: int, dims: list[Any]) -> onnx.ValueInfoProto:
        if self.design.anonymous:
            dims = [dim if isinstance(dim, int) else None for dim in dims]
        return helper.make_tensor_value_info(name, dtype, dims)

    def rename(self, wire: str, name: str) -> None:
        """Give a wire an output's name; by Identity where it has one that must stay."""
        made = {out for node in self.nodes for out in node.output}
        if wire not in made or wire in self.outputs:
            self.nodes.append(helper.make_node("Identity", [wire], [name]))
            return
        for node in self.nodes:
            node.input[:] = [name if one == wire else one for one in node.input]
            node.output[:] = [name if one == wire else one for one in node.output]

    def cast(self, wire: str, dtype: int) -> str:
        return self.add("Cast", wire, to=dtype)

    def length(self, wire: str, axis: int) -> str:
        """A scalar: one axis' size."""
        return self.add("Gather", self.add("Shape", wire), self.const(axis), axis=0)

    def unsqueeze(self, wire: str, *axes: int) -> str:
        return self.add("Unsqueeze", wire, self.const(axes))

    def squeeze(self, wire: str, *axes: int) -> str:
        return self.add("Squeeze", wire, self.const(axes))

    def range(self, stop: str, start: str | None = None) -> str:
        return self.add("Range", start or self.const(0), stop, self.const(1))

    def vector(self, sizes: list[str | int]) -> str:
        """int64 [len(sizes)] of numbers and scalar wires."""
        if all(isinstance(size, int) for size in sizes):
            return self.const(sizes)
        parts = [self.const([s]) if isinstance(s, int) else self.unsqueeze(s, 0) for s in sizes]
        return self.add("Concat", *parts, axis=0)

    def reshape(self, wire: str, sizes: list[str | int]) -> str:
        """To numbers, 0 an axis kept as it is, and scalar wires, whose 0 is no tokens yet."""
        empty = int(0 not in sizes and -1 not in sizes)
        return self.add("Reshape", wire, self.vector(sizes), allowzero=empty)

    def transpose(self, wire: str, old: str, new: str) -> str:
        """From one order of letters to another."""
        if old == new:
            return wire
        return self.add("Transpose", wire, perm=[old.index(letter) for letter in new])

    def last(self, wire: str, count: str | int, axis: int) -> str:
        """The last ``count`` along an axis."""
        start = self.const([-count]) if isinstance(count, int) else self.unsqueeze(
            self.add("Neg", count), 0
        )  # fmt: skip
        return self.add("Slice", wire, start, self.const([TO_THE_END]), self.const([axis]))
