"""The ways to compute logits over a cache, each of which must agree with a full run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortkv.cache import Cache
from ortkv.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ortkv.decoder import LoadedGraph


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Logits [steps, vocab_size] of a way, and the tokens before each.

    ``sources``: which of the graph's probes each looks at; all at the first where it is empty.
    """

    name: str
    logits: NDArray[np.float32]
    prefixes: list[list[int]]
    sources: tuple[int, ...] = ()


def steps(graph: LoadedGraph, tokens: list[int], *, prompt_len: int) -> Scored:
    """Prefill of a prompt, then a token at a time."""
    decoder = Decoder(graph)
    logits = [decoder.prefill(tokens[:prompt_len]).copy()]
    logits += [decoder.step([token])[0].copy() for token in tokens[prompt_len:]]
    prefixes = [tokens[:n] for n in range(prompt_len, len(tokens) + 1)]
    return Scored(name="prefill and steps", logits=np.array(logits), prefixes=prefixes)


def chunks(graph: LoadedGraph, tokens: list[int], *, ends: Sequence[int]) -> Scored:
    """The prompt in parts that end at ``ends``."""
    decoder = Decoder(graph)
    logits = [
        decoder.prefill(tokens[start:end]).copy()
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    prefixes = [tokens[:end] for end in ends]
    return Scored(name="chunked prefill", logits=np.array(logits), prefixes=prefixes)


def rewound(graph: LoadedGraph, tokens: list[int], *, kept_len: int, new_len: int) -> Scored:
    """Back to ``kept_len`` tokens, then other ones: none of the old may be left."""
    decoder = Decoder(graph)
    decoder.prefill(tokens)
    held = decoder.cache.truncate(kept_len)
    decoder.prefill(tokens[held:kept_len])
    kept, other = tokens[:kept_len], tokens[::-1][:new_len]
    logits = [decoder.step([token])[0].copy() for token in other]
    prefixes = [kept + other[:n] for n in range(1, len(other) + 1)]
    return Scored(name="rewind", logits=np.array(logits), prefixes=prefixes)


def appended(graph: LoadedGraph, tokens: list[int], *, prompt_len: int) -> Scored:
    """A prompt, a turn of one token that ends nowhere, and several tokens more."""
    decoder = Decoder(graph)
    decoder.prefill(tokens[:prompt_len])
    decoder.step([tokens[prompt_len]])
    logits = decoder.prefill(tokens[prompt_len + 1 :]).copy()
    return Scored(name="append after a turn", logits=logits[None], prefixes=[tokens])


def together(
    graph: LoadedGraph,
    name: str,
    rows: Sequence[list[int]],
    new: Sequence[list[int]],
    sources: Sequence[int],
) -> Scored:
    """Rows prefilled alone, then stepped in one batch.

    new: one list a step, of one token a row.   sources: which probe each row looks at.
    """
    alone = [Decoder(graph, graph.probe_cache(source)) for source in sources]
    for decoder, row in zip(alone, rows, strict=True):
        decoder.prefill(row)
    batch = Decoder(graph, Cache.joined([decoder.cache for decoder in alone]))
    logits: list[NDArray[np.float32]] = []
    prefixes: list[list[int]] = []
    for step in new:
        rows = [[*row, token] for row, token in zip(rows, step, strict=True)]
        logits += list(batch.step(step).copy())
        prefixes += rows
    return Scored(
        name=name,
        logits=np.array(logits),
        prefixes=prefixes,
        sources=tuple(sources) * len(new),
    )
