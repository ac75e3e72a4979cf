"""Rows of what cross-attention looks at: chosen from one source, or joined from several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortkv.errors import InvalidRequest
from ortkv.feeds import Source

if TYPE_CHECKING:
    from collections.abc import Sequence


def source_rows(source: Source, rows: Sequence[int]) -> Source:
    """These rows of a source, in this order."""
    return Source(source.states[list(rows)], [source.lengths[row] for row in rows])


def joined_source(sources: Sequence[Source | None]) -> Source | None:
    """One source of all rows, the shorter padded with zeros; None where there is none.

    Raises: InvalidRequest where some caches have one and some have none.
    """
    found = [source for source in sources if source is not None]
    if not found:
        return None
    if len(found) < len(sources):
        raise InvalidRequest(
            f"{len(found)} of {len(sources)} caches have a source: expected all or none. Give "
            "every sequence of a batch its source."
        )
    if len(found) == 1:
        return found[0]
    longest = max(source.states.shape[1] for source in found)
    padded = [
        np.pad(states, ((0, 0), (0, longest - states.shape[1]), (0, 0))) for states, _ in found
    ]
    return Source(np.concatenate(padded), [length for _, own in found for length in own])
