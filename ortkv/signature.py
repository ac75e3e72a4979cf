"""A graph's inputs and outputs as data, read without touching its weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ortkv.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import onnx

MAX_PROTOBUF_BYTES = 2**31 - 1
"""The most a protobuf may have; larger weights are beside it.  Source: protobuf.dev, limits."""

Dim = int | str | None
"""A fixed size, a symbolic name, or unknown."""

ONNX_TYPES: dict[str, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
"""dtype name -> ``onnx.TensorProto`` element type.  Source: onnx.proto, TensorProto.DataType."""

_NAMES = {number: name for name, number in ONNX_TYPES.items()}


_MOST_SHOWN = 100
"""Characters of a tensor in a message: names come from files."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of one of ``ONNX_TYPES``'s names."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output. ``dims`` is None where the graph does not even state a rank."""

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None

    @property
    def rank(self) -> int | None:
        """How many axes there are, where the graph says."""
        return None if self.dims is None else len(self.dims)

    def __str__(self) -> str:
        dims = (
            "?" if self.dims is None else ", ".join("?" if d is None else str(d) for d in self.dims)
        )
        text = f"{self.name} {self.dtype}[{dims}]"
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A graph's inputs and outputs in the graph's own order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_model(path: Path) -> onnx.ModelProto:
    """Parse an .onnx file; external weights stay on disk.

    Raises: ModelFileError where the bytes are not an ONNX model; UnsupportedModel where a
    name stands for two values.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        size = path.stat().st_size
        if size > MAX_PROTOBUF_BYTES:
            raise ModelFileError(
                f"{path} has {size} bytes: expected at most {MAX_PROTOBUF_BYTES}, the most that a "
                "protobuf may have. Export it with its weights in a file of their own."
            )
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.strerror}. Copy it again, or allow reading it."
        ) from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelFileError(_not_onnx(path, len(data))) from error
    functions = (text for function in model.functions for text in _texts_of_nodes(function.node))
    # protobuf gives bytes for a string that is not UTF-8.
    is_text = all(isinstance(text, str) for text in (*_texts(model.graph), *functions))
    if not (is_text and model.graph.node and model.graph.output):
        raise ModelFileError(_not_onnx(path, len(data)))
    _check_names(model.graph)
    return model


def signature_of(model: onnx.ModelProto) -> Signature:
    """The inputs a caller must feed (initializers listed as inputs left out) and the outputs.

    Raises: UnsupportedModel for an input that is no tensor. (An output of no use needs no type.)
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    for value in inputs:
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            found = "has no type" if kind is None else f"is a {kind.removesuffix('_type')}"
            raise UnsupportedModel(
                f"input {value.name!r} {found}: expected every input to be a tensor. Export the "
                "model with its cache as tensors."
            )
    return Signature(
        inputs=tuple(_spec(value) for value in inputs),
        outputs=tuple(_spec(value) for value in model.graph.output),
    )


def _not_onnx(path: Path, size: int) -> str:
    return (
        f"{path} ({size} bytes) is not an ONNX model: its bytes do not hold a graph with nodes "
        "and outputs. Export the model again, or copy the whole file again."
    )


def _check_names(graph: onnx.GraphProto) -> None:
    """Every input and every node's output has a name of its own.   Raises: UnsupportedModel."""
    made = [value.name for value in graph.input]
    made += [name for node in graph.node for name in node.output if name]
    weights = {tensor.name for tensor in graph.initializer}
    twice = _first_repeated(made) or _first_repeated(value.name for value in graph.output)
    twice = twice or next((o for node in graph.node for o in node.output if o in weights), None)
    if twice is not None:
        raise UnsupportedModel(
            f"the name {twice!r} stands for two values of the graph: expected every input and "
            "every output of a node to have a name of its own. Export the model again."
        )


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _texts(graph: onnx.GraphProto) -> Iterator[object]:
    """Whatever should be text in a graph, subgraphs included."""
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (value.name for value in (*graph.value_info, *graph.initializer))
    yield from _texts_of_nodes(graph.node)


def _texts_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[object]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            if attribute.HasField("g"):
                yield from _texts(attribute.g)
            for graph in attribute.graphs:
                yield from _texts(graph)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = dims_of(tensor.shape.dim) if tensor.HasField("shape") else None
    dtype = _NAMES.get(tensor.elem_type, f"onnx_type_{tensor.elem_type}")
    return TensorSpec(name=value.name, dtype=dtype, dims=dims)


def dims_of(dims: Iterable[onnx.TensorShapeProto.Dimension]) -> tuple[Dim, ...]:
    """A shape as data.

    A negative size, which some exporters write for any, is unknown; a number written as a symbol,
    as transformers 5 does, is a number.
    """
    return tuple(_dim(dim) for dim in dims)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    if dim.dim_param.isdecimal() and dim.dim_param.isascii():
        return int(dim.dim_param)
    return dim.dim_param or None
