"""The buffers of one cache entry: one small class per update rule, the same few verbs.

``prepare`` makes room for a run and says what to bind, ``commit`` takes its result in,
``truncate`` drops tokens from the end; ``array`` and ``load`` are the way out and back in.
Tensors stay in the graph's own layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ortkv.runtime import Buffer
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry, Update

GROWTH_TOKENS = 64
"""Buffers grow by a quarter, to a multiple of this many tokens."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A tensor to bind: where its bytes are and the shape they have."""

    buffer: Buffer
    shape: tuple[int, ...]


class Slot(Protocol):
    """The state of one cache entry for a batch of rows; every letter is an axis of its arrays."""

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        """Room for a run. Returns: past and present as they are to be bound.

        The very same objects come back as long as nothing has to be bound anew.
        """
        ...

    def commit(self) -> None:
        """The run is done: its present is the next past."""
        ...

    def truncate(self, past_len: int, new_len: int) -> None:
        """Keep the first ``new_len`` of ``past_len`` tokens."""
        ...

    def array(self, past_len: int) -> NDArray[Any]:
        """The cached tokens, in the entry's order of axes. Aliases: valid until the next run."""
        ...

    def load(self, array: NDArray[Any]) -> None:
        """Hold these tokens instead; the array's shape gives batch and length."""
        ...

    @property
    def num_bytes(self) -> int: ...


class ConcatSlot:
    """present = past + new, written by the graph: two buffers that take turns."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._entry = entry
        self._batch = batch
        self._past = Buffer(0, device)
        self._present = Buffer(0, device)

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        kv_len = past_len + query_len
        if self._present.num_bytes < self._num_bytes_at(kv_len):
            self._present = Buffer(self._num_bytes_at(_roomy(kv_len)), self._past.device)
        return (
            Bound(buffer=self._past, shape=self._shape(past_len)),
            Bound(buffer=self._present, shape=self._shape(kv_len)),
        )

    def commit(self) -> None:
        self._past, self._present = self._present, self._past

    def truncate(self, past_len: int, new_len: int) -> None:
        axis = self._entry.axis("S")
        self.load(_slice(self.array(past_len), axis, 0, new_len))

    def array(self, past_len: int) -> NDArray[Any]:
        return _tensor(self._past.read(), self._entry, self._batch, past_len)

    def load(self, array: NDArray[Any]) -> None:
        batch, length = _batch_and_length(self._entry, array)
        past = Buffer(array.nbytes, self._past.device)
        with past.edit() as raw:
            _tensor(raw, self._entry, batch, length)[...] = array
        self._past, self._batch = past, batch

    @property
    def num_bytes(self) -> int:
        return self._past.num_bytes + self._present.num_bytes

    def _shape(self, length: int) -> tuple[int, ...]:
        return self._entry.shape(batch=self._batch, length=length)

    def _num_bytes_at(self, length: int) -> int:
        return self._batch * length * self._entry.bytes_per_token


class InPlaceSlot:
    """One buffer of some capacity that the graph reads and extends where it is."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._entry = entry
        self._batch = batch
        self._capacity = 0
        self._bound = self._allocated(batch, 0, device)

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        if self._capacity < past_len + query_len:
            self._hold(self.array(past_len), _roomy(past_len + query_len))
        return self._bound, self._bound

    def commit(self) -> None:
        """Nothing moves: past and present are one."""

    def truncate(self, past_len: int, new_len: int) -> None:
        """Nothing moves: the tokens past the length in force are never read."""

    def array(self, past_len: int) -> NDArray[Any]:
        whole = _tensor(self._bound.buffer.read(), self._entry, self._batch, self._capacity)
        return _slice(whole, self._entry.axis("S"), 0, past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._hold(array, _roomy(_batch_and_length(self._entry, array)[1]))

    @property
    def num_bytes(self) -> int:
        return self._bound.buffer.num_bytes

    def _hold(self, array: NDArray[Any], capacity: int) -> None:
        batch, length = _batch_and_length(self._entry, array)
        bound = self._allocated(batch, capacity, self._bound.buffer.device)
        with bound.buffer.edit() as raw:
            whole = _tensor(raw, self._entry, batch, capacity)
            _slice(whole, self._entry.axis("S"), 0, length)[...] = array
        self._bound, self._batch, self._capacity = bound, batch, capacity

    def _allocated(self, batch: int, capacity: int, device: Device) -> Bound:
        num_bytes = batch * capacity * self._entry.bytes_per_token
        shape = self._entry.shape(batch=batch, length=capacity)
        return Bound(buffer=Buffer(num_bytes, device), shape=shape)


class DeltaSlot:
    """present = the new tokens alone: ortkv appends them to the past."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._entry = entry
        self._device = device
        self._whole = ConcatSlot(entry, batch, device)
        self._new = ConcatSlot(entry, batch, device)
        self._ahead = (0, 0)

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        self._ahead = (past_len, query_len)
        past, _ = self._whole.prepare(past_len, 0)
        _, present = self._new.prepare(0, query_len)
        return past, present

    def commit(self) -> None:
        past_len, query_len = self._ahead
        self._new.commit()
        parts = [self._whole.array(past_len), self._new.array(query_len)]
        self._whole.load(np.concatenate(parts, axis=self._entry.axis("S")))

    def truncate(self, past_len: int, new_len: int) -> None:
        self._whole.truncate(past_len, new_len)

    def array(self, past_len: int) -> NDArray[Any]:
        return self._whole.array(past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._whole.load(array)
        batch, _ = _batch_and_length(self._entry, array)
        self._new = ConcatSlot(self._entry, batch, self._device)

    @property
    def num_bytes(self) -> int:
        return self._whole.num_bytes + self._new.num_bytes


_SLOTS: dict[Update, type[ConcatSlot | InPlaceSlot | DeltaSlot]] = {
    "concat": ConcatSlot,
    "in_place": InPlaceSlot,
    "delta": DeltaSlot,
}


def new_slot(entry: CacheEntry, batch: int, device: Device) -> Slot:
    """An empty slot of the entry's update rule."""
    return _SLOTS[entry.update](entry, batch, device)


def _roomy(length: int) -> int:
    return -(-(length + length // 4) // GROWTH_TOKENS) * GROWTH_TOKENS


def _slice(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _tensor(raw: NDArray[Any], entry: CacheEntry, batch: int, length: int) -> NDArray[Any]:
    """The first bytes as the entry's tensor, every letter an axis."""
    shape, dtype = entry.full_shape(batch=batch, length=length), numpy_dtype(entry.dtype)
    return raw[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _batch_and_length(entry: CacheEntry, array: NDArray[Any]) -> tuple[int, int]:
    return array.shape[entry.axis("B")], array.shape[entry.axis("S")]
