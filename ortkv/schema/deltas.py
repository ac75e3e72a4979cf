"""Presents of new tokens alone (``delta``): what the past was joined with is an output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.schema.moves import REARRANGING
from ortkv.schema.walk import follow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortkv.schema.findings import Findings, Graph, Step
    from ortkv.schema.moves import Axes

_UNDONE = REARRANGING | {"Expand", "Tile"}
"""Ops before which new tokens may be given out: they are put in order, or shared by more heads."""


def arrivals_of_new(graph: Graph, findings: Findings) -> dict[str, Step]:
    """Where the past reaches no output: the outputs that what it was joined with is (delta)."""
    arrivals: dict[str, Step] = {}
    for partner, step in findings.partners:
        if step.join is None:
            continue
        join = replace(step.join, update="delta")
        for wire, axes in _sources(graph, partner, step.axes):
            start = replace(step, wire=wire, axes=axes, join=join)
            arrivals |= follow(graph, start).arrivals
    return arrivals


def _sources(graph: Graph, wire: str, axes: Axes | None) -> Iterator[tuple[str, Axes | None]]:
    """A wire and those it was only rearranged from, each with its axes."""
    yield wire, axes
    while (maker := graph.wiring.makers.get(wire)) is not None and maker.kind in _UNDONE:
        perm = maker.attribute("perm")
        if maker.kind == "Transpose" and axes is not None and perm is not None:
            axes = _unpermuted(axes, list(perm.ints))
        elif maker.kind not in ("Identity", "Cast"):
            axes = None
        wire = maker.input(0)
        yield wire, axes


def _unpermuted(axes: Axes, perm: list[int]) -> Axes | None:
    """The axes before a Transpose that gave these; None where it is none of theirs."""
    if sorted(perm) != list(range(len(axes))):
        return None
    return tuple(axes[perm.index(i)] for i in range(len(axes)))
