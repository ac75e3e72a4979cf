"""Where a graph's external weights are, checked before onnxruntime follows a path in a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ortkv.errors import ModelFileError, UnsafeModel
from ortkv.signature import ONNX_TYPES, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import onnx


def check_external_data(model: onnx.ModelProto, graph: Path) -> list[Path]:
    """Every external tensor lies within a file of the model's own folder, and nothing else is read.

    The hub cache's links from a snapshot into its own blobs are of the folder too.

    Returns: these files, each once.
    Raises: UnsafeModel for a path that leads out, and for a node that names a file; ModelFileError
    for a file that is missing or too short, and for an extent that is not the tensor's.
    """
    sizes: dict[str, int] = {}
    nodes = [node for function in model.functions for node in function.node]
    _check_contexts((*model.graph.node, *nodes))
    for tensor in (*_external_tensors(model.graph), *_in_attributes(nodes)):
        extent = _extent_of(tensor, graph)
        if extent.location not in sizes:
            sizes[extent.location] = _size_of(graph.parent, extent.location, tensor.name)
        end = extent.offset + extent.length
        if end > sizes[extent.location]:
            raise ModelFileError(
                f"{graph.parent / extent.location} has {sizes[extent.location]} bytes, but tensor "
                f"{tensor.name} is stated to end at {end}: the file is truncated or of another "
                "model. Copy it again."
            )
    return [graph.parent / location for location in sizes]


@dataclass(frozen=True, kw_only=True)
class _Extent:
    """Where a tensor's bytes are: in which file, from where, how many."""

    location: str
    offset: int
    length: int


def _extent_of(tensor: onnx.TensorProto, graph: Path) -> _Extent:
    """What the tensor states, checked against its own dims and dtype.   Raises: ModelFileError."""
    stated = {entry.key: entry.value for entry in tensor.external_data}
    location = stated.get("location", "")
    where = f"{graph}: tensor {tensor.name}, whose bytes are in {location!r},"
    if len(stated) < len(tensor.external_data):
        raise ModelFileError(f"{where} states something twice. Export the model again.")
    extent: list[int] = []
    for key in ("offset", "length"):
        value = stated.get(key, "0")
        if not (value.isascii() and value.isdecimal()):
            raise ModelFileError(
                f"{where} has {key} {value!r}: expected a natural number. Export the model again."
            )
        extent.append(int(value))
    needed = _num_bytes(tensor)
    offset, length = extent
    # No length, and 0, stand for all that the tensor needs, to onnxruntime as well.
    if needed is not None and length not in (0, needed):
        raise ModelFileError(
            f"{where} has length {length}, but its dims {list(tensor.dims)} take {needed} bytes. "
            "Export the model again."
        )
    return _Extent(location=location, offset=offset, length=length or needed or 0)


_FILE_NODES = frozenset({("com.microsoft", "EPContext")})
"""Operators that have an execution provider read a file of their own: a compiled graph, which
it runs."""


def _check_contexts(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in _all_nodes(nodes):
        if (node.domain, node.op_type) in _FILE_NODES:
            raise UnsafeModel(
                f"node {node.name!r} is an {node.op_type}, which names a compiled graph for an "
                "execution provider to load: expected a graph of operators. Use the model that it "
                "was compiled from."
            )


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)


def _num_bytes(tensor: onnx.TensorProto) -> int | None:
    """What the tensor's dims and dtype take; None for a dtype ortkv does not know."""
    if any(dim < 0 for dim in tensor.dims):
        raise ModelFileError(
            f"tensor {tensor.name} has dims {list(tensor.dims)}: expected no negative one. Export "
            "the model again."
        )
    name = next((name for name, number in ONNX_TYPES.items() if number == tensor.data_type), None)
    return None if name is None else prod(tensor.dims) * numpy_dtype(name).itemsize


def _external_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    sparse = [t for s in graph.sparse_initializer for t in (s.values, s.indices)]
    yield from _if_external((*graph.initializer, *sparse))
    yield from _in_attributes(graph.node)


def _in_attributes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Of subgraphs, and of tensors that are attributes themselves (Constant)."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from _if_external((attribute.t, *attribute.tensors))
        for graph in (attribute.g, *attribute.graphs):
            yield from _external_tensors(graph)


def _if_external(tensors: Iterable[onnx.TensorProto]) -> Iterator[onnx.TensorProto]:
    return (tensor for tensor in tensors if tensor.data_location == tensor.EXTERNAL)


def _size_of(root: Path, location: str, tensor: str) -> int:
    stated = PurePosixPath(location)
    path = root / location
    inside = not stated.is_absolute() and ".." not in stated.parts
    if _MEMORY_MARK in location or not inside or not _is_own(path.resolve(), root.resolve()):
        raise UnsafeModel(
            f"tensor {tensor} has its weights at {location!r}, outside the model's folder "
            f"{root}: expected a file in it. Do not run this model unless you trust its source; "
            "if you do, copy the file into the folder."
        )
    if not path.is_file():
        raise ModelFileError(
            f"{path} is missing, and holds the weights of tensor {tensor}: copy it beside the "
            "graph."
        )
    if _has_names_elsewhere(path, root):
        raise UnsafeModel(
            f"{path}, which holds the weights of tensor {tensor}, is a hard link to a file that "
            "has another name outside the model's folder: expected a file of its own. Do not run "
            "this model unless you trust its source; if you do, put a copy in its place."
        )
    return path.stat().st_size


_MEMORY_MARK = "_ORT_MEM_ADDR_"
"""onnxruntime takes the offset for an address of its own memory where a location has this.

Source: onnxruntime, core/framework/tensorprotoutils.h, kTensorProtoMemoryAddressTag.
"""


def _is_own(path: Path, root: Path) -> bool:
    """In the folder, or in the blobs of the hub repository whose snapshot the folder is."""
    if path.is_relative_to(root):
        return True
    blobs = _blobs_of(root)
    return blobs is not None and path.is_relative_to(blobs)


def _has_names_elsewhere(path: Path, root: Path) -> bool:
    """A hard link to a file whose other names are not all in the folder.

    The hub's blobs are named by what is in them: a second name of one tells nothing.
    """
    status = path.stat()
    blobs = _blobs_of(root.resolve())
    if status.st_nlink == 1 or (blobs is not None and path.resolve().is_relative_to(blobs)):
        return False
    same = (other for other in root.rglob("*") if other.is_file() and not other.is_symlink())
    return sum(other.stat().st_ino == status.st_ino for other in same) < status.st_nlink


def _blobs_of(root: Path) -> Path | None:
    snapshots = next((p for p in (root, *root.parents) if p.name == "snapshots"), None)
    return None if snapshots is None else snapshots.parent / "blobs"
