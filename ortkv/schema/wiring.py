"""A graph as wires: which node makes a value and which nodes take it, subgraphs included.

Names inside a subgraph are qualified with the branch they belong to, so that two branches
of one ``If`` may use the same names; a value of the enclosing graph keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ortkv.schema.inlining import inlined
from ortkv.schema.order import in_order
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

    def output(self, index: int = 0) -> str:
        """The wire at an output's place; '' where the node leaves it out."""
        return self.outputs[index] if index < len(self.outputs) else ""

    def place(self, rank: int, *, default: int = 0) -> int | None:
        """Its ``axis`` of so many, counted from the front; None where there is no such axis."""
        axis = self.int_attribute("axis", default)
        return axis % rank if -rank <= axis < rank else None

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
        array = _small_array(self.constants.get(wire))
        if array is None or array.dtype.kind != "i":
            return None
        return [int(v) for v in array.reshape(-1)]

    def number(self, wire: str) -> float | None:
        """The one number that a constant holds; None where it is computed or holds several."""
        tensor = self.constants.get(wire)
        return None if tensor is None else self.number_in(tensor)

    @staticmethod
    def number_in(tensor: onnx.TensorProto) -> float | None:
        """The one number in a tensor; None where it holds several."""
        array = _small_array(tensor)
        if array is None or array.size != 1 or array.dtype.kind not in _NUMBERS:
            return None
        return float(array.reshape(-1)[0])

    def is_scalar(self, wire: str) -> bool:
        """Whether a wire carries a constant of rank 0."""
        tensor = self.constants.get(wire)
        return tensor is not None and len(tensor.dims) == 0


_MOST_VALUES = 16
_NUMBERS = "biufV"
"""numpy's kinds that are numbers; V is what ml_dtypes' are."""


def _small_array(tensor: onnx.TensorProto | None) -> np.ndarray | None:
    """What a small tensor holds; None where it is external, or not what its dims and dtype say."""
    if tensor is None or tensor.data_location == tensor.EXTERNAL:
        return None
    if any(dim < 0 for dim in tensor.dims) or prod(tensor.dims) > _MOST_VALUES:
        return None
    from onnx import numpy_helper

    if tensor.data_type == tensor.INT64 and len(tensor.raw_data) == 8 * prod(tensor.dims):
        return np.frombuffer(tensor.raw_data, "<i8")  # most constants; to_array takes 40 us
    try:
        return numpy_helper.to_array(tensor)
    except (KeyError, TypeError, ValueError):  # numpy_helper checks neither dtype nor length
        return None


def wire(model: onnx.ModelProto) -> Wiring:
    """Index a model's graph, its local functions inlined.

    No wire has two makers, and none is made of itself, so that every walk along makers ends.

    Raises: UnsupportedModel for a graph with names of two meanings, or that goes in a circle.
    """
    wiring = Wiring()
    _add_graph(wiring, inlined(model).graph, scope="", outer={})
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
    for node in in_order(graph):
        inputs = tuple([names.get(name, name) for name in node.input])
        outputs = tuple([define(name) for name in node.output])
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
            # in_order lets no name with a NUL pass: none from outside is one from inside.
            inner = _add_graph(wiring, branch, scope=f"{op.order}\0{label}\0", outer=names)
            for leaf, result in zip(branch.output, outputs, strict=False):
                if leaf.name in inner and result:
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
        if not op.output():
            return
        if value is not None:
            wiring.constants[op.output()] = value.t
        else:
            _add_plain_constant(wiring, op)


def _add_plain_constant(wiring: Wiring, op: Op) -> None:
    """``Constant`` may also state numbers as ``value_float``, ``value_int`` or ``value_ints``."""
    from onnx import helper

    one, many = op.attribute("value_int"), op.attribute("value_ints")
    real = op.attribute("value_float")
    if real is not None:
        wiring.constants[op.output()] = helper.make_tensor("", 1, [], [real.f])
    elif one is not None:
        wiring.constants[op.output()] = helper.make_tensor("", 7, [], [one.i])
    elif many is not None:
        wiring.constants[op.output()] = helper.make_tensor("", 7, [len(many.ints)], many.ints)


def _branches(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    if node.op_type == "If":
        for attribute in node.attribute:
            if attribute.name in ("then_branch", "else_branch"):
                yield attribute.name, attribute.g
