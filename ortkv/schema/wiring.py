"""A graph as wires: which node makes a value and which nodes take it, subgraphs included.

Names inside a subgraph are qualified with the branch they belong to, so that two branches
of one ``If`` may use the same names; a value of the enclosing graph keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ortkv.signature import dims_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from ortkv.signature import Dim


@dataclass(frozen=True, kw_only=True)
class Op:
    """One node. ``inputs`` and ``outputs`` are wires; an absent optional one is ''.

    ``order`` grows along the graph's own list of nodes, which is a topological order.
    """

    kind: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    order: int
    node: onnx.NodeProto

    def input(self, index: int) -> str:
        """The wire at an input's place; '' where the node leaves it out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        """The node's attribute, or None where it takes the default."""
        return next((a for a in self.node.attribute if a.name == name), None)

    def int_attribute(self, name: str, default: int) -> int:
        """An integer attribute, or its default."""
        found = self.attribute(name)
        return default if found is None else found.i


@dataclass(frozen=True)
class Wiring:
    """All ops of a graph, and for each wire its maker, its takers and its constant value."""

    makers: dict[str, Op] = field(default_factory=dict[str, Op])
    takers: dict[str, list[Op]] = field(default_factory=dict[str, list[Op]])
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict[str, "onnx.TensorProto"])
    leaves: dict[str, str] = field(default_factory=dict[str, str])
    """A branch's output wire -> the ``If`` output it becomes."""
    stated: dict[str, tuple[Dim, ...]] = field(default_factory=dict[str, "tuple[Dim, ...]"])
    """The dims of a wire, where the graph states them (``value_info``)."""
    ops: list[Op] = field(default_factory=list["Op"])
    """In the order in which they run; those of an ``If``'s branches after it."""

    def consumers(self, wire: str) -> list[Op]:
        """The ops that take a wire."""
        return self.takers.get(wire, [])

    def has(self, kinds: frozenset[str]) -> bool:
        """Whether any op is of one of these kinds."""
        return any(op.kind in kinds for op in self.makers.values())

    def width(self, wire: str) -> int | None:
        """The size of a wire's last axis: stated, or that of the weights that make it."""
        stated = self.stated.get(wire)
        if stated and isinstance(stated[-1], int):
            return stated[-1]
        maker = self.makers.get(wire)
        if maker is None:
            return None
        if maker.kind == "MatMulNBits":
            return maker.int_attribute("N", 0) or None
        if maker.kind not in ("MatMul", "Add"):
            return None
        weights = self.constants.get(maker.input(1))
        return weights.dims[-1] if weights is not None and weights.dims else None

    def ints(self, wire: str) -> list[int] | None:
        """The constant integers on a wire, or None where they are computed or not small."""
        tensor = self.constants.get(wire)
        if tensor is None or tensor.data_location == tensor.EXTERNAL:
            return None
        from onnx import numpy_helper

        array = numpy_helper.to_array(tensor)
        if array.dtype.kind != "i" or array.size > 16:
            return None
        return [int(v) for v in array.reshape(-1)]

    def number(self, wire: str) -> float | None:
        """The one number that a constant holds; None where it is computed or holds several."""
        tensor = self.constants.get(wire)
        return None if tensor is None else self.number_in(tensor)

    @staticmethod
    def number_in(tensor: onnx.TensorProto) -> float | None:
        """The one number in a tensor; None where it holds several."""
        if tensor.data_location == tensor.EXTERNAL or prod(tensor.dims) != 1:
            return None
        from onnx import numpy_helper

        return float(numpy_helper.to_array(tensor).reshape(-1)[0])

    def is_scalar(self, wire: str) -> bool:
        """Whether a wire carries a constant of rank 0."""
        tensor = self.constants.get(wire)
        return tensor is not None and len(tensor.dims) == 0


def wire(model: onnx.ModelProto) -> Wiring:
    """Index a model's graph, its local functions inlined."""
    if model.functions:
        from onnx import inliner

        model = inliner.inline_local_functions(model)
    wiring = Wiring()
    _add_graph(wiring, model.graph, scope="", outer={})
    return wiring


def _add_graph(
    wiring: Wiring, graph: onnx.GraphProto, *, scope: str, outer: dict[str, str]
) -> dict[str, str]:
    """Index one graph; return what each name in it means: its own names over the outer ones."""
    names = dict(outer)

    def define(name: str) -> str:
        names[name] = f"{scope}{name}" if name else ""
        return names[name]

    for value in graph.input:
        define(value.name)
    for tensor in graph.initializer:
        wiring.constants[define(tensor.name)] = tensor
    _note_stated(wiring, graph, scope)
    for node in graph.node:
        inputs = tuple(names.get(name, name) for name in node.input)
        outputs = tuple(define(name) for name in node.output)
        op = Op(
            kind=node.op_type,
            domain=node.domain or "ai.onnx",
            inputs=inputs,
            outputs=outputs,
            order=len(wiring.ops),
            node=node,
        )
        wiring.ops.append(op)
        _connect(wiring, op)
        for label, branch in _branches(node):
            inner = _add_graph(wiring, branch, scope=f"{outputs[0]}/{label}/", outer=names)
            for leaf, result in zip(branch.output, outputs, strict=True):
                wiring.leaves[inner[leaf.name]] = result
    return names


def _note_stated(wiring: Wiring, graph: onnx.GraphProto, scope: str) -> None:
    for value in graph.value_info:
        if value.type.tensor_type.HasField("shape"):
            wiring.stated[f"{scope}{value.name}"] = dims_of(value.type.tensor_type.shape.dim)


def _connect(wiring: Wiring, op: Op) -> None:
    for name in op.outputs:
        if name:
            wiring.makers[name] = op
    for name in dict.fromkeys(op.inputs):
        if name:
            wiring.takers.setdefault(name, []).append(op)
    if op.kind == "Constant":
        value = op.attribute("value")
        if value is not None:
            wiring.constants[op.outputs[0]] = value.t
        else:
            _add_plain_constant(wiring, op)


def _add_plain_constant(wiring: Wiring, op: Op) -> None:
    """``Constant`` may also state numbers as ``value_float``, ``value_int`` or ``value_ints``."""
    from onnx import helper

    one, many = op.attribute("value_int"), op.attribute("value_ints")
    real = op.attribute("value_float")
    if real is not None:
        wiring.constants[op.outputs[0]] = helper.make_tensor("", 1, [], [real.f])
    elif one is not None:
        wiring.constants[op.outputs[0]] = helper.make_tensor("", 7, [], [one.i])
    elif many is not None:
        wiring.constants[op.outputs[0]] = helper.make_tensor("", 7, [len(many.ints)], many.ints)


def _branches(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    if node.op_type == "If":
        for attribute in node.attribute:
            if attribute.name in ("then_branch", "else_branch"):
                yield attribute.name, attribute.g
