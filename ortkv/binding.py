"""A schema and a cache onto an IOBinding: binds what a run needs, and no more than changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ortkv.errors import InvalidRequest, UnsupportedModel
from ortkv.feeds import Run, feed
from ortkv.runtime import run
from ortkv.signature import ONNX_TYPES, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.cache import Bound, Cache
    from ortkv.runtime import Session
    from ortkv.schema import CacheEntry, CacheSchema

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
"""onnxruntime neither takes nor gives numpy arrays of it, only their bytes; its kind is 'V'."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingGraph:
    """A graph from token ids to their embeddings, for a decoder that takes these.

    ``ids``: its input, [batch, query_len] of ``ids_dtype``.
    ``embeds``: its output, [batch, query_len, hidden].
    """

    session: Session
    ids: str
    embeds: str
    ids_dtype: str = "int64"


class Binding:
    """One cache's way into one session. Holds every array that onnxruntime was shown."""

    def __init__(
        self,
        session: Session,
        schema: CacheSchema,
        cache: Cache,
        embedding: EmbeddingGraph | None = None,
    ) -> None:
        _check(schema, embedding)
        self._session = session
        self._schema = schema
        self._cache = cache
        self._embedder = None if embedding is None else _Embedder(embedding)
        self._has_fixed_masks = any(
            helper.kind in ("mask_2d", "mask_4d") and isinstance(width, int)
            for helper in schema.helpers
            for width in helper.dims[-1:]
        )
        self._tokens_dtype = numpy_dtype(schema.tokens_dtype)
        self._io = session.io_binding()
        self._fed: dict[str, NDArray[Any]] = {}
        self._bound: list[tuple[Bound, Bound | None] | None] = [None] * len(schema.entries)
        self._logits = np.empty(0, dtype=numpy_dtype(schema.logits_dtype))
        self._logits_for = (0, 0)

    def run(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Feed new tokens to every row.

        tokens: [batch, query_len]; several tokens at once only for a batch of one.
        Returns: [batch, vocab_size] float32, the scores after each row's last token.
        Aliases: valid until the next run; copy to keep.
        Changes: the cache, by ``query_len`` tokens a row; nothing where the run fails.
        """
        query_len = tokens.shape[1]
        cache = self._cache
        bounds = cache.prepare(query_len)
        self._bind_logits(tokens.shape[0], query_len)
        new = tokens if self._embedder is None else self._embedder.embeds(tokens)
        self._feed(self._schema.tokens, new.astype(self._tokens_dtype, copy=False))
        axes = cache.key_axes(query_len) if self._has_fixed_masks else (cache.key_axis(query_len),)
        ahead = Run(cache.lengths, cache.past_len, query_len, axes, cache.source)
        for helper in self._schema.helpers:
            self._feed(helper.name, feed(helper, ahead))
        self._bind_cache(bounds)
        run(self._session, self._io)
        logits = self._last_logits(len(tokens))
        cache.commit(query_len)
        return logits

    def _feed(self, name: str, array: NDArray[Any]) -> None:
        self._fed[name] = array
        if array.dtype.kind == "V":
            self._io.bind_input(
                name, "cpu", 0, ONNX_TYPES["bfloat16"], array.shape, array.ctypes.data
            )
        else:
            self._io.bind_cpu_input(name, array)

    def _bind_cache(self, bounds: list[tuple[Bound, Bound | None]]) -> None:
        if bounds == self._bound:
            return
        device = self._cache.device
        for i, (past, present) in enumerate(bounds):
            if bounds[i] == self._bound[i]:
                continue
            entry = self._schema.entries[i]
            dtype = ONNX_TYPES[entry.dtype]
            if entry.past is not None:
                self._io.bind_input(
                    entry.past, device.kind, device.index, dtype, past.shape, past.buffer.address
                )
            if entry.present is not None and present is not None:
                self._io.bind_output(
                    entry.present, device.kind, device.index, dtype, present.shape,
                    present.buffer.address,
                )  # fmt: skip
            if entry.update == "constant" and entry.present is None and present is not None:
                raise _not_loaded(entry)
            self._bound[i] = (past, present)

    def _bind_logits(self, batch: int, query_len: int) -> None:
        """One token a row: into our own array. More: onnxruntime allocates, one run long.

        Bound before any other output, which makes it the first of ``get_outputs``.
        """
        if (batch, query_len) == self._logits_for and self._logits.size:
            return
        self._logits_for = (batch, query_len)
        schema, vocab_size = self._schema, self._schema.vocab_size
        if vocab_size is None or (query_len > 1 and self._logits.dtype != _BFLOAT16):
            self._logits = self._logits[:0]
            self._io.bind_output(schema.logits, "cpu")
            return
        shape = (batch, *_scored(schema, query_len), vocab_size)
        if self._logits.shape != shape:
            self._logits = np.empty(shape, dtype=self._logits.dtype)
            self._io.bind_output(
                schema.logits, "cpu", 0, ONNX_TYPES[schema.logits_dtype], shape,
                self._logits.ctypes.data,
            )  # fmt: skip

    def _last_logits(self, batch: int) -> NDArray[np.float32]:
        logits = self._logits if self._logits.size else self._io.get_outputs()[0].numpy()
        if len(logits) != batch:
            raise UnsupportedModel(
                f"{self._schema.logits} came out as {logits.shape} for {batch} rows: expected "
                "[batch, query_len, vocab_size] or [batch, vocab_size]. Export the model with one."
            )
        last = logits[:, -1] if logits.ndim == 3 else logits
        return last if last.dtype == np.float32 else last.astype(np.float32)


class _Embedder:
    """Runs an embedding graph. Holds what onnxruntime was shown, and what it gave."""

    def __init__(self, graph: EmbeddingGraph) -> None:
        self._graph = graph
        self._dtype = numpy_dtype(graph.ids_dtype)
        self._io = graph.session.io_binding()
        self._ids: NDArray[Any] = np.empty(0)

    def embeds(self, tokens: NDArray[np.int64]) -> NDArray[Any]:
        """[batch, query_len, hidden]. Aliases: valid until the next call."""
        self._ids = np.ascontiguousarray(tokens, dtype=self._dtype)
        self._io.bind_cpu_input(self._graph.ids, self._ids)
        self._io.bind_output(self._graph.embeds, "cpu")
        run(self._graph.session, self._io)
        self._value = self._io.get_outputs()[0]
        return self._value.numpy()


def _scored(schema: CacheSchema, query_len: int) -> tuple[int, ...]:
    """The axes of the logits between rows and vocabulary: how many tokens a row are scored."""
    inner = schema.logits_dims[1:-1]
    last_only = any(helper.kind == "num_logits_to_keep" for helper in schema.helpers)
    return tuple(1 if dim == 1 or last_only else query_len for dim in inner)


def _not_loaded(entry: CacheEntry) -> InvalidRequest:
    return InvalidRequest(
        f"{entry.past} holds keys or values of the source, and the graph gives none out: expected "
        "them to be loaded into the cache. Run the model's encoder first."
    )


def _check(schema: CacheSchema, embedding: EmbeddingGraph | None) -> None:
    """Raises: UnsupportedModel for what no binding can carry."""
    if schema.logits_dtype == "bfloat16" and schema.vocab_size is None:
        raise UnsupportedModel(
            f"{schema.logits} is bfloat16 of a width that the graph leaves open: expected a fixed "
            "vocabulary, or float32. Export the model with either."
        )
    if schema.embeds and embedding is None:
        raise UnsupportedModel(
            f"{schema.tokens} takes embeddings and there is no graph that makes them of token ids: "
            "expected one beside the decoder. Export the model with it."
        )
