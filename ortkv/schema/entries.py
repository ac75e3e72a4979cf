"""One cache entry out of what each kind of evidence says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names, shapes
from ortkv.schema.layout import Dims, layout
from ortkv.schema.seen import seen
from ortkv.schema.settled import settled_layout
from ortkv.schema.sizes import Size
from ortkv.schema.spec import CacheEntry
from ortkv.schema.stated import settle
from ortkv.signature import ONNX_TYPES

if TYPE_CHECKING:
    from ortkv.schema.flow import Flow
    from ortkv.schema.layout import Layout
    from ortkv.schema.names import Named
    from ortkv.schema.sizes import GraphSizes, Sizes
    from ortkv.schema.spec import Evidence, Role, Update
    from ortkv.schema.stated import StatedEntry
    from ortkv.signature import Dim, Signature, TensorSpec

_CROSS: dict[Role, Role] = {"key": "cross_key", "value": "cross_value"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A past input with its present, and what each kind of evidence says of it.

    is_state: whether it is a state of fixed size, not keys or values.
    order: when the graph takes it up, for one that has no flow.
    stated: what the user says of it.   is_shown: whether the flow is the graph's own in all that
    an entry rests on, not what was stated.
    """

    past: TensorSpec
    present: TensorSpec | None
    flow: Flow | None
    named: Named | None
    is_state: bool = False
    order: int = 0
    stated: StatedEntry | None = None
    is_shown: bool = True


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An entry, its layer still provisional; and the rows its batch axis fixes, if any."""

    entry: CacheEntry
    fixed_batch: int | None


def draft(candidate: Candidate, signature: Signature, sizes: GraphSizes, batch: Dim) -> Draft:
    """What the evidence makes of a candidate.

    Raises: UnsupportedModel where its role, an axis or its update rule stays open.
    """
    if candidate.is_state:
        return _state(candidate)
    past, flow, told = candidate.past, candidate.flow, candidate.stated
    present = candidate.present or _present_by_name(candidate, signature)
    update = _update(flow)
    if present is None and update != "constant":
        raise UnsupportedModel(
            f"{past}: a cache that the graph joins with new tokens, but no output is its present. "
            f"{seen('outputs', signature.outputs)}. Export past and present together. "
            + settle(entries=[{"past": past.name, "present": "<output>"}])
        )
    by_shape = None if present is None else shapes.sequence_axis(past, present)
    dims = _dims(past, present, sizes)
    found = layout(dims, flow, sequence=by_shape, batch=batch)
    if told is not None:
        found = settled_layout(told, found, dims, past, batch)
    _check(past, present, found, update)
    if found is None:  # _check has raised
        raise UnsupportedModel(str(past))
    role = _role(candidate, update)
    return Draft(
        entry=CacheEntry(
            layer=candidate.named.layer if candidate.named is not None else 0,
            role=role,
            past=past.name,
            present=None if present is None else present.name,
            layout=found.axes,
            update=update,
            dtype=past.dtype,
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            num_layers=found.num_layers,
            capacity=found.capacity,
            alignment=flow.alignment if flow is not None else "end",
            window=_window(flow, found, past) if update == "window" else None,
            evidence=_evidence(candidate, present, role, found.axes, by_shape),
        ),
        fixed_batch=found.fixed_batch,
    )


def _update(flow: Flow | None) -> Update:
    if flow is None:
        return "concat"
    return flow.update or "constant"


def _dims(past: TensorSpec, present: TensorSpec | None, sizes: GraphSizes) -> Dims:
    """Past's dims; for each axis the size that the graph computes or states for the present."""
    stated = () if present is None else present.dims or ()
    computed: Sizes = sizes.of(present.name) or () if present is not None else ()
    rank = past.rank or 0
    known: list[Size | None] = list(computed) if len(computed) == rank else [None] * rank
    if len(stated) == rank:
        known = [
            Size.of(dim) if isinstance(dim, int) else size
            for dim, size in zip(stated, known, strict=True)
        ]
    return Dims(past=past.dims or (), sizes=tuple(known))


def _check(
    past: TensorSpec, present: TensorSpec | None, found: Layout | None, update: Update
) -> None:
    if past.dtype not in ONNX_TYPES or (present is not None and past.dtype != present.dtype):
        raise UnsupportedModel(
            f"{past} and {present}: a cache pair needs one dtype that ortkv knows, past and "
            "present alike. Export them so."
        )
    if found is None:
        raise UnsupportedModel(
            f"{past}: expected an axis that grows with the tokens, and the number of key/value "
            "heads and head_dim as fixed sizes; the graph does not show which axis is which. "
            "Export with named dynamic axes and static head sizes, or state its own layout. "
            + settle(entries=[{"past": past.name, "layout": "BHSD"}])
        )
    if found.capacity is not None and update == "concat":
        raise UnsupportedModel(
            f"{past}: its sequence axis is fixed at {found.capacity}: expected a symbolic "
            "one, which a growing cache needs. Export with a dynamic past length."
        )


