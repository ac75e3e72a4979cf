"""What a right derivation finds in a design's graph."""

from __future__ import annotations

from typing import Any

from graph_design import Design, layout_of, tensors
from graphs import build

STATES = {"C": ("conv", "BXX"), "R": ("recurrent", "BXXX")}


def update_of(design: Design) -> str:
    """The rule of keys and values: the design's, unless an op shares its buffer.

    In a merged graph none does: the branch for first runs gives out a cache of its own length.
    """
    shares = not design.merged and design.attention in (
        "gqa_mask",
        "gqa_inputs",
        "dmmha",
        "mha_buffer",
    )
    return "in_place" if shares else design.update.removesuffix("_left")


def expected_entries(design: Design) -> list[dict[str, Any]]:
    """Every past/present pair: layer, role, past, present (None on a side that is not there),
    layout, update, num_kv_heads, head_dim (None for states).
    """
    found = [
        _entry(design, layer, role, layout_of(design, role), update_of(design))
        for layer, role in tensors(design)
    ]
    if design.cross in ("given", "passed", "first", "first_only"):
        found += [
            _entry(design, layer, role, "BHSD", "constant")
            for layer in range(design.num_layers)
            for role in ("cross_key", "cross_value")
        ]
    for layer, kind in enumerate(design.kinds):
        if kind != "A":
            role, layout = STATES[kind]
            entry = _entry(design, layer, role, layout, "replace")
            found.append(entry | {"num_kv_heads": None, "head_dim": None})
    return sorted(found, key=lambda entry: entry["layer"])


def _entry(design: Design, layer: int, role: str, layout: str, update: str) -> dict[str, Any]:
    given = design.cross == "given" and role.startswith("cross")
    return {
        "layer": layer,
        "role": role,
        "past": design.name("past", layer, role) if design.past else None,
        "present": None if given else design.name("present", layer, role),
        "layout": layout,
        "update": update,
        "num_kv_heads": design.kv_heads,
        "head_dim": design.head_dim,
    }


def expected_helpers(design: Design) -> dict[str, str]:
    """Each helper input's kind, by its name.

    Beside the schema's own kinds: cache_scale,
    cache_zero_point, and unknown, which has no rule.
    """
    return dict(build(design).kinds)
