"""Slots whose past lies at the end of its axis, or grows by what ortkv adds to it.

The verbs are those of ``ortkv.cache.slots.Slot``.
"""
# ruff: noqa: D102 -- the protocol's docstrings are the contract

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ortkv.cache.tensors import Bound, Tensors, most_held, roomy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Buffer, Device
    from ortkv.schema import CacheEntry, RowAlignment


class _FixedTensor:
    """A tensor of ``capacity`` tokens, those held at one end of it and zeros in the rest."""

    def __init__(self, tensors: Tensors, capacity: int, alignment: RowAlignment) -> None:
        self.tensors = tensors
        self.capacity = capacity
        self.alignment: RowAlignment = alignment
        self.bound = tensors.bound(0)
        self._is_zero = False

    def prepare(self, past_len: int) -> Bound:
        """The tensor, zeroed where nothing is held: a run that was cut off may have left some."""
        if past_len == 0 and not self._is_zero:
            self.bound, self._is_zero = self.tensors.bound(self.capacity), True
        return self.bound

    def mark(self) -> None:
        """Something is written; said before it is, so that no interrupt falls between."""
        self._is_zero = False

    def array(self, past_len: int) -> NDArray[Any]:
        """The tokens held."""
        length = min(past_len, self.capacity)
        if length == 0:
            return self.tensors.view(self.bound.buffer.read(), 0)
        return self._held(self.tensors, self.bound.buffer.read(), length)

    def loaded(self, array: NDArray[Any]) -> _FixedTensor:
        """Another with these tokens."""
        new = _FixedTensor(self.tensors.of(array), self.capacity, self.alignment)
        with new.prepare(0).buffer.edit() as raw:
            self._held(new.tensors, raw, self.tensors.length(array))[...] = array
        new.mark()
        return new

    def _held(self, tensors: Tensors, raw: NDArray[Any], length: int) -> NDArray[Any]:
        start = 0 if self.alignment == "start" else self.capacity - length
        return tensors.slice(tensors.view(raw, self.capacity), start, start + length)


class FixedWindowSlot:
    """present = the last ``capacity`` tokens of past + new: two tensors that take turns."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        tensors = Tensors(entry, batch, device)
        self._held = _FixedTensor(tensors, entry.capacity or 0, entry.alignment)
        self._spare: Bound | None = None

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:  # noqa: ARG002
        past = self._held.prepare(past_len)
        if self._spare is None or self._spare.shape != past.shape or self._spare is past:
            self._spare = self._held.tensors.bound(self._held.capacity)
        return past, self._spare

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        capacity = self._held.capacity
        is_left = self._held.alignment == "start"
        return capacity + query_len, min(past_len, capacity) if is_left else capacity

    def commit(self) -> None:
        self._held.mark()
        if self._spare is not None:
            self._held.bound, self._spare = self._spare, self._held.bound

    def truncate(self, past_len: int, new_len: int) -> None:
        self.load(self._held.tensors.slice(self.array(past_len), 0, new_len))

    def array(self, past_len: int) -> NDArray[Any]:
        return self._held.array(past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._held = self._held.loaded(array)

    @property
    def num_bytes(self) -> int:
        spare = 0 if self._spare is None else self._spare.buffer.num_bytes
        return self._held.bound.buffer.num_bytes + spare


class _NewTokens:
    """What a delta graph gives out: the new tokens alone."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.length = 0
        self._bound = tensors.bound(0)

    def prepare(self, query_len: int) -> Bound:
        if query_len != self.length:
            buffer = self._bound.buffer
            if buffer.num_bytes < query_len * self.tensors.token_bytes:
                buffer = self.tensors.buffer(query_len)
            self._bound, self.length = Bound(buffer, self.tensors.shape(query_len)), query_len
        return self._bound

    def array(self) -> NDArray[Any]:
        return self.tensors.view(self._bound.buffer.read(), self.length)

    @property
    def num_bytes(self) -> int:
        return self._bound.buffer.num_bytes