def _window(flow: Flow | None, found: Layout, past: TensorSpec) -> int:
    window = found.capacity or (flow.window if flow else None)
    if window is None:
        raise UnsupportedModel(
            f"{past}: a window that drops its oldest tokens, but neither its dims nor the graph "
            "say how many it keeps. Export it with a fixed size."
        )
    return window


def _present_by_name(candidate: Candidate, signature: Signature) -> TensorSpec | None:
    """The output of the same layer and role, for a cache that the graph only reads."""
    if candidate.named is None or (candidate.stated and candidate.stated.no_present):
        return None
    return next(
        (s for s in signature.outputs if names.read_present(s.name) == candidate.named), None
    )


def _role(candidate: Candidate, update: Update) -> Role:
    """What the graph does with it; its name only where the graph leaves that open."""
    if candidate.stated is not None and candidate.stated.role is not None:
        return candidate.stated.role
    role = candidate.flow.role if candidate.flow is not None else None
    role = role or (candidate.named.role if candidate.named is not None else None)
    if role is None:
        raise UnsupportedModel(
            f"{candidate.past}: a cache, but neither its use in the graph nor its name says "
            'whether it holds keys or values. State its role, "key" or "value". '
            + settle(entries=[{"past": candidate.past.name, "role": "key"}])
        )
    return _CROSS.get(role, role) if update == "constant" else role


def _evidence(
    candidate: Candidate, present: TensorSpec | None, role: Role, axes: str, by_shape: int | None
) -> tuple[Evidence, ...]:
    """The kinds of evidence that agree with the verdict."""
    found: list[Evidence] = []
    if candidate.flow is not None and candidate.is_shown and _is_sequence(candidate.flow, axes):
        found.append("topology")
    named = candidate.named
    if named is not None and named.role == role:
        other = None if present is None else names.read_present(present.name)
        if present is None or other == named:
            found.append("name")
    if by_shape is not None and _axis_of(axes) == by_shape:
        found.append("shape")
    if candidate.stated is not None:
        found.append("stated")
    return tuple(found)


def _is_sequence(flow: Flow, axes: str) -> bool:
    """Whether the graph shows S where the layout has it, or shows nothing of it."""
    return flow.sequence is None or flow.sequence.axis == _axis_of(axes)


def _axis_of(axes: str) -> int:
    """Where S is among a layout's axes."""
    before = axes[: axes.index("S")]
    for inside in before.split("(")[1:]:
        merged = inside.split(")")[0]
        before = before.replace(f"({merged})", "X")
    return len(before)


def _state(candidate: Candidate) -> Draft:
    past, present, named = candidate.past, candidate.present, candidate.named
    dims = past.dims or ()
    kernel = candidate.flow.kernel if candidate.flow is not None else None
    if kernel is not None and dims and not isinstance(dims[-1], int):
        dims = (*dims[:-1], kernel)
    state_dims = tuple(dim for dim in dims[1:] if isinstance(dim, int))
    if present is None or past.dtype != present.dtype or len(state_dims) != len(dims) - 1:
        raise UnsupportedModel(
            f"{past} and {present}: a state needs one dtype and fixed sizes but for the batch in "
            "front. Export it so."
        )
    role: Role = "conv" if kernel is not None else "recurrent"
    if named is not None and named.role in ("conv", "recurrent"):
        role = named.role
    if candidate.stated is not None and candidate.stated.role is not None:
        role = candidate.stated.role
    evidence: list[Evidence] = ["topology"] if candidate.is_shown else []
    if named is not None and named.role == role and names.read_present(present.name) == named:
        evidence.append("name")
    evidence.append("shape")
    if candidate.stated is not None:
        evidence.append("stated")
    return Draft(
        entry=CacheEntry(
            layer=named.layer if named is not None else 0,
            role=role,
            past=past.name,
            present=present.name,
            layout="B" + "X" * len(state_dims),
            update="replace",
            dtype=past.dtype,
            num_kv_heads=1,
            head_dim=1,
            state_dims=state_dims,
            evidence=tuple(evidence),
        ),
        fixed_batch=next((dim for dim in dims[:1] if isinstance(dim, int)), None),
    )
