"""Update rules: how a past and new tokens become what is attended and what goes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from graph_design import groups
from graph_masks import slots_in_window

if TYPE_CHECKING:
    from graph_nodes import Graph


def joined(
    g: Graph, past: str, new: str, layout: str, write: str, cache: tuple[int, str]
) -> tuple[str, str]:
    """(attended, present), by the design's rule.

    past, new: of one layout, ``past`` in the cache's dtype, ``new`` float32. write: where
    'scatter' writes. cache: layer and role, whose scale a quantized cache has.
    """
    design, axis = g.design, groups(layout).index("S")
    if design.cache_dtype == TensorProto.FLOAT:
        return _rule(g, past, new, axis, write)
    if design.cache_cast == "inside":
        whole, present = _rule(g, past, _encoded(g, new, cache), axis, write)
        return _decoded(g, whole, cache), present
    past = _decoded(g, past, cache) if g.with_past else past
    whole, present = _rule(g, past, new, axis, write)
    return whole, _encoded(g, present, cache)


def _rule(g: Graph, past: str, new: str, axis: int, write: str) -> tuple[str, str]:
    design = g.design
    if not g.with_past:
        return new, new
    if design.update == "scatter":
        present = WRITES[design.write](g, past, new, axis, write)
        return present, present
    if design.update == "window_left":
        return _window_left(g, past, new, axis, write)
    whole = g.add("Concat", past, new, axis=axis)
    if design.update == "window":
        assert design.capacity
        return whole, g.last(whole, design.capacity, axis)
    return whole, new if design.update == "delta" else whole


def _window_left(g: Graph, past: str, new: str, axis: int, write: str) -> tuple[str, str]:
    """Room for the new tokens behind the past, written after what is held; what is over goes."""
    assert g.design.capacity
    room = g.add("Concat", past, new, axis=axis)
    slots = slots_in_window(g, write)
    whole = _scatter_elements(g, room, new, axis, slots)
    last = g.add("Gather", slots, g.const(-1))
    over = g.add("Sub", g.add("Add", last, g.const(1)), g.const(g.design.capacity))
    start = g.add("Max", over, g.const(0))
    stop = g.add("Add", start, g.const(g.design.capacity))
    ends = [g.unsqueeze(wire, 0) for wire in (start, stop)]
    return whole, g.add("Slice", whole, *ends, g.const([axis]))


def _encoded(g: Graph, wire: str, cache: tuple[int, str]) -> str:
    if not g.design.quantized:
        return g.cast(wire, g.design.cache_dtype)
    return g.add("QuantizeLinear", wire, *_scale(g, cache))


def _decoded(g: Graph, wire: str, cache: tuple[int, str]) -> str:
    if not g.design.quantized:
        return g.cast(wire, TensorProto.FLOAT)
    return g.add("DequantizeLinear", wire, *_scale(g, cache))


def _scale(g: Graph, cache: tuple[int, str]) -> list[str]:
    """Scale and zero point, scalars: constants or inputs of shape [1]."""
    design = g.design
    numpy_dtype = np.uint8 if design.cache_dtype == TensorProto.UINT8 else np.int8
    if design.scales == "constant":
        return [g.const(design.scale(*cache), np.float32), g.const(design.zero_point, numpy_dtype)]
    wires = [
        g.input(design.name("scale", *cache), TensorProto.FLOAT, [1], "cache_scale"),
        g.input(design.name("zero_point", *cache), design.cache_dtype, [1], "cache_zero_point"),
    ]
    return [g.squeeze(wire, 0) for wire in wires]


def _scatter_nd(g: Graph, past: str, new: str, axis: int, write: str) -> str:
    """torch's index_put: the sequence axis in front, written by rows. ``write`` [query_len]."""
    rank = len(groups(g.design.layouts[0]))
    perm = [axis, *(i for i in range(rank) if i != axis)]
    front = [g.add("Transpose", wire, perm=perm) if axis else wire for wire in (past, new)]
    out = g.add("ScatterND", front[0], g.unsqueeze(write, 1), front[1])
    return g.add("Transpose", out, perm=[perm.index(i) for i in range(rank)]) if axis else out


def _scatter_elements(g: Graph, past: str, new: str, axis: int, write: str) -> str:
    rank = len(groups(g.design.layouts[0]))
    line = g.unsqueeze(write, *(i for i in range(rank) if i != axis))
    return g.add(
        "ScatterElements", past, g.add("Expand", line, g.add("Shape", new)), new, axis=axis
    )


def _tensor_scatter(g: Graph, past: str, new: str, axis: int, write: str) -> str:
    """The standard op; ``write`` [batch], each row's own place."""
    return g.add("TensorScatter", past, new, write, axis=axis)


def _here(g: Graph, past: str, axis: int, write: str) -> str:
    """bool, broadcasting: True where the one new token goes."""
    rank = len(groups(g.design.layouts[0]))
    one_hot = g.add("Equal", g.range(g.length(past, axis)), write)
    return g.unsqueeze(one_hot, *(i for i in range(rank) if i != axis))


def _where(g: Graph, past: str, new: str, axis: int, write: str) -> str:
    return g.add("Where", _here(g, past, axis, write), new, past)


def _blend(g: Graph, past: str, new: str, axis: int, write: str) -> str:
    """In arithmetic: past * (1 - here) + new * here."""
    here = g.cast(_here(g, past, axis, write), TensorProto.FLOAT)
    rest = g.add("Sub", g.const(1.0, np.float32), here)
    return g.add("Add", g.add("Mul", past, rest), g.add("Mul", new, here))


WRITES = {
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "TensorScatter": _tensor_scatter,
    "Where": _where,
    "Blend": _blend,
}
