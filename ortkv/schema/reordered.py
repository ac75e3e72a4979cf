"""Transpose, Unsqueeze and Squeeze, on whatever is known of a tensor axis by axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ortkv.schema.wiring import Op, Wiring

MAX_RANK = 16
"""Of what is followed, so that no graph makes it grow with every op."""

Told = TypeVar("Told")


def transposed(op: Op, axes: tuple[Told, ...]) -> tuple[Told, ...] | None:
    """The axes after a Transpose; None where its ``perm`` is none of theirs."""
    perm = op.attribute("perm")
    order = list(reversed(range(len(axes)))) if perm is None else list(perm.ints)
    return tuple(axes[i] for i in order) if sorted(order) == list(range(len(axes))) else None


def unsqueezed(
    wiring: Wiring, op: Op, axes: tuple[Told, ...], new: Told
) -> tuple[Told, ...] | None:
    """The axes after an Unsqueeze, ``new`` for each that it adds; None where these stay open."""
    added = _axes_argument(wiring, op)
    rank = len(axes) + len(added or ())
    if added is None or rank > MAX_RANK:
        return None
    places, old = {i % rank for i in added}, iter(axes)
    if len(places) < len(added):
        return None
    return tuple(new if i in places else next(old) for i in range(rank))


def squeezed(wiring: Wiring, op: Op, axes: tuple[Told, ...]) -> tuple[Told, ...] | None:
    """The axes after a Squeeze; None where the dropped ones are not stated."""
    dropped = _axes_argument(wiring, op)
    return None if dropped is None else without(axes, dropped)


def without(axes: tuple[Told, ...], dropped: list[int]) -> tuple[Told, ...] | None:
    """The axes that are left; None where there were none."""
    if not axes:
        return None
    gone = {i % len(axes) for i in dropped}
    return tuple(axis for i, axis in enumerate(axes) if i not in gone)


def _axes_argument(wiring: Wiring, op: Op) -> list[int] | None:
    """``axes`` of Squeeze and Unsqueeze: an attribute up to opset 12, an input from 13 on."""
    attribute = op.attribute("axes")
    return list(attribute.ints) if attribute is not None else wiring.ints(op.input(1))
