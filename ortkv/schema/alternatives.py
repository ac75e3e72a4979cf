"""What else a graph may mean, where its wiring leaves more than one answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.schema.spec import CacheSchema


def alternatives(schema: CacheSchema) -> list[CacheSchema]:
    """All schemas that the evidence allows, the likeliest first."""
    choices = [
        [replace(h, values=values, open_values=()) for values in (h.values, *h.open_values)]
        for h in schema.helpers
    ]
    return [replace(schema, helpers=helpers) for helpers in itertools.product(*choices)]
