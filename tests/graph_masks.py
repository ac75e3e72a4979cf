"""Positions and masks: what the helper inputs become in the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto

from graph_design import Design, groups, layout_of, rotary_tables, tensors
from graph_layouts import past_len

if TYPE_CHECKING:
    from graph_nodes import Graph

INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL
OPEN, SHUT = 0.0, -1e9


def tokens_name(design: Design) -> str:
    """Of the input that brings new tokens, as ids or as embeddings."""
    return design.label("inputs_embeds" if "inputs_embeds" in design.extras else "tokens")


def new_len(g: Graph) -> str:
    return g.length(tokens_name(g.design), 1)


def batch_of(g: Graph) -> str:
    return g.length(tokens_name(g.design), 0)


def key_dim(design: Design) -> Any:
    """The declared size of a mask's last axis."""
    if design.update == "scatter":
        return design.capacity or "capacity"
    if design.capacity is None:
        return "kv_len"
    return design.capacity + design.query_len if design.query_len else "mask_len"


def declare_mask(g: Graph) -> None:
    design = g.design
    if not design.mask:
        return
    batch, name = design.batch or "batch", design.label("mask")
    if design.mask == "2d":
        g.input(name, design.mask_dtype, [batch, key_dim(design)], "mask_2d")
        return
    dtype = FLOAT if design.mask in ("4d_add", "4d_ones") else BOOL
    dims = [batch, 1, design.query_len or "query_len", key_dim(design)]
    g.input(name, dtype, dims, "mask_4d")


def positions_from(g: Graph, source: str, layer: int = 0) -> str:
    """int64 [batch or 1, query_len]: the new tokens' positions."""
    design = g.design
    batch, new = design.batch or "batch", design.query_len or "query_len"
    shapes = {"position_ids": [batch, new], "flat": [new], "3d": [3, batch, new]}
    if source in shapes:
        wire = _integers(g, design.label("positions"), shapes[source], "positions")
        if source == "position_ids":
            return wire
        return g.unsqueeze(wire, 0) if source == "flat" else g.add("Gather", wire, g.const(0))
    if source == "cache_position":
        wire = _integers(g, design.label("cache_position"), [new], "cache_position")
        return g.unsqueeze(wire, 0)
    if source == "mask":
        counted = g.add("CumSum", g.cast(design.label("mask"), INT64), g.const(1))
        return g.last(g.add("Sub", counted, g.const(1)), new_len(g), 1)
    start = _start(g, source, layer)
    steps = g.unsqueeze(g.range(new_len(g)), 0)
    return g.add("Add", start, steps)


def _integers(g: Graph, name: str, dims: list[Any], kind: str) -> str:
    """An input of the design's integers, as int64."""
    wire = g.input(name, g.design.id_dtype, dims, kind)
    return wire if g.design.id_dtype == INT64 else g.cast(wire, INT64)


def _start(g: Graph, source: str, layer: int) -> str:
    """int64, broadcasting with [1, query_len]: where each row's new tokens begin."""
    design = g.design
    if source == "derived":
        return past_len(g) if g.with_past else g.const(0)
    if source == "total_length":
        total = _integers(g, design.label("total_length"), [], "total_length")
        return g.add("Sub", total, new_len(g))
    if source == "layer_lengths":
        return g.input(design.name("past", layer, "length"), INT64, [], "past_length")
    dims = {"past_length": [], "past_length_1": [1], "past_lengths": [design.batch or "batch"]}
    wire = _integers(g, design.label("past_length"), dims[source], "past_length")
    return g.unsqueeze(wire, 1) if source == "past_lengths" else wire


def write_places(g: Graph, layer: int) -> str:
    """Where new tokens are written: [query_len], or [batch] for TensorScatter; else no wire."""
    design = g.design
    if design.update not in ("scatter", "window_left"):
        return ""
    places = positions_from(g, design.write_from, layer)
    if design.write == "TensorScatter":
        return g.add("Gather", places, g.const(0), axis=1)
    return g.add("Gather", places, g.const(0), axis=0)


def bias(g: Graph) -> str:
    """float32 [batch or 1, 1, query_len, keys]: what is added to the scores."""
    design, mask = g.design, g.design.label("mask")
    opened, shut = g.const(OPEN, np.float32), g.const(SHUT, np.float32)
    if design.mask == "4d_add":
        return mask
    if design.mask == "4d_keep":
        return g.add("Where", mask, opened, shut)
    if design.mask == "4d_drop":
        return g.add("Where", mask, shut, opened)
    if design.mask == "4d_ones":
        return g.add("Mul", g.add("Sub", g.const(1.0, np.float32), mask), shut)
    seen = _causal(g)
    if design.mask == "2d":
        seen = g.add("And", seen, g.cast(g.unsqueeze(mask, 1, 2), BOOL))
    return g.add("Where", seen, opened, shut)


def _causal(g: Graph) -> str:
    """bool [batch or 1, 1, query_len, keys]: by the new tokens' places among the keys."""
    design = g.design
    if design.update == "scatter":
        places = positions_from(g, design.write_from)
        layer, role = tensors(design)[0]
        axis = groups(layout_of(design, role)).index("S")
        keys = g.length(design.name("past", layer, role), axis)
    else:
        before = past_len(g) if g.with_past else g.const(0)
        keys = g.add("Add", before, new_len(g))
        places = g.unsqueeze(g.range(keys, before), 0)
        if design.update == "window_left":
            places = slots_in_window(g, positions_from(g, design.write_from))
    queries = g.unsqueeze(places, 1, 3)
    line = g.range(keys)
    seen = g.add("GreaterOrEqual", queries, line)
    if design.update.startswith("window"):
        near = g.add("Less", g.add("Sub", queries, line), g.const(design.capacity))
        seen = g.add("And", seen, near)
    return seen


def slots_in_window(g: Graph, places: str) -> str:
    """Of new tokens in a window that fills from its start: those held are at most its capacity."""
    held = g.add("Min", g.add("Gather", places, g.const(0), axis=-1), g.const(g.design.capacity))
    steps = g.range(g.length(places, -1))
    return g.add("Add", g.unsqueeze(held, -1), steps)


def rotary(g: Graph) -> list[str]:
    """What ``rotated`` wants: cosines and sines [batch or 1, query_len, 1, head_dim]."""
    design = g.design
    places = positions_from(g, design.position_input)
    tables = [
        g.weight(f"{part}_table", table)
        for part, table in zip(("cos", "sin"), rotary_tables(design), strict=True)
    ]
    if design.positions == "rotary_op":
        return [places, *tables]
    if design.positions == "rotary":
        halves = [g.add("Gather", table, places) for table in tables]
    else:
        half = np.arange(design.head_dim // 2)
        inverse = g.const(100.0 ** (-2 * half / design.head_dim), np.float32)
        angles = g.add("Mul", g.unsqueeze(g.cast(places, FLOAT), 2), inverse)
        halves = [g.add(kind, angles) for kind in ("Cos", "Sin")]
    return [g.unsqueeze(g.add("Concat", part, part, axis=-1), 2) for part in halves]


def rotated(g: Graph, wire: str, tables: list[str]) -> str:
    """[batch, query_len, heads, head_dim], each head's halves turned."""
    cos, sin = tables
    half = g.design.head_dim // 2
    first, second = g.many("Split", [wire, g.const([half, half])], 2, axis=3)
    turned = g.add("Concat", g.add("Neg", second), first, axis=3)
    return g.add("Add", g.add("Mul", wire, cos), g.add("Mul", turned, sin))
