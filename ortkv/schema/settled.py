"""What is stated of a cache, put over what the graph shows of it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NoReturn

from ortkv.errors import UnsupportedModel
from ortkv.schema.flow import Flow
from ortkv.schema.helper_inputs import default_values, fits_kind
from ortkv.schema.layout import Layout, heads_of
from ortkv.schema.mask_values import mask_values
from ortkv.schema.sizes import Size
from ortkv.schema.spec import HelperInput
from ortkv.schema.stated import groups, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.layout import Dims
    from ortkv.schema.spec import CacheEntry
    from ortkv.schema.stated import KvMap, StatedEntry
    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Dim, Signature, TensorSpec


def settled_flow(told: StatedEntry, flow: Flow | None) -> Flow | None:
    """The flow with what is stated in it; None where flow and statement leave it open.

    A fault is one of the update rule that was derived: stating another leaves it to the proof.
    """
    is_known = flow is not None and bool(flow.update or flow.role) and flow.kernel is None
    if not (is_known or told.is_complete):
        return None
    base = flow if flow is not None else _no_flow(told.past)
    update = told.update or ("constant" if told.role in ("cross_key", "cross_value") else None)
    if update is None:
        update = base.update if is_known else "concat"
    return replace(
        base,
        present=None if told.no_present else told.present or base.present,
        update=None if update == "constant" else update,
        role=told.role or base.role,
        head_dim=told.head_dim or base.head_dim,
        kernel=None,
        fault="" if told.update is not None else base.fault,
    )


def _no_flow(past: str) -> Flow:
    return Flow(
        past=past, present=None, update=None, sequence=None, depth=None, splits=(), new_sizes={},
        stacks=(), role=None, head_dim=None, order=0, window=None, query_len=None, fault="",
        row_lengths=frozenset(), kernel=None, alignment="end", transposed=False, path=(past,),
        join=None, readers=(),
    )  # fmt: skip


def settled_layout(
    told: StatedEntry, found: Layout | None, dims: Dims, past: TensorSpec, batch: Dim
) -> Layout | None:
    """The layout as stated; sizes from the dims by its letters, or as stated where these are open.

    Raises: UnsupportedModel where a size stays open, or dims and statement differ.
    """
    sizes_stated = told.num_kv_heads is not None or told.head_dim is not None
    axes = told.layout or (found.axes if found is not None and sizes_stated else None)
    if axes is None:
        return found
    stated = {"H": told.num_kv_heads, "D": told.head_dim, "2": 2}
    known: dict[str, int] = {name: size for name, size in stated.items() if size is not None}
    fixed: dict[str, int] = {}
    for axis, letters in enumerate(groups(axes)):
        size = dims.size(axis)
        number = size.number if size is not None else None
        if "B" in letters and "H" in letters and "H" not in known and size is not None:
            heads = heads_of(size, None if batch is None else Size.of(batch))
            known |= {} if heads is None else {"H": heads}
        if number is not None:
            _solve(told, letters, number, known, fixed, past)
    sizes = {"H": 1, "L": 1} | known
    for letter, key in (("H", "num_kv_heads"), ("D", "head_dim"), ("L", "num_layers")):
        if letter in axes and letter not in known:
            _open(told, past, axes, key)
    return Layout(
        axes=axes,
        num_layers=sizes["L"],
        num_kv_heads=sizes["H"],
        head_dim=sizes["D"],
        fixed_batch=fixed.get("B"),
        capacity=fixed.get("S"),
    )


def _solve(
    told: StatedEntry,
    letters: str,
    number: int,
    known: dict[str, int],
    fixed: dict[str, int],
    past: TensorSpec,
) -> None:
    """The one size that an axis of known length leaves open.   Changes: known, fixed."""
    open_ones = [letter for letter in letters if letter not in known]
    rest = prod(known[letter] for letter in letters if letter in known)
    if len(open_ones) > 1:
        return
    if (number % rest) or (not open_ones and number != rest):
        raise UnsupportedModel(
            f"{told.where} states sizes whose product is {rest} for {letters} of {past}, an axis "
            f"of {number}: expected them to agree. State the sizes that the graph has."
        )
    for letter in open_ones:
        (fixed if letter in "BS" else known)[letter] = number // rest


def _open(told: StatedEntry, past: TensorSpec, axes: str, key: str) -> NoReturn:
    if key == "num_layers":
        raise UnsupportedModel(
            f"{told.where} states layout {axes} for {past}: expected the axis of layers to have a "
            "fixed size. Export it so."
        )
    raise UnsupportedModel(
        f"{told.where} states layout {axes} for {past}, whose dims leave {key} open. "
        + settle(entries=[{"past": past.name, "layout": axes, key: 64}])
        + f" (with its own {key})"
    )


def settled_layers(entries: Sequence[CacheEntry], stated: KvMap) -> list[CacheEntry]:
    """The entries with stated layers in the place of those counted."""
    found: list[CacheEntry] = []
    for entry in entries:
        told = stated.entries.get(entry.past or "")
        layer = told.layer if told is not None else None
        found.append(entry if layer is None else replace(entry, layer=layer))
    return sorted(found, key=lambda entry: (entry.layer, entry.role))


def settled_helpers(signature: Signature, wiring: Wiring, stated: KvMap) -> dict[str, HelperInput]:
    """The helper inputs that are stated, by name.

    Raises: UnsupportedModel where an input's rank or dtype is none of its kind's.
    """
    found: dict[str, HelperInput] = {}
    for spec in signature.inputs:
        kind = stated.helpers.get(spec.name)
        if kind is None:
            continue
        if spec.dims is None or not fits_kind(kind, spec):
            raise UnsupportedModel(
                f"{stated.source}: inputs.helpers.{spec.name} is {kind!r}, but {spec} has a rank "
                "or dtype that no such input has. State another kind, or a number for it in "
                "inputs.values."
            )
        found[spec.name] = HelperInput(
            name=spec.name,
            kind=kind,
            dtype=spec.dtype,
            dims=spec.dims,
            values=default_values(spec, kind, mask_values(wiring, spec.name, spec.dtype)),
            fill=stated.values.get(spec.name, 0.0),
            is_stated=True,
        )
    return found