class FixedDeltaSlot:
    """present = the new tokens alone; the past is as long as its capacity, whatever it holds."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        tensors = Tensors(entry, batch, device)
        self._held = _FixedTensor(tensors, entry.capacity or 0, "end")
        self._new = _NewTokens(tensors)
        self._past_len = 0

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        self._past_len = past_len
        return self._held.prepare(past_len), self._new.prepare(query_len)

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:  # noqa: ARG002
        return self._held.capacity + query_len, self._held.capacity

    def commit(self) -> None:
        """Shift what is held to the left, and put the new tokens after it."""
        self._held.mark()
        capacity, tensors = self._held.capacity, self._held.tensors
        num_new = min(self._new.length, capacity)
        first = capacity - min(self._past_len + num_new, capacity)
        with self._held.bound.buffer.edit() as raw:
            whole = tensors.view(raw, capacity)
            old = tensors.slice(whole, first + num_new, capacity)
            tensors.slice(whole, first, capacity - num_new)[...] = old
            new = tensors.slice(self._new.array(), self._new.length - num_new, self._new.length)
            tensors.slice(whole, capacity - num_new, capacity)[...] = new

    def truncate(self, past_len: int, new_len: int) -> None:
        self.load(self._held.tensors.slice(self.array(past_len), 0, new_len))

    def array(self, past_len: int) -> NDArray[Any]:
        return self._held.array(past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._held = self._held.loaded(array)
        self._new = _NewTokens(self._held.tensors)

    @property
    def num_bytes(self) -> int:
        return self._held.bound.buffer.num_bytes + self._new.num_bytes


class DeltaSlot:
    """present = the new tokens alone: ortkv appends them to the past.

    The past is dense. Where tokens are the outermost axis they are written after it; elsewhere
    all of it moves, into a second buffer, the two taking turns.
    """

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._tensors = Tensors(entry, batch, device)
        self._most = most_held(entry) or sys.maxsize
        self._past = self._tensors.buffer(0)
        self._spare = self._tensors.buffer(0)
        self._new = _NewTokens(self._tensors)
        self._past_len = 0

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        self._past_len = min(past_len, self._most)
        past = Bound(self._past, self._tensors.shape(self._past_len))
        return past, self._new.prepare(query_len)

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        return past_len + query_len, past_len

    def commit(self) -> None:
        past_len, query_len, tensors = self._past_len, self._new.length, self._tensors
        length = min(past_len + query_len, self._most)
        num_old, num_new = max(length - query_len, 0), min(length, query_len)
        appends = tensors.appends and num_old == past_len and self._fits(self._past, length)
        target = self._past if appends else self._room(length)
        with target.edit() as raw:
            whole = tensors.view(raw, length)
            if not appends:
                old = tensors.view(self._past.read(), past_len)
                tensors.slice(whole, 0, num_old)[...] = tensors.slice(
                    old, past_len - num_old, past_len
                )
            new = tensors.slice(self._new.array(), query_len - num_new, query_len)
            tensors.slice(whole, num_old, length)[...] = new
        if not appends:
            self._past, self._spare = target, self._past

    def truncate(self, past_len: int, new_len: int) -> None:
        self.load(self._tensors.slice(self.array(past_len), 0, new_len))

    def array(self, past_len: int) -> NDArray[Any]:
        return self._tensors.view(self._past.read(), min(past_len, self._most))

    def load(self, array: NDArray[Any]) -> None:
        tensors = self._tensors.of(array)
        length = tensors.length(array)
        past = tensors.buffer(length)
        with past.edit() as raw:
            tensors.view(raw, length)[...] = array
        self._past, self._tensors, self._new = past, tensors, _NewTokens(tensors)
        self._spare = tensors.buffer(0)

    @property
    def num_bytes(self) -> int:
        return self._past.num_bytes + self._spare.num_bytes + self._new.num_bytes

    def _fits(self, buffer: Buffer, length: int) -> bool:
        return length * self._tensors.token_bytes <= buffer.num_bytes

    def _room(self, length: int) -> Buffer:
        """The other buffer, for ``length`` tokens."""
        if self._fits(self._spare, length):
            return self._spare
        return self._tensors.buffer(min(roomy(length), self._most))
