"""A few runs that a wrong cache cannot pass: what a load can afford."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortkv.proof import ways
from ortkv.proof.comparing import compared, full_runs, tolerance_of
from ortkv.proof.helper_fit import check_helpers_fit
from ortkv.proof.probe import with_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ortkv.decoder import LoadedGraph
    from ortkv.proof.report import Check

    Way = Callable[[], ways.Scored]

PROBE_LEN, SHORT_PROBE_LEN = 12, 4
"""Tokens a way runs over: the shorter where the first run says that time is scarce."""
NUM_RUNS = 24
"""About how many runs all ways take together."""


@dataclass(frozen=True, kw_only=True)
class QuickReport:
    """What was compared; ``skipped`` cannot be, of this graph; ``not_run`` was left for time."""

    checks: tuple[Check, ...]
    tolerance: float
    skipped: tuple[str, ...]
    not_run: tuple[str, ...]

    @property
    def max_abs_error(self) -> float:
        """The largest error of any check; 0 where none was run."""
        return max((check.max_abs_error for check in self.checks), default=0.0)

    @property
    def ok(self) -> bool:
        """True where no check is beyond tolerance."""
        return self.max_abs_error <= self.tolerance


def quick_proof(
    graph: LoadedGraph,
    *,
    seed: int = 0,
    budget_s: float = math.inf,
    max_tokens: int | None = None,
    passed: Collection[str] = (),
) -> QuickReport:
    """Compare the last logits of each way with those of one full run.

    budget_s: no check starts once so many seconds are gone.   max_tokens: the model's context.
    passed: names of checks that need not be run.

    Raises: UnsupportedModel for a helper whose kind cannot be that of its input.
    """
    check_helpers_fit(graph.schema)
    graph = with_probes(graph, seed)
    deadline = time.perf_counter() + budget_s
    random = np.random.default_rng(seed)
    tokens = random.integers(0, graph.schema.vocab_size or 256, PROBE_LEN).tolist()
    full = full_runs(graph)
    short = full(tokens[:SHORT_PROBE_LEN], 0)
    spent = time.perf_counter() - (deadline - budget_s) if math.isfinite(budget_s) else 0.0
    is_short = spent * NUM_RUNS > budget_s or (max_tokens or PROBE_LEN) < PROBE_LEN
    tokens = tokens[:SHORT_PROBE_LEN] if is_short else tokens
    planned, skipped = _ways(graph, tokens)
    if max_tokens is not None and max_tokens < SHORT_PROBE_LEN:
        planned, skipped = {}, [f"every check: a context of {max_tokens} tokens is too short"]
    if not np.isfinite(short).all():
        planned, skipped = {}, ["every check: a full run's own logits are not finite numbers"]
        short = np.zeros_like(short)
    checks: list[Check] = []
    not_run: list[str] = []
    for name, way in planned.items():
        if name in passed:
            continue
        if time.perf_counter() > deadline:
            not_run.append(name)
        else:
            checks.append(compared(way(), full))
    return QuickReport(
        checks=tuple(checks),
        tolerance=tolerance_of(graph, float(np.abs(short).max())),
        skipped=tuple(skipped),
        not_run=tuple(not_run),
    )


def _ways(graph: LoadedGraph, tokens: list[int]) -> tuple[dict[str, Way], list[str]]:
    """The ways by name, the most telling first, and why others cannot be gone."""
    schema, half = graph.schema, len(tokens) // 2
    planned: dict[str, Way] = {
        "append after a turn": lambda: ways.appended(graph, tokens, prompt_len=half),
        "chunked prefill": lambda: _last(
            ways.chunks(graph, tokens, ends=(len(tokens) // 4, len(tokens)))
        ),
        "rewind": lambda: _last(ways.rewound(graph, tokens, kept_len=half, new_len=1)),
    }
    skipped: list[str] = []
    if schema.fixed_query_len == 1 and graph.prefill is None:
        # The reference itself takes a token a run: these two would be compared with themselves.
        del planned["append after a turn"], planned["chunked prefill"]
        skipped.append("append after a turn, chunked prefill: this graph takes one token a run")
    if schema.fixed_batch is not None:
        return planned, [*skipped, "equal rows, ragged rows: this graph takes one row a run"]
    equal = [tokens[:half], tokens[half:]]
    other = 1 if schema.takes_ragged_sources else 0
    planned["equal rows"] = lambda: _together(graph, "equal rows", equal, sources=(0, other))
    if schema.takes_ragged_rows:
        ragged = [tokens[:half], tokens[half : half + 1]]
        planned["ragged rows"] = lambda: _together(graph, "ragged rows", ragged, sources=(0, 1))
    else:
        skipped.append("ragged rows: this graph's rows of unequal length run one after the other")
    return planned, skipped


def _together(
    graph: LoadedGraph, name: str, rows: list[list[int]], *, sources: tuple[int, int]
) -> ways.Scored:
    """Two steps, the last compared: it reads what the one before wrote."""
    first, second = rows[0][0], rows[1][0]
    scored = ways.together(graph, name, rows, [[first, second], [second, first]], sources)
    return ways.Scored(
        name=name, logits=scored.logits[-2:], prefixes=scored.prefixes[-2:], sources=sources
    )


def _last(way: ways.Scored) -> ways.Scored:
    return ways.Scored(name=way.name, logits=way.logits[-1:], prefixes=way.prefixes[-1:])
