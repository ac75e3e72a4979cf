"""Every way over every step: what ``ortkv verify`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortkv.decoder import Decoder
from ortkv.errors import UnsupportedModel
from ortkv.proof import ways
from ortkv.proof.comparing import compared, full_runs, largest, tolerance_of
from ortkv.proof.helper_fit import check_helpers_fit
from ortkv.proof.probe import with_probes
from ortkv.proof.report import EntryError, VerifyReport

if TYPE_CHECKING:
    from ortkv.decoder import LoadedGraph

PROMPT_LEN = 12
STEPS = 6
CHUNK_ENDS = (1, 5, 8)
LEAST_TOKENS = 6
"""With fewer no way differs from another."""


def verify_graph(graph: LoadedGraph, *, seed: int = 0) -> VerifyReport:
    """Compare steps, chunks, rows in one batch and a rewind with full runs over random tokens.

    Raises: UnsupportedModel for a graph that takes one token a run: it has no full run; and for
    a helper whose kind cannot be that of its input.
    """
    check_helpers_fit(graph.schema)
    if graph.schema.fixed_query_len == 1 and graph.prefill is None:
        raise UnsupportedModel(
            f"{graph.schema.tokens} takes one token a run, so that there is no full run to compare "
            "with: verify the graph that takes the whole prompt."
        )
    graph = with_probes(graph, seed)
    random = np.random.default_rng(seed)
    width = graph.schema.vocab_size or 256
    tokens = [int(token) for token in random.integers(0, width, _num_tokens(graph))]
    scored, skipped = _scored(graph, tokens)
    full = full_runs(graph)
    checks = tuple(compared(way, full) for way in scored)
    tolerance = tolerance_of(graph, np.abs(full(tokens, 0)).max())
    worst = max(check.max_abs_error for check in checks)
    return VerifyReport(
        ok=bool(worst <= tolerance),
        max_abs_error=worst,
        tolerance=tolerance,
        greedy_agreement=float(np.mean([check.greedy_agreement for check in checks])),
        checks=checks,
        entries=_entry_errors(graph, tokens),
        skipped=tuple(skipped),
    )


def _num_tokens(graph: LoadedGraph) -> int:
    """As many as the checks want, or as the graph's buffers hold."""
    capacity = graph.schema.capacity
    if capacity is not None and capacity < LEAST_TOKENS:
        raise UnsupportedModel(
            f"the cache of this graph holds {capacity} tokens: verify needs {LEAST_TOKENS}. Export "
            "the model with a larger one."
        )
    return min(PROMPT_LEN + STEPS, capacity or PROMPT_LEN + STEPS)


def _prompt_len(tokens: list[int]) -> int:
    return len(tokens) * PROMPT_LEN // (PROMPT_LEN + STEPS)


def _scored(graph: LoadedGraph, tokens: list[int]) -> tuple[list[ways.Scored], list[str]]:
    """Every way that the graph can go, and why it cannot go the others."""
    prompt_len = _prompt_len(tokens)
    steps = len(tokens) - prompt_len
    ends = [*(end for end in CHUNK_ENDS if end < len(tokens)), len(tokens)]
    scored = [
        ways.steps(graph, tokens, prompt_len=prompt_len),
        ways.chunks(graph, tokens, ends=ends),
        ways.rewound(graph, tokens, kept_len=prompt_len // 2, new_len=steps),
    ]
    if graph.schema.fixed_batch is not None:
        return scored, ["equal rows, ragged rows: this graph takes one row a run"]
    third = len(tokens) // 3
    equal = [tokens[start : start + third] for start in range(0, 3 * third, third)]
    new = [[tokens[step], tokens[-step - 1], tokens[step + 1]] for step in range(steps)]
    sources = (0, 1, 2) if graph.schema.takes_ragged_sources else (0, 0, 0)
    scored.append(ways.together(graph, "equal rows", equal, new, sources))
    if not graph.schema.takes_ragged_rows:
        return scored, ["ragged rows: this graph's rows of unequal length run one after the other"]
    ragged = [tokens[:length] for length in (prompt_len, 1, prompt_len // 2 - 1)]
    scored.append(ways.together(graph, "ragged rows", ragged, new, (0, 1, 2)))
    return scored, []


def _entry_errors(graph: LoadedGraph, tokens: list[int]) -> tuple[EntryError, ...]:
    at_once, stepped = Decoder(graph), Decoder(graph)
    at_once.prefill(tokens)
    prompt_len = _prompt_len(tokens)
    stepped.prefill(tokens[:prompt_len])
    for token in tokens[prompt_len:]:
        stepped.step([token])
    return tuple(
        EntryError(
            layer=entry.layer,
            role=entry.role,
            past=entry.past,
            max_abs_error=largest(at_once.cache.tensor(entry), stepped.cache.tensor(entry)),
        )
        for entry in graph.schema.entries
    )
