"""Where a graph's external weights are, checked before onnxruntime follows a path in a file."""

from __future__ import annotations

from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ortkv.errors import ModelFileError, UnsafeModel
from ortkv.signature import ONNX_TYPES, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import onnx


def check_external_data(model: onnx.ModelProto, graph: Path) -> list[Path]:
    """Every external tensor lies within a file of the model's own folder.

    The hub cache's links from a snapshot into its own blobs are of the folder too.

    Returns: these files, each once.
    Raises: UnsafeModel for a path that leads out; ModelFileError for a file that is
    missing or too short.
    """
    from onnx.external_data_helper import ExternalDataInfo

    sizes: dict[str, int] = {}
    nodes = [node for function in model.functions for node in function.node]
    for tensor in (*_external_tensors(model.graph), *_in_attributes(nodes)):
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:  # negative, or no number
            raise ModelFileError(f"{graph}: {error}. Export the model again.") from error
        if info.location not in sizes:
            sizes[info.location] = _size_of(graph.parent, info.location, tensor.name)
        length = _num_bytes(tensor) if info.length is None else info.length
        end = (info.offset or 0) + length
        if end > sizes[info.location]:
            raise ModelFileError(
                f"{graph.parent / info.location} has {sizes[info.location]} bytes, but tensor "
                f"{tensor.name} is stated to end at {end}: the file is truncated or of another "
                "model. Copy it again."
            )
    return [graph.parent / location for location in sizes]


def _num_bytes(tensor: onnx.TensorProto) -> int:
    """What the tensor's dims and dtype take; 0 for a dtype ortkv does not know."""
    name = next((name for name, number in ONNX_TYPES.items() if number == tensor.data_type), None)
    return 0 if name is None else prod(tensor.dims) * numpy_dtype(name).itemsize


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
    if not inside or not _is_own(path.resolve(), root.resolve()):
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
    return path.stat().st_size


def _is_own(path: Path, root: Path) -> bool:
    """In the folder, or in the blobs of the hub repository whose snapshot the folder is."""
    if path.is_relative_to(root):
        return True
    snapshots = next((p for p in (root, *root.parents) if p.name == "snapshots"), None)
    return snapshots is not None and path.is_relative_to(snapshots.parent / "blobs")
