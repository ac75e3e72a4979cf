"""Cache tensors' axes: between attention's own and the graph's, merged and stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graph_design import ENCODER_LEN, Design, groups, layout_of, tensors

if TYPE_CHECKING:
    from graph_nodes import Graph

ROLES = ("key", "value")


def to_layout(g: Graph, wire: str, layout: str) -> str:
    """New tokens [batch, query_len, kv_heads, head_dim] with a layout's axes."""
    letters = "".join(groups(layout))
    sizes = {"B": g.length(wire, 0), "S": g.length(wire, 1)} if "(" in layout else {}
    if "H" in letters:
        wire = g.transpose(wire, "BSHD", letters)
    else:
        wire = g.transpose(g.squeeze(wire, 2), "BSD", letters)
    return g.reshape(wire, _merged_sizes(g, layout, sizes)) if "(" in layout else wire


def _merged_sizes(g: Graph, layout: str, sizes: dict[str, str]) -> list[str | int]:
    known: dict[str, Any] = {"H": g.design.kv_heads, "D": g.design.head_dim} | sizes
    found: list[str | int] = []
    for group in groups(layout):
        size = known[group[0]]
        for letter in group[1:]:
            numbers = isinstance(size, int) and isinstance(known[letter], int)
            factor = known[letter]
            size = size * factor if numbers else g.add("Mul", str(size), g.const(factor))
        found.append(size)
    return found


def from_layout(g: Graph, wire: str, layout: str, wanted: str, batch: str) -> str:
    """A cache with the axes ``wanted``, B, H, S and D in some order. ``batch``: a scalar."""
    letters = "".join(groups(layout))
    if "(" in layout:
        length = g.length(wire, groups(layout).index("S"))
        known: dict[str, Any] = {"B": batch, "S": length}
        known |= {"H": g.design.kv_heads, "D": g.design.head_dim}
        wire = g.reshape(wire, [known[letter] for letter in letters])
    if "H" not in letters:
        wire, letters = g.unsqueeze(wire, 1), letters[0] + "H" + letters[1:]
    return g.transpose(wire, letters, wanted)


def cache_dims(design: Design, layout: str, length: Any) -> list[Any]:
    """A tensor's declared dims; ``length`` that of its sequence axis."""
    sizes: dict[str, Any] = {
        "B": design.batch or "batch",
        "H": design.kv_heads,
        "D": design.head_dim,
        "S": length,
        "2": 2,
        "L": design.kinds.count("A"),
    }
    dims: list[Any] = []
    for group in groups(layout):
        dim = sizes[group[0]]
        for letter in group[1:]:
            size = sizes[letter]
            dim = dim * size if isinstance(dim, int) else f"{dim}*heads"
        dims.append(dim)
    return dims


def declare_caches(g: Graph) -> None:
    """Every key and value tensor, in and out."""
    design = g.design
    new = design.query_len or "query_len"
    lengths: dict[str, tuple[Any, Any]] = {
        "concat": ("past_len", "kv_len"),
        "delta": (design.capacity or "past_len", new),
        "scatter": (design.capacity or "capacity", design.capacity or "capacity"),
        "window": (design.capacity, design.capacity),
        "window_left": (design.capacity, design.capacity),
    }
    past, present = lengths[design.update]
    for layer, role in tensors(design):
        layout, dtype = layout_of(design, role), design.cache_dtype
        if design.past:
            g.input(design.name("past", layer, role), dtype, cache_dims(design, layout, past))
        g.output(design.name("present", layer, role), dtype, cache_dims(design, layout, present))
    if design.cross in ("given", "passed", "first", "first_only"):
        length = "encoder_len" if design.cross.startswith("first") else ENCODER_LEN
        dims = cache_dims(design, "BHSD", length)
        for layer in range(design.num_layers):
            for role in ("cross_key", "cross_value"):
                if design.past:
                    g.input(design.name("past", layer, role), 1, dims)
                if design.cross != "given":
                    g.output(design.name("present", layer, role), 1, dims)


def past_len(g: Graph) -> str:
    """A scalar, from the first cache tensor's own shape."""
    layer, role = tensors(g.design)[0]
    axis = groups(layout_of(g.design, role)).index("S")
    return g.length(g.design.name("past", layer, role), axis)


def past_tensor(g: Graph, layer: int, role: str) -> str:
    """The input that holds a layer's role, its rows gathered where beams are chosen."""
    design = g.design
    both = design.stacked in ("2", "2D", "L2")
    first = tensors(design)[0][0] if "L" in design.stacked else layer
    role = "key_value" if both else role
    wire = design.name("past", first, role)
    if "beam_indices" in design.extras:
        beams = design.label("beam_indices")
        wire = g.add("Gather", wire, beams, axis=groups(layout_of(design, role)).index("B"))
    return wire


def past_part(g: Graph, layer: int, role: str) -> str:
    """The past of one layer and role, in its own layout, out of whatever tensor it is in."""
    design, wire = g.design, past_tensor(g, layer, role)
    if "L" in design.stacked:
        wire = g.add(
            "Gather", wire, g.const(design.kinds[:layer].count("A")), axis=design.stack_axis
        )
    return pair_part(g, wire, role) if "2" in design.stacked else wire


def pair_part(g: Graph, wire: str, role: str) -> str:
    """Key or value of a layer's stack of both."""
    design = g.design
    if design.stacked == "2D":
        sizes = g.const([design.head_dim] * 2)
        axis = groups(design.layouts[0]).index("D")
        return g.many("Split", [wire, sizes], 2, axis=axis)[ROLES.index(role)]
    return g.add("Gather", wire, g.const(ROLES.index(role)), axis=design.stack_axis)


def pair(g: Graph, parts: list[str]) -> str:
    """A layer's key and value in one tensor."""
    if g.design.stacked == "2D":
        return g.add("Concat", *parts, axis=groups(g.design.layouts[0]).index("D"))
    return stack(g, parts)


def stack(g: Graph, parts: list[str]) -> str:
    axis = g.design.stack_axis
    return g.add("Concat", *(g.unsqueeze(part, axis) for part in parts), axis=axis)


def present_tensors(g: Graph, parts: dict[tuple[int, str], str]) -> dict[str, str]:
    """The wire of each present by its output's name, from parts by layer and role."""
    design = g.design
    attending = sorted({layer for layer, _ in parts})
    found: dict[str, str] = {}
    for layer, role in tensors(design):
        roles = ROLES if role == "key_value" else (role,)
        layers = attending if "L" in design.stacked else [layer]
        stacks = [
            parts[i, role] if (i, role) in parts else pair(g, [parts[i, r] for r in roles])
            for i in layers
        ]
        found[design.name("present", layer, role)] = (
            stack(g, stacks) if "L" in design.stacked else stacks[0]
        )
    return found
