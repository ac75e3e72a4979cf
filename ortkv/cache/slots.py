"""The buffers of one cache entry: one small class per update rule, the same few verbs.

``prepare`` makes room for a run and says what to bind, ``commit`` takes its result in,
``truncate`` drops tokens from the end; ``array`` and ``load`` are the way out and back in.
Tensors stay in the graph's own layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ortkv.runtime import Buffer
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry

GROWTH_TOKENS = 64
"""Buffers grow by a quarter, to a multiple of this many tokens."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A tensor to bind: where its bytes are and the shape they have."""

    buffer: Buffer
    shape: tuple[int, ...]


class Slot(Protocol):
    """The state of one cache entry for a batch of rows."""

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
        """The cached tokens, in the entry's layout. Aliases: valid until the next run."""
        ...

    def load(self, array: NDArray[Any]) -> None:
        """Hold these tokens instead: the entry's layout; the shape gives batch and length."""
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
        return _tensor(self._past.read(), self._entry, self._shape(past_len))

    def load(self, array: NDArray[Any]) -> None:
        past = Buffer(array.nbytes, self._past.device)
        with past.edit() as raw:
            _tensor(raw, self._entry, array.shape)[...] = array
        self._past = past
        self._batch = array.shape[self._entry.axis("B")]

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
        whole = _tensor(self._bound.buffer.read(), self._entry, self._bound.shape)
        return _slice(whole, self._entry.axis("S"), 0, past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._hold(array, _roomy(array.shape[self._entry.axis("S")]))

    @property
    def num_bytes(self) -> int:
        return self._bound.buffer.num_bytes

    @property
    def _capacity(self) -> int:
        return self._bound.shape[self._entry.axis("S")]

    def _hold(self, array: NDArray[Any], capacity: int) -> None:
        axis = self._entry.axis("S")
        batch = array.shape[self._entry.axis("B")]
        bound = self._allocated(batch, capacity, self._bound.buffer.device)
        with bound.buffer.edit() as raw:
            whole = _tensor(raw, self._entry, bound.shape)
            _slice(whole, axis, 0, array.shape[axis])[...] = array
        self._bound = bound

    def _allocated(self, batch: int, capacity: int, device: Device) -> Bound:
        num_bytes = batch * capacity * self._entry.bytes_per_token
        shape = self._entry.shape(batch=batch, length=capacity)
        return Bound(buffer=Buffer(num_bytes, device), shape=shape)


def new_slot(entry: CacheEntry, batch: int, device: Device) -> Slot:
    """An empty slot of the entry's update rule."""
    rule = InPlaceSlot if entry.update == "in_place" else ConcatSlot
    return rule(entry, batch, device)


def _roomy(length: int) -> int:
    return -(-(length + length // 4) // GROWTH_TOKENS) * GROWTH_TOKENS


def _slice(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def _tensor(raw: NDArray[Any], entry: CacheEntry, shape: tuple[int, ...]) -> NDArray[Any]:
    dtype = numpy_dtype(entry.dtype)
    return raw[: prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
