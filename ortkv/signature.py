"""A graph's inputs and outputs as data, read without touching its weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ortkv.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import onnx

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
        return f"{self.name} {self.dtype}[{dims}]"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A graph's inputs and outputs in the graph's own order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_model(path: Path) -> onnx.ModelProto:
    """Parse an .onnx file; external weights stay on disk.

    Raises: ModelFileError where the bytes are not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ModelFileError(_not_onnx(path)) from error
    if not model.graph.node or not model.graph.output:
        raise ModelFileError(_not_onnx(path))
    return model


def signature_of(model: onnx.ModelProto) -> Signature:
    """The inputs a caller must feed (initializers listed as inputs left out) and the outputs."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return Signature(
        inputs=tuple(_spec(v) for v in model.graph.input if v.name not in weights),
        outputs=tuple(_spec(v) for v in model.graph.output),
    )


def _not_onnx(path: Path) -> str:
    size = path.stat().st_size
    return (
        f"{path} ({size} bytes) is not an ONNX model: its bytes do not hold a graph with nodes "
        "and outputs. Export the model again, or copy the whole file again."
    )


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = dims_of(tensor.shape.dim) if tensor.HasField("shape") else None
    dtype = _NAMES.get(tensor.elem_type, f"onnx_type_{tensor.elem_type}")
    return TensorSpec(name=value.name, dtype=dtype, dims=dims)


def dims_of(dims: Iterable[onnx.TensorShapeProto.Dimension]) -> tuple[Dim, ...]:
    """A shape as data."""
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in dims)
