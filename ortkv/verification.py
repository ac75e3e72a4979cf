"""Proof that a schema is right: the cached ways of computing logits against one full run.

A full run starts from an empty cache and reads nothing from it, so that it is right whatever
the schema says of the cache; every other way must agree with it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.cache import Cache
from ortkv.decoder import Decoder
from ortkv.errors import InvalidRequest, UnsupportedModel
from ortkv.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ortkv.decoder import LoadedGraph
    from ortkv.runtime import Provider

PROMPT_LEN = 12
STEPS = 6
ROW_LENGTHS = (12, 1, 5)

RELATIVE_TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest logit, by the coarsest dtype on the way. One rounding is 6e-8, 5e-4 or 4e-3;
another order of summation costs some tens of them over a network's depth. A misplaced cache
entry moves logits by 1e-2 of the largest and more."""
QUANTIZED_TOLERANCE = 5e-2
"""Where the graph's products round their inputs: one token and several then differ by 5e-3 of the
largest logit (int4 weights of the shipped model, measured). Crossed entries differ by far more.
Dynamic int8, whose scale spans all rows of a run, may differ more still and is then reported."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way to compute logits, against full runs.

    max_abs_error: of any logit at any step.   greedy_agreement: share of equal argmax.
    """

    name: str
    max_abs_error: float
    greedy_agreement: float


