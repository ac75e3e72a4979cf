"""A schema and a cache onto an IOBinding: binds what a run needs, and no more than changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ortkv.errors import UnsupportedModel
from ortkv.feeds import Run, feed
from ortkv.runtime import run
from ortkv.signature import ONNX_TYPES, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.cache import Bound, Cache
    from ortkv.runtime import Session
    from ortkv.schema import CacheSchema


class Binding:
    """One cache's way into one session. Holds every array that onnxruntime was shown."""

    def __init__(self, session: Session, schema: CacheSchema, cache: Cache) -> None:
        self._session = session
        self._schema = schema
        self._cache = cache
        self._row_alignment: Literal["start", "end"] = schema.row_alignment
        self._tokens_dtype = numpy_dtype(schema.tokens_dtype)
        self._io = session.io_binding()
        self._fed: dict[str, NDArray[Any]] = {}
        self._bound: list[tuple[Bound, Bound] | None] = [None] * len(schema.entries)
        self._logits = np.empty(0, dtype=numpy_dtype(schema.logits_dtype))

    def run(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Feed new tokens to every row.

        tokens: [batch, query_len]; several tokens at once only for a batch of one.
        Returns: [batch, vocab_size] float32, the scores after each row's last token.
        Aliases: valid until the next run; copy to keep.
        Changes: the cache, by ``query_len`` tokens a row; nothing where the run fails.
        """
        query_len = tokens.shape[1]
        self._bind_logits(tokens.shape[0], query_len)
        self._feed(self._schema.tokens, tokens.astype(self._tokens_dtype, copy=False))
        cache = self._cache
        ahead = Run(cache.lengths, cache.past_len, query_len, self._row_alignment)
        for helper in self._schema.helpers:
            self._feed(helper.name, feed(helper, ahead))
        self._bind_cache(query_len)
        run(self._session, self._io)
        logits = self._last_logits(len(tokens))
        self._cache.commit(query_len)
        return logits

    def _feed(self, name: str, array: NDArray[Any]) -> None:
        self._fed[name] = array
        self._io.bind_cpu_input(name, array)

    def _bind_cache(self, query_len: int) -> None:
        device = self._cache.device
        for i, (past, present) in enumerate(self._cache.prepare(query_len)):
            bound = self._bound[i]
            if bound is not None and bound[0] is past:
                continue
            entry = self._schema.entries[i]
            dtype = ONNX_TYPES[entry.dtype]
            if entry.past is not None:
                self._io.bind_input(
                    entry.past, device.kind, device.index, dtype, past.shape, past.buffer.address
                )
            self._io.bind_output(
                entry.present, device.kind, device.index, dtype, present.shape,
                present.buffer.address,
            )  # fmt: skip
            self._bound[i] = (past, present)

    def _bind_logits(self, batch: int, query_len: int) -> None:
        """One token a row: into our own array. More: onnxruntime allocates, one run long.

        Bound before any other output, which makes it the first of ``get_outputs``.
        """
        name, vocab_size = self._schema.logits, self._schema.vocab_size
        if query_len > 1 or vocab_size is None:
            self._logits = self._logits[:0]
            self._io.bind_output(name, "cpu")
            return
        positions = (1,) * (len(self._schema.logits_dims) - 2)
        shape = (batch, *positions, vocab_size)
        if self._logits.shape != shape:
            self._logits = np.empty(shape, dtype=self._logits.dtype)
            self._io.bind_output(
                name, "cpu", 0, ONNX_TYPES[self._schema.logits_dtype], shape,
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
