"""The buffers of one cache entry: one small class per update rule, the same few verbs.

``prepare`` makes room for a run and says what to bind, ``commit`` takes its result in,
``truncate`` drops tokens from the end; ``array`` and ``load`` are the way out and back in.
Tensors stay in the graph's own layout.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from ortkv.cache.tensors import Bound, Tensors, most_held, roomy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry


class Slot(Protocol):
    """The state of one cache entry for a batch of rows; every letter is an axis of its arrays."""

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound | None]:
        """Room for a run. Returns: past and present as they are to be bound.

        The very same objects come back as long as nothing has to be bound anew. Where present
        is None the run gives none out.
        """
        ...

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        """The axis of keys of the run that was prepared: its length, and the new tokens' start."""
        ...

    def commit(self) -> None:
        """The run is done: its present is the next past."""
        ...

    def truncate(self, past_len: int, new_len: int) -> None:
        """Keep the first ``new_len`` of ``past_len`` tokens, of which none was dropped before."""
        ...

    def array(self, past_len: int) -> NDArray[Any]:
        """What is cached, in the entry's order of axes. Aliases: valid until the next run.

        A slot that drops its oldest tokens gives those it still has.
        """
        ...

    def load(self, array: NDArray[Any]) -> None:
        """Hold this instead; the array's shape gives batch and length."""
        ...

    @property
    def num_bytes(self) -> int: ...


class ConcatSlot:
    """present = past + new, written by the graph: two buffers that take turns.

    Also where the graph then drops the oldest tokens and its tensors are no longer than that.
    """

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._tensors = Tensors(entry, batch, device)
        self._most = most_held(entry) or sys.maxsize
        self._past = self._tensors.buffer(0)
        self._present = self._tensors.buffer(0)

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        tensors = self._tensors
        kept = min(past_len + query_len, self._most)
        if self._present.num_bytes < kept * tensors.token_bytes:
            self._present = tensors.buffer(min(roomy(kept), self._most))
        return (
            Bound(self._past, tensors.shape(min(past_len, self._most))),
            Bound(self._present, tensors.shape(kept)),
        )

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        return past_len + query_len, past_len

    def commit(self) -> None:
        self._past, self._present = self._present, self._past

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
        self._past, self._tensors = past, tensors

    @property
    def num_bytes(self) -> int:
        return self._past.num_bytes + self._present.num_bytes


class InPlaceSlot:
    """One buffer that the graph reads and extends where it is; ``capacity`` tokens fit."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._tensors = Tensors(entry, batch, device)
        self.capacity = 0
        empty = self._tensors.bound(0)
        self._pair = (empty, empty)

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        if self.capacity < past_len + query_len:
            self._hold(self.array(past_len), past_len + query_len)
        return self._pair

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:
        return past_len + query_len, past_len

    def commit(self) -> None:
        """Nothing moves: past and present are one."""

    def truncate(self, past_len: int, new_len: int) -> None:
        """Nothing moves: the tokens past the length in force are never read."""

    def array(self, past_len: int) -> NDArray[Any]:
        whole = self._tensors.view(self._pair[0].buffer.read(), self.capacity)
        return self._tensors.slice(whole, 0, past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._hold(array, self._tensors.length(array))

    @property
    def num_bytes(self) -> int:
        return self._pair[0].buffer.num_bytes

    def twin(self) -> Bound:
        """A zeroed tensor just like the one held."""
        return self._tensors.bound(self.capacity)

    def exchange(self, bound: Bound) -> Bound:
        """Hold such a twin instead. Returns: the tensor held before."""
        before, self._pair = self._pair, (bound, bound)
        return before[0]

    def _hold(self, array: NDArray[Any], needed: int) -> None:
        tensors = self._tensors.of(array)
        capacity = tensors.entry.capacity or roomy(needed)
        bound = tensors.bound(capacity)
        with bound.buffer.edit() as raw:
            whole = tensors.view(raw, capacity)
            tensors.slice(whole, 0, tensors.length(array))[...] = array
        self._pair, self._tensors, self.capacity = (bound, bound), tensors, capacity


class ScatterSlot:
    """present = the whole past with the new tokens written in: two buffers that take turns."""

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self._held = InPlaceSlot(entry, batch, device)
        self._spare: Bound | None = None

    def prepare(self, past_len: int, query_len: int) -> tuple[Bound, Bound]:
        past, _ = self._held.prepare(past_len, query_len)
        if self._spare is None or self._spare.shape != past.shape or self._spare is past:
            self._spare = self._held.twin()
        return past, self._spare

    def key_axis(self, past_len: int, query_len: int) -> tuple[int, int]:  # noqa: ARG002
        return self._held.capacity, past_len

    def commit(self) -> None:
        if self._spare is not None:
            self._spare = self._held.exchange(self._spare)

    def truncate(self, past_len: int, new_len: int) -> None:
        self._held.truncate(past_len, new_len)

    def array(self, past_len: int) -> NDArray[Any]:
        return self._held.array(past_len)

    def load(self, array: NDArray[Any]) -> None:
        self._held.load(array)

    @property
    def num_bytes(self) -> int:
        spare = 0 if self._spare is None else self._spare.buffer.num_bytes
        return self._held.num_bytes + spare
