"""Evidence from the graph itself: which past input reaches which present output, and how.

Each input is walked forward through ops that only move data. The op that joins it with the
new tokens gives the update rule and the sequence axis; the product it then enters, before
or after the softmax, tells key from value; the graph outputs it reaches are its presents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.schema.deltas import arrivals_of_new
from ortkv.schema.findings import Graph
from ortkv.schema.flow import Flow, Stack
from ortkv.schema.fused_ops import KEY, KEY_VALUE, VALUE
from ortkv.schema.moves import Part, only_part
from ortkv.schema.walk import walk

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortkv.schema.findings import Findings, Step
    from ortkv.schema.moves import Axis
    from ortkv.schema.sizes import GraphSizes
    from ortkv.schema.spec import Role
    from ortkv.schema.wiring import Wiring

LEAST_CACHE_RANK = 3
"""A tensor of a lower rank holds no keys or values."""


def flows(
    wiring: Wiring, sizes: GraphSizes, inputs: dict[str, int], outputs: Iterable[str]
) -> dict[str, Flow]:
    """The flow of each input that is joined with new tokens or read by an attention.

    inputs: the rank of each input that may be a cache.
    """
    pasts = frozenset(name for name, rank in inputs.items() if rank >= LEAST_CACHE_RANK)
    graph = Graph(wiring=wiring, sizes=sizes, pasts=pasts, outputs=frozenset(outputs))
    found = (_flow(graph, name, inputs[name]) for name in inputs if name in pasts)
    return {flow.past: flow for flow in found if flow is not None}


def _flow(graph: Graph, past: str, rank: int) -> Flow | None:
    findings = walk(graph, past, rank)
    joined = {name: s for name, s in findings.arrivals.items() if s.join is not None}
    arrivals = joined or arrivals_of_new(graph, findings)
    if not arrivals and not findings.roles and not findings.kernels:
        return None
    present = min(arrivals, key=lambda name: (len(arrivals[name].path), name), default=None)
    arrival = None if present is None else arrivals[present]
    join = next(iter(findings.joins), None) if arrival is None else arrival.join
    at_join = None if join is None else only_part(join.axis)
    sequence = at_join or _most_agreed(findings.sequences)
    return Flow(
        past=past,
        present=present or next(iter(findings.arrivals), None),
        update=None if join is None else join.update,
        sequence=sequence,
        depth=_most_agreed(findings.depths),
        splits=_splits(findings),
        new_sizes=findings.new_sizes,
        stacks=_stacks(findings, sequence),
        role=_one_role(findings.roles),
        head_dim=None if join is None else join.head_dim,
        order=min(findings.orders, default=0),
        window=None if arrival is None else arrival.window,
        query_len=None if arrival is None else arrival.query_len,
        alignment="start" if arrival is not None and arrival.placed else "end",
        fault=_fault(arrival),
        row_lengths=frozenset(findings.row_lengths),
        kernel=None if findings.roles else max(findings.kernels, default=None),
        transposed=bool(findings.transposes),
        path=(past,) if arrival is None else arrival.path,
        join=None if join is None else join.op,
        readers=tuple(findings.readers),
    )


def _fault(arrival: Step | None) -> str:
    """What keeps what arrives from being a present; '' if nothing."""
    if arrival is None or arrival.join is None:
        return ""
    if arrival.join.fault or arrival.fault:
        return arrival.join.fault or arrival.fault
    parts = [only_part(axis) for axis in arrival.axes or ()]
    own = [part.axis for part in parts if part is not None and part.is_whole]
    return "gives the present out in another order of axes" if own != sorted(own) else ""


def _most_agreed(axes: list[Axis]) -> Part | None:
    parts = [part for axis in axes if (part := only_part(axis)) is not None]
    return max(parts, key=parts.count, default=None)


def _splits(findings: Findings) -> tuple[tuple[Part, ...], ...]:
    """Axes of which a part turned out to be S or D."""
    named = [*findings.sequences, *findings.depths]
    parts = {part for axis in named for part in axis if not part.is_whole}
    wholes = {(part.axis, part.sizes) for part in parts}
    return tuple(
        tuple(Part(axis, i, sizes) for i in range(len(sizes)))
        for axis, sizes in sorted(wholes, key=lambda whole: whole[0])
    )


def _stacks(findings: Findings, sequence: Part | None) -> tuple[Stack, ...]:
    return tuple(
        Stack(
            axis=part.axis,
            letter="2" if _tells_roles(taken) else "L",
            num_parts=len(taken),
            own_axis=part in findings.dropped,
        )
        for part, taken in sorted(findings.parts.items(), key=lambda item: item[0].axis)
        if part != sequence and (part in findings.dropped or _tells_roles(taken))
    )


def _tells_roles(parts: dict[int, set[Role]]) -> bool:
    """Whether one of two parts is always key and the other always value."""
    return len(parts) == 2 and sorted(map(sorted, parts.values())) == [[KEY], [VALUE]]


def _one_role(roles: set[Role]) -> Role | None:
    if len(roles) > 1:
        return KEY_VALUE
    return next(iter(roles), None)
