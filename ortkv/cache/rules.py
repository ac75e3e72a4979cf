"""Which slot an entry's update rule takes, and where its tokens are on the key axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.cache.fixed import ConstantSlot, StateSlot
from ortkv.cache.sliding import DeltaSlot, FixedDeltaSlot, FixedWindowSlot
from ortkv.cache.slots import ConcatSlot, InPlaceSlot, ScatterSlot

if TYPE_CHECKING:
    from ortkv.cache.slots import Slot
    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry
    from ortkv.schema.spec import RowAlignment, Update


_SLOTS: dict[Update, type[ConcatSlot | InPlaceSlot | ScatterSlot | DeltaSlot | StateSlot]] = {
    "concat": ConcatSlot,
    "in_place": InPlaceSlot,
    "scatter": ScatterSlot,
    "delta": DeltaSlot,
    "window": ConcatSlot,
    "replace": StateSlot,
}


def new_slot(entry: CacheEntry, batch: int, device: Device, source_len: int) -> Slot:
    """An empty slot of the entry's update rule. ``source_len``: the tokens cross-attention sees."""
    if entry.update == "constant":
        return ConstantSlot(entry, batch, device, source_len)
    if entry.capacity is not None and entry.update in ("delta", "window"):
        return (FixedDeltaSlot if entry.update == "delta" else FixedWindowSlot)(
            entry, batch, device
        )
    return _SLOTS[entry.update](entry, batch, device)


def alignment(entry: CacheEntry, rows: RowAlignment) -> RowAlignment:
    """At which end shorter rows' tokens are; a past that ortkv or a window moves is at its end."""
    return "end" if entry.update in ("delta", "window") else rows
