"""Whether rows of unequal length can share a run, and where their tokens are then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.schema.joins import SCATTERS
from ortkv.schema.placed import adds_by_place
from ortkv.schema.uses import values_reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ortkv.schema.entries import Candidate
    from ortkv.schema.spec import HelperInput, HelperKind, RowAlignment
    from ortkv.schema.wiring import Wiring


def row_alignment(candidates: Sequence[Candidate], helpers: Sequence[HelperInput]) -> RowAlignment:
    """Rows that an op counts start at one place; those appended to at one place end there."""
    if any(c.flow is not None and c.flow.update == "in_place" for c in candidates):
        return "start"
    counted = any(h.kind == "past_length" and _is_per_row(h) for h in helpers)
    is_scatter = any(c.flow is not None and c.flow.update == "scatter" for c in candidates)
    return "start" if is_scatter and counted else "end"


def takes_ragged_rows(
    wiring: Wiring, candidates: Sequence[Candidate], helpers: Sequence[HelperInput], logits: str
) -> bool:
    """True where rows of unequal length can share a run and each stay exact.

    An op that counts its rows must get each row's own number, from what a mask or lengths hold.
    Where the graph joins past and new itself, a mask must shut the padding out and positions
    must be told: both have to matter for the logits, not only to be inputs; nor may joined keys
    be rotated by where they lie, which padding shifts.
    """
    if _has_source(candidates, helpers) and not takes_ragged_sources(wiring, helpers, logits):
        return False
    caches = [c for c in candidates if not c.is_state and c.flow is not None and c.flow.update]
    counts = {wire for c in caches if c.flow is not None for wire in c.flow.row_lengths}
    counted = [h for h in helpers if h.kind in ("mask_2d", "last_positions") or _is_per_row(h)]
    counted = [h for h in counted if h.values == "keep" and not h.dtype.startswith(("float", "bf"))]
    if row_alignment(candidates, helpers) == "start":
        return (
            bool(counts)
            and "" not in counts
            and all(_reached(wiring, counted, [wire]) for wire in counts)
        )
    if _reached(wiring, _of(helpers, ("positions",)), _places(wiring, candidates)):
        return False
    masks = _of(helpers, ("mask_2d", "mask_4d"))
    told = [h for h in _of(helpers, ("positions",)) if len(h.dims) > 1]
    joins = {wire for c in caches if c.flow and c.flow.join for wire in c.flow.join.outputs if wire}
    if adds_by_place(wiring, joins, [h.name for h in (*masks, *told)]):
        return False
    return (
        not counts - {""}
        and not any(c.flow is not None and "GroupQueryAttention" in c.flow.path for c in caches)
        and _reached(wiring, masks, [logits])
        and _reached(wiring, told, [logits])
    )


def _places(wiring: Wiring, candidates: Sequence[Candidate]) -> list[str]:
    """Wires that say where in a buffer new tokens go: a row's own position is not its place."""
    if not any(c.flow is not None and c.flow.update == "scatter" for c in candidates):
        return []
    indices = [op.input(1) for op in wiring.ops if op.kind in SCATTERS]
    return indices + [op.input(0) for op in wiring.ops if op.kind == "Where"]


def takes_ragged_sources(wiring: Wiring, helpers: Sequence[HelperInput], logits: str) -> bool:
    """True where an encoder's states of unequal length have a mask, and it matters."""
    return _reached(wiring, _of(helpers, ("encoder_mask",)), [logits])


def _has_source(candidates: Sequence[Candidate], helpers: Sequence[HelperInput]) -> bool:
    """Whether the graph looks at an encoder's states, or at keys and values made of them."""
    only_read = any(
        not c.is_state and c.flow is not None and c.flow.update is None for c in candidates
    )
    return only_read or bool(_of(helpers, ("encoder_states",)))


def _is_per_row(helper: HelperInput) -> bool:
    return helper.kind == "past_length" and len(helper.dims) == 1 and helper.dims[0] != 1


def _of(helpers: Iterable[HelperInput], kinds: tuple[HelperKind, ...]) -> list[HelperInput]:
    return [helper for helper in helpers if helper.kind in kinds]


def _reached(wiring: Wiring, helpers: Iterable[HelperInput], targets: Sequence[str]) -> bool:
    return any(values_reach(wiring, helper.name, targets) for helper in helpers)