@dataclass(frozen=True, kw_only=True)
class EntryError:
    """The largest difference of an entry's cached tokens, stepped against computed at once."""

    layer: int
    role: str
    past: str | None
    max_abs_error: float


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was compared and how it came out; ``ok`` where every check is within tolerance."""

    ok: bool
    max_abs_error: float
    tolerance: float
    greedy_agreement: float
    checks: tuple[Check, ...]
    entries: tuple[EntryError, ...]
    skipped: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document ``ortkv verify --json`` prints."""
        return {"format": 1, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Logits [steps, vocab_size] of a way, and the tokens before each."""

    name: str
    logits: NDArray[np.float32]
    prefixes: list[list[int]]


def verify(
    path: str | Path, *, provider: Provider = "cpu", threads: int | None = None, seed: int = 0
) -> VerifyReport:
    """Prove a model's schema on the model itself; arguments as Generator's.

    seed: of the random tokens it is run on, 0 or more.
    """
    if type(seed) is not int or seed < 0:
        raise InvalidRequest(f"seed is {seed!r}: expected an integer, 0 or more.")
    return verify_graph(load_model(path, provider=provider, threads=threads).graph, seed=seed)


def verify_graph(graph: LoadedGraph, *, seed: int = 0) -> VerifyReport:
    """Compare steps, chunks, ragged rows and a rewind with full runs over random tokens.

    Raises: UnsupportedModel for a graph that takes one token a run: it has no full run.
    """
    if graph.schema.fixed_query_len == 1 and graph.prefill is None:
        raise UnsupportedModel(
            f"{graph.schema.tokens} takes one token a run, so that there is no full run to compare "
            "with: verify the graph that takes the whole prompt."
        )
    random = np.random.default_rng(seed)
    width = graph.schema.vocab_size or 256
    tokens = [int(token) for token in random.integers(0, width, PROMPT_LEN + STEPS)]
    ways: list[_Scored] = [
        _steps(graph, tokens),
        _chunks(graph, tokens),
        _rewound(graph, tokens),
    ]
    skipped: list[str] = []
    if graph.schema.takes_ragged_rows and graph.schema.fixed_batch is None:
        ways.append(_ragged(graph, tokens))
    else:
        skipped.append("ragged rows: this graph's rows of unequal length run one after the other")
    full = _remembering(lambda prefix: _full(graph, prefix))
    checks = tuple(_check(way, full) for way in ways)
    tolerance = _tolerance(graph, np.abs(full(tokens)).max())
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


def _full(graph: LoadedGraph, tokens: Sequence[int]) -> NDArray[np.float32]:
    return Decoder(graph).prefill(tokens).copy()


def _remembering(
    full: Callable[[list[int]], NDArray[np.float32]],
) -> Callable[[list[int]], NDArray[np.float32]]:
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def recall(prefix: list[int]) -> NDArray[np.float32]:
        key = tuple(prefix)
        if key not in known:
            known[key] = full(prefix)
        return known[key]

    return recall


def _steps(graph: LoadedGraph, tokens: list[int]) -> _Scored:
    decoder = Decoder(graph)
    logits = [decoder.prefill(tokens[:PROMPT_LEN]).copy()]
    logits += [decoder.step([token])[0].copy() for token in tokens[PROMPT_LEN:]]
    prefixes = [tokens[:n] for n in range(PROMPT_LEN, len(tokens) + 1)]
    return _Scored(name="prefill and steps", logits=np.array(logits), prefixes=prefixes)


def _chunks(graph: LoadedGraph, tokens: list[int]) -> _Scored:
    """The prompt in uneven parts, one of a single token."""
    decoder = Decoder(graph)
    ends = [1, 5, 8, len(tokens)]
    logits = [
        decoder.prefill(tokens[start:end]).copy()
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    prefixes = [tokens[:end] for end in ends]
    return _Scored(name="chunked prefill", logits=np.array(logits), prefixes=prefixes)


def _rewound(graph: LoadedGraph, tokens: list[int]) -> _Scored:
    """Back to half the prompt, then other tokens: none of the old ones may be left."""
    decoder = Decoder(graph)
    decoder.prefill(tokens)
    decoder.cache.truncate(PROMPT_LEN // 2)
    kept, other = tokens[: PROMPT_LEN // 2], tokens[::-1][:STEPS]
    logits = [decoder.step([token])[0].copy() for token in other]
    prefixes = [kept + other[:n] for n in range(1, len(other) + 1)]
    return _Scored(name="rewind", logits=np.array(logits), prefixes=prefixes)


def _ragged(graph: LoadedGraph, tokens: list[int]) -> _Scored:
    rows = [tokens[:length] for length in ROW_LENGTHS]
    alone = [Decoder(graph) for _ in rows]
    for decoder, row in zip(alone, rows, strict=True):
        decoder.prefill(row)
    together = Decoder(graph, Cache.joined([decoder.cache for decoder in alone]))
    logits: list[NDArray[np.float32]] = []
    prefixes: list[list[int]] = []
    for token in tokens[:STEPS]:
        rows = [[*row, token] for row in rows]
        logits += list(together.step([token] * len(rows)).copy())
        prefixes += rows
    return _Scored(name="ragged rows", logits=np.array(logits), prefixes=prefixes)


def _check(way: _Scored, full: Callable[[list[int]], NDArray[np.float32]]) -> Check:
    expected = np.array([full(prefix) for prefix in way.prefixes])
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(way.logits, expected, strict=True)]
    return Check(
        name=way.name,
        max_abs_error=_largest(way.logits, expected),
        greedy_agreement=sum(same) / len(same),
    )


def _entry_errors(graph: LoadedGraph, tokens: list[int]) -> tuple[EntryError, ...]:
    at_once, stepped = Decoder(graph), Decoder(graph)
    at_once.prefill(tokens)
    stepped.prefill(tokens[:PROMPT_LEN])
    for token in tokens[PROMPT_LEN:]:
        stepped.step([token])
    return tuple(
        EntryError(
            layer=entry.layer,
            role=entry.role,
            past=entry.past,
            max_abs_error=_largest(at_once.cache.tensor(entry), stepped.cache.tensor(entry)),
        )
        for entry in graph.schema.entries
    )


def _largest(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where one side is not a number."""
    difference = np.subtract(actual, expected, dtype=np.float64)
    largest = float(np.linalg.norm(difference.reshape(-1), ord=np.inf))
    return largest if math.isfinite(largest) else math.inf


def _tolerance(graph: LoadedGraph, largest_logit: float) -> float:
    dtypes = {entry.dtype for entry in graph.schema.entries} | {graph.schema.logits_dtype}
    relative = [RELATIVE_TOLERANCE.get(dtype, QUANTIZED_TOLERANCE) for dtype in dtypes]
    if graph.schema.quantized:
        relative.append(QUANTIZED_TOLERANCE)
    return max(relative) * float(largest_logit)
