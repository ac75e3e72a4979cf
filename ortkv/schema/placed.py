"""Whether joined keys get their positions after the join, from where they lie in the cache.

Rows padded to one length lie elsewhere than their positions say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.schema.moves import AS_THEY_ARE, REARRANGING
from ortkv.schema.uses import values_reach

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ortkv.schema.wiring import Op, Wiring

_BLENDS = frozenset({"Mul", "Add", "Sub"})
_ALONG = AS_THEY_ARE | REARRANGING | _BLENDS | {"Neg", "Concat", "Gather", "Expand"}
_PLACES = frozenset({"Range", "Cos", "Sin", "CumSum"})
_MEASURES = frozenset({"Shape", "Size"})
_PICKS = frozenset({"Gather", "Slice"})


def adds_by_place(wiring: Wiring, joins: Collection[str], told: Collection[str]) -> bool:
    """Whether what is joined is then multiplied or added with what its place alone says.

    joins: wires of past and new together.   told: inputs that say each row's own positions.
    """
    along = set(_along(wiring, joins))
    others = {
        other
        for wire in along
        for op in wiring.consumers(wire)
        for other in _others(op, along)
        if _is_of_places(wiring, other, along)
    }
    return any(not any(values_reach(wiring, name, [other]) for name in told) for other in others)


def _along(wiring: Wiring, joins: Collection[str]) -> Iterator[str]:
    """Wires that the joined tokens go along, up to where they meet the query or the scores."""
    front, seen = list(joins), set(joins)
    while front:
        wire = front.pop()
        yield wire
        for op in wiring.consumers(wire):
            goes_on = op.kind in _BLENDS or op.kind == "Concat" or op.input(0) == wire
            for out in op.outputs if goes_on and op.kind in _ALONG else ():
                if out and out not in seen:
                    seen.add(out)
                    front.append(out)


def _others(op: Op, along: Collection[str]) -> list[str]:
    if op.kind == "RotaryEmbedding":
        return [name for name in op.inputs[1:] if name]
    return [name for name in op.inputs if op.kind in _BLENDS and name not in along]


def _is_of_places(wiring: Wiring, wire: str, along: Collection[str]) -> bool:
    """Whether a value is counted out, or picked from a table by a number that is computed."""
    front, seen = [wire], {wire}
    while front:
        op = wiring.makers.get(front.pop())
        if op is None or op.kind in _MEASURES:
            continue
        if op.kind in _PLACES or _is_picked(wiring, op):
            return True
        new = [name for name in op.inputs if name and name not in seen and name not in along]
        seen.update(new)
        front.extend(new)
    return False


def _is_picked(wiring: Wiring, op: Op) -> bool:
    table = wiring.constants.get(op.input(0))
    is_computed = any(name and name not in wiring.constants for name in op.inputs[1:])
    return op.kind in _PICKS and table is not None and len(table.dims) > 1 and is_computed
