"""Slots whose tensors do not grow with the tokens: states, and keys and values of a source.

The verbs are those of ``ortkv.cache.slots.Slot``.
"""
# ruff: noqa: D102 -- the protocol's docstrings are the contract

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.cache.tensors import Bound, Tensors, batch_of
from ortkv.runtime import Buffer
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry


class StateSlot:
    """A state of fixed size, zeros at the start: two tensors that take turns."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._entry = entry
        self._batch = batch
        self._past: Bound = self._zeros(batch, device)
        self._present: Bound = self._past
        self._is_zero = True

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:  # noqa: ARG002
        if self._present is self._past:
            self._present = self._zeros(self._batch, self._past.buffer.device)
        if past_len == 0 and not self._is_zero:
            # A run that was cut off may have left one.
            self._past = self._zeros(self._batch, self._past.buffer.device)
            self._is_zero = True
        return self._past, self._present

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        return past_len + query_len, past_len

    def commit(self) -> None:
        self._is_zero = False
        self._past, self._present = self._present, self._past

    def truncate(self, past_len: int, new_len: int) -> None:
        """Nothing: over a past of no tokens a state is zeroed, and it has no shorter one."""

    def array(self, past_len: int) -> NDArray[Any]:
        state = self._view(self._past.buffer.read(), self._batch)
        return state if past_len else np.zeros_like(state)

    def load(self, array: NDArray[Any]) -> None:
        batch = batch_of(self._entry, array)
        past = self._zeros(batch, self._past.buffer.device)
        with past.buffer.edit() as raw:
            self._view(raw, batch)[...] = array
        self._is_zero = False
        self._past, self._present, self._batch = past, past, batch

    @property
    def num_bytes(self) -> int:
        num_buffers = 1 if self._present is self._past else 2
        return num_buffers * self._past.buffer.num_bytes

    def _zeros(self, batch: int, device: Device) -> Bound:
        num_bytes = self._entry.num_bytes(batch=batch, length=0)
        return Bound(Buffer(num_bytes, device), self._entry.shape(batch=batch, length=0))

    def _view(self, raw: NDArray[Any], batch: int) -> NDArray[Any]:
        num_bytes = self._entry.num_bytes(batch=batch, length=0)
        state = raw[:num_bytes].view(numpy_dtype(self._entry.dtype))
        return state.reshape(self._entry.full_shape(batch=batch, length=0))


class ConstantSlot:
    """Keys and values of a source: given out by the first run, and only read from then on.

    Or loaded, where the graph gives none out. They stay as long as the source does: dropping
    tokens leaves them.
    """

    def __init__(self, entry: CacheEntry, batch: int, device: Device, source_len: int) -> None:
        self._tensors = Tensors(entry, batch, device)
        self._source_len = source_len
        self._past = self._tensors.bound(0)
        self._present: Bound | None = self._tensors.bound(source_len)

    def prepare(
        self,
        past_len: int,  # noqa: ARG002
        query_len: int,  # noqa: ARG002
    ) -> tuple[Bound, Bound | None]:
        return self._past, self._present

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:  # noqa: ARG002
        return self._source_len, 0

    def commit(self) -> None:
        if self._present is not None:
            self._past, self._present = self._present, None

    def truncate(self, past_len: int, new_len: int) -> None:
        """Nothing: the source is the same."""

    def array(self, past_len: int) -> NDArray[Any]:  # noqa: ARG002
        """The source's keys or values; of length 0 before the first run."""
        length = self._source_len if self._present is None else 0
        return self._tensors.view(self._past.buffer.read(), length)

    def load(self, array: NDArray[Any]) -> None:
        tensors = self._tensors.of(array)
        length = tensors.length(array)
        past = tensors.bound(length)
        with past.buffer.edit() as raw:
            tensors.view(raw, length)[...] = array
        self._past, self._tensors = past, tensors
        if length:
            self._present, self._source_len = None, length
        else:
            self._present = tensors.bound(self._source_len)

    @property
    def num_bytes(self) -> int:
        present = 0 if self._present is None else self._present.buffer.num_bytes
        return self._past.buffer.num_bytes + present
