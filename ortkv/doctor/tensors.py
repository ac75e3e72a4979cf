"""The weights in a graph's proto: how many bytes, where, and which are alike."""

from __future__ import annotations

import hashlib
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import onnx

_SAMPLE = 4096
"""Bytes read at each end of a tensor: enough to tell trained weights apart."""
_HALF_BYTE_TYPES = (21, 22, 23)
"""Source: onnx.proto, TensorProto.DataType: UINT4, INT4, FLOAT4E2M1."""


def weights_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every constant tensor of a model: initializers and Constant nodes, subgraphs included."""
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield from _in_nodes(function.node)


def _in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _in_nodes(graph.node)


def _in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        for graph in (attribute.g, *attribute.graphs):
            yield from _in_graph(graph)


def num_bytes(tensor: onnx.TensorProto) -> int:
    """What a tensor takes in memory; 0 for strings and dtypes onnx does not know."""
    from onnx import TensorProto, helper

    if tensor.data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    if tensor.data_type in _HALF_BYTE_TYPES:
        return (prod(tensor.dims) + 1) // 2
    try:
        return prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError):
        return 0


def place(tensor: onnx.TensorProto) -> tuple[str, int, int] | None:
    """(location, offset, end) of an external tensor; None for one in the graph's own file."""
    if tensor.data_location != tensor.EXTERNAL:
        return None
    stated = {entry.key: entry.value for entry in tensor.external_data}
    offset = int(stated.get("offset") or 0)
    return stated["location"], offset, offset + int(stated.get("length") or num_bytes(tensor))


def likeness(tensor: onnx.TensorProto, folder: Path) -> str:
    """Equal for tensors of one dtype, shape and content, told by the bytes at either end."""
    digest = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)}".encode())
    where = place(tensor)
    if where is None:
        raw = tensor.raw_data or tensor.SerializeToString()
        digest.update(raw[:_SAMPLE] + raw[-_SAMPLE:])
        return digest.hexdigest()
    location, offset, end = where
    with (folder / location).open("rb") as file:
        file.seek(offset)
        digest.update(file.read(min(_SAMPLE, end - offset)))
        file.seek(max(offset, end - _SAMPLE))
        digest.update(file.read(min(_SAMPLE, end - offset)))
    return digest.hexdigest()
