"""A model's schema proved on the model: from a path to a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.errors import InvalidRequest
from ortkv.loading import load_model
from ortkv.proof import Check, EntryError, VerifyReport, by_layer, verify_graph

if TYPE_CHECKING:
    from pathlib import Path

    from ortkv.loading import MapSource
    from ortkv.runtime import Provider

__all__ = ["Check", "EntryError", "VerifyReport", "by_layer", "verify", "verify_graph"]


def verify(
    path: str | Path,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    precision: str | None = None,
    seed: int = 0,
    kv_map: MapSource | None = None,
) -> VerifyReport:
    """Prove a model's schema on the model itself; arguments as Generator's.

    seed: of the random tokens it is run on, 0 or more.
    """
    if type(seed) is not int or seed < 0:
        raise InvalidRequest(f"seed is {seed!r}: expected an integer, 0 or more.")
    model = load_model(path, provider=provider, threads=threads, precision=precision, kv_map=kv_map)
    return verify_graph(model.graph, seed=seed)
