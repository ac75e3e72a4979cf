"""Prefill and decode steps of one cache: token ids in, the next token's scores out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortkv.binding import Binding, EmbeddingGraph
from ortkv.encoder import cache_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ortkv.cache import Cache
    from ortkv.encoder import Encoded, EncoderGraph
    from ortkv.runtime import Device, Session
    from ortkv.schema import CacheSchema


PREFILL_CHUNK = 512
"""Tokens a prefill run takes at most: bounds the memory of attention and logits."""

PREFILL_LOGITS_BYTES = 64 * 2**20
"""Most graphs score every position of a prefill; a chunk's scores stay within this."""


@dataclass(frozen=True, kw_only=True)
class PrefillGraph:
    """A graph of its own for a sequence's first run; its schema's entries have no past."""

    session: Session
    schema: CacheSchema


@dataclass(frozen=True, kw_only=True)
class LoadedGraph:
    """What every decoder of one model shares.

    ``embedding``: makes embeddings of token ids, where ``schema.embeds``. ``encoder``: makes what
    cross-attention looks at. ``probes``: what it looks at, row by row, in caches that nobody else
    made: a proof's own.
    """

    session: Session
    schema: CacheSchema
    device: Device
    prefill: PrefillGraph | None = None
    embedding: EmbeddingGraph | None = None
    encoder: EncoderGraph | None = None
    probes: tuple[Encoded, ...] = ()

    def new_cache(self, encoded: Encoded | None = None) -> Cache:
        """An empty cache of one row, over what was encoded for it."""
        return cache_over(self.schema, self.device, encoded)

    def probe_cache(self, row: int = 0) -> Cache:
        """As ``new_cache``, over the probe of this row, if there are any."""
        return self.new_cache(self.probes[row % len(self.probes)] if self.probes else None)

    def first(self) -> PrefillGraph | None:
        """The graph of first runs, where these bind other tensors than later ones do."""
        if self.prefill is None and any(e.update == "constant" for e in self.schema.entries):
            return PrefillGraph(session=self.session, schema=self.schema)
        return self.prefill


class Decoder:
    """Owns one cache and its binding. Every row of the cache gets each step's token."""

    def __init__(self, graph: LoadedGraph, cache: Cache | None = None) -> None:
        self.graph = graph
        self.cache = cache or graph.probe_cache()
        self._binding = self._bound(graph.session, graph.schema)
        first = graph.first()
        self._first = self._binding if first is None else self._bound(first.session, first.schema)

    @property
    def _least_first(self) -> int:
        """Tokens a graph of first runs must have: it gives out no longer a state than these."""
        states = [e for e in self.graph.schema.entries if e.role == "conv"]
        if self.graph.prefill is None:
            return 0
        return max((entry.state_dims[-1] for entry in states), default=0)

    def _bound(self, session: Session, schema: CacheSchema) -> Binding:
        return Binding(session, schema, self.cache, self.graph.embedding if schema.embeds else None)

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run new tokens of a cache of one row, in chunks.

        Returns: [vocab_size] float32, the scores of the token after the last.
        Aliases: valid until the next run.   Changes: the cache, by ``len(tokens)``.
        """
        logits = np.empty((1, 0), dtype=np.float32)
        start = 0
        while start < len(tokens):
            end = start + self._chunk_len(len(tokens) - start)
            logits = self._next(end - start).run(np.array([tokens[start:end]]))
            start = end
        return logits[0]

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run one new token of every row.

        tokens: one id a row.   Returns: [batch, vocab_size] float32.
        Aliases: valid until the next run.   Changes: the cache, by one token a row.
        """
        return self._next().run(np.array(tokens)[:, None])

    def _next(self, query_len: int = 1) -> Binding:
        """The steps' binding, too, for a first run that a graph of its own cannot do."""
        is_first = self.cache.past_len == 0 and query_len >= self._least_first
        return self._first if is_first else self._binding

    def _chunk_len(self, num_left: int) -> int:
        """Tokens of the next run: what the graph takes, within bounded memory."""
        schema = self.graph.schema
        is_first = self.cache.past_len == 0
        if is_first and self.graph.prefill is not None and num_left >= self._least_first:
            return num_left
        if schema.fixed_query_len is not None:
            return schema.fixed_query_len
        if schema.one_token_steps:
            return num_left if is_first else 1
        row_bytes = 4 * (schema.vocab_size or 2**17)
        return max(16, min(PREFILL_CHUNK, PREFILL_LOGITS_BYTES // row_bytes))

    def fork(self) -> Decoder:
        """A decoder over a copy of the cache."""
        return Decoder(self.graph, self.cache.copy())
