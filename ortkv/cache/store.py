"""The cache of a batch of rows: every entry's slot, and how many tokens each row has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.cache.rules import alignment, new_slot
from ortkv.cache.source import joined_source, source_rows
from ortkv.cache.tensors import most_held
from ortkv.errors import ContextLengthExceeded, InvalidRequest
from ortkv.feeds import KeyAxis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ortkv.cache.slots import Slot
    from ortkv.cache.tensors import Bound
    from ortkv.feeds import Source
    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry, CacheSchema
    from ortkv.schema.spec import RowAlignment


class Cache:
    """Owns the buffers and the lengths; changed by ``commit`` and the verbs that drop tokens.

    Rows of unequal length share one sequence axis of ``past_len``; the schema's
    ``row_alignment`` says at which end a shorter row's tokens are. The rest is padding.
    ``source``: what cross-attention looks at, one row for each of the cache's; None for a
    decoder that has none.
    """

    def __init__(
        self, schema: CacheSchema, device: Device, batch: int = 1, source: Source | None = None
    ) -> None:
        self.schema = schema
        self.device = device
        self.source = source
        self.lengths = [0] * batch
        self.slots = [self._new_slot(entry, batch) for entry in schema.entries]
        self._places: list[tuple[RowAlignment, int | None]] = [
            (alignment(entry, schema.row_alignment), most_held(entry)) for entry in schema.entries
        ]
        self._main = _main_entry(schema)
        self._capacity = _capacity(schema)

    @property
    def batch(self) -> int:
        """How many rows there are."""
        return len(self.lengths)

    @property
    def past_len(self) -> int:
        """The longest row's tokens: the sequence axis the next run is given."""
        return max(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, spare capacity included."""
        return sum(slot.num_bytes for slot in self.slots)

    def prepare(self, query_len: int) -> list[tuple[Bound, Bound | None]]:
        """Room for ``query_len`` more tokens a row. Returns: (past, present), one per entry.

        Raises: ContextLengthExceeded where the graph's buffers have none.
        """
        past_len = max(self.lengths)
        if self._capacity is not None and past_len + query_len > self._capacity:
            raise ContextLengthExceeded(
                f"{past_len} cached and {query_len} new tokens do not fit in the {self._capacity} "
                "that the graph's cache has room for: shorten the prompt, or export the model "
                "with a larger cache."
            )
        return [slot.prepare(past_len, query_len) for slot in self.slots]

    def key_axis(self, query_len: int) -> KeyAxis:
        """The keys attention sees in the run that was prepared.

        Where entries differ, as sliding layers from full ones: those of the full ones.
        """
        past_len, index = max(self.lengths), self._main
        if index is None:
            return KeyAxis(past_len + query_len, past_len, self.schema.row_alignment)
        rows, window = self._places[index]
        return KeyAxis(*self.slots[index].key_axis(past_len, query_len), rows, window)

    def key_axes(self, query_len: int) -> tuple[KeyAxis, ...]:
        """All key axes of that run: ``key_axis`` first, then every entry's.

        Last those that the same keys have where a mask covers the buffer alone.
        """
        past_len, found = self.past_len, [self.key_axis(query_len)]
        growing = [i for i, entry in enumerate(self.schema.entries) if entry.grows]
        found += [self._axis_of(i, past_len, query_len) for i in growing]
        for i in growing:
            entry = self.schema.entries[i]
            if entry.capacity is not None and entry.update != "scatter":
                found.append(_buffer_axis(entry, self._axis_of(i, past_len, query_len), query_len))
        return tuple(dict.fromkeys(found))

    def commit(self, query_len: int) -> None:
        """Take in the run that was prepared. Changes: every row is ``query_len`` longer."""
        lengths = self._let_go()
        for slot in self.slots:
            slot.commit()
        self.lengths = [length + query_len for length in lengths]

    def truncate(self, length: int) -> int:
        """Keep the first ``length`` tokens of a cache of one row, or none of them.

        Returns: how many are held: 0 where a state or a window that has dropped tokens cannot
        go back. The source stays.   Raises: InvalidRequest where the cache has fewer, or more
        rows.
        """
        if self.batch != 1 or not 0 <= length <= self.past_len:
            raise InvalidRequest(
                f"the cache holds {self.lengths} tokens: cannot keep the first {length} of one "
                "row. Ask for no more than it holds."
            )
        past_len = self.past_len
        if length == past_len:
            return length
        self._let_go()
        if any(_is_one_way(entry, past_len) for entry in self.schema.entries):
            return 0
        for slot in self.slots:
            slot.truncate(past_len, length)
        self.lengths = [length]
        return length

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, given in their new order."""
        lengths, past_len = [self.lengths[row] for row in rows], self.past_len
        longest = max(lengths)
        source = None if self.source is None else source_rows(self.source, rows)
        batch = self.batch
        self._let_go()
        try:
            for entry, slot in zip(self.schema.entries, self.slots, strict=True):
                kept = _rows(entry, slot.array(past_len), rows)
                slot.load(kept[self._place(entry, past_len, longest)])
        except BaseException:
            # Some slots have the new rows and some the old: none can be trusted.
            self.slots = [self._new_slot(entry, batch) for entry in self.schema.entries]
            raise
        self.source, self.lengths = source, lengths

    def copy(self) -> Cache:
        """An independent cache of the same tokens."""
        return Cache.joined([self])

    @staticmethod
    def joined(caches: Sequence[Cache]) -> Cache:
        """One cache with the rows of all; theirs stay as they are.

        caches: of one schema and one device.
        """
        first = caches[0]
        source = joined_source([cache.source for cache in caches])
        whole = Cache(first.schema, first.device, source=source)
        lengths = [length for cache in caches for length in cache.lengths]
        for i, (entry, slot) in enumerate(zip(whole.schema.entries, whole.slots, strict=True)):
            parts = [cache.slots[i].array(cache.past_len) for cache in caches]
            slot.load(whole._joined(entry, parts, [cache.past_len for cache in caches]))
        whole.lengths = lengths
        return whole

    def load(self, entry: CacheEntry, tensor: NDArray[Any]) -> None:
        """Hold keys or values of the source that come from elsewhere, as from an encoder's graph.

        tensor: of the shape and dtype that the graph's past has, one row for each of the cache's.
        Raises: InvalidRequest where it is not.
        """
        batch = self.batch
        unit = math.prod(entry.shape(batch=batch, length=1))
        source_len = tensor.size // unit if self.source is None else self.source.states.shape[1]
        wanted = entry.shape(batch=batch, length=source_len)
        if tensor.shape != wanted:
            raise InvalidRequest(
                f"{entry.past} was given {tensor.shape}: expected {wanted}, the source's keys or "
                "values in the graph's own layout."
            )
        full = tensor.reshape(entry.full_shape(batch=batch, length=source_len))
        self.slots[self.schema.entries.index(entry)].load(full)

    def tensor(self, entry: CacheEntry, row: int = 0) -> NDArray[Any]:
        """A copy of what one row has cached, in the canonical layout.

        Returns: [num_kv_heads, length, head_dim]; before these axes num_layers where layers
        are stacked in one entry, and 2 where key and value are. A window has the tokens it still
        holds, cross-attention the source's. A state keeps its own order of axes, less the rows'.
        """
        slot = self.slots[self.schema.entries.index(entry)]
        array = _rows(entry, slot.array(self.past_len), [row])
        if entry.update == "replace":
            order = [entry.axis("B")] if "B" in entry.letters else []
            order += [i for i in range(array.ndim) if i not in order]
        else:
            array = array[self._place(entry, self.past_len, self.lengths[row])]
            order = [entry.axis(letter) for letter in "BL2HSD" if letter in entry.letters]
        if entry.update == "constant" and self.source is not None:
            array = array[_along(entry, slice(0, self.source.lengths[row]))]
        canonical = array.transpose(order)
        return (canonical[0] if "B" in entry.letters else canonical).copy()

    def _new_slot(self, entry: CacheEntry, batch: int) -> Slot:
        source_len = 0 if self.source is None else self.source.states.shape[1]
        return new_slot(entry, batch, self.device, source_len)

    def _let_go(self) -> list[int]:
        """Hold no tokens while the slots change one by one: stopped midway, the cache is empty.

        Over a past of no tokens no slot gives the graph anything of what it held.
        Returns: the lengths before.
        """
        lengths, self.lengths = self.lengths, [0] * self.batch
        return lengths

    def _axis_of(self, index: int, past_len: int, query_len: int) -> KeyAxis:
        rows, window = self._places[index]
        return KeyAxis(*self.slots[index].key_axis(past_len, query_len), rows, window)

    def _place(self, entry: CacheEntry, length: int, tokens: int) -> tuple[slice, ...]:
        """Where a row's ``tokens`` are in an entry's array for ``length`` of them.

        All of it in a state and in cross-attention.
        """
        if not entry.grows:
            return (slice(None),) * len(entry.letters)
        most = most_held(entry)
        if most is not None:
            length, tokens = min(length, most), min(tokens, most)
        if alignment(entry, self.schema.row_alignment) == "start":
            return _along(entry, slice(0, tokens))
        return _along(entry, slice(length - tokens, length))

    def _joined(
        self, entry: CacheEntry, parts: list[NDArray[Any]], past_lens: list[int]
    ) -> NDArray[Any]:
        """An entry's arrays of several caches as one, short rows padded with zeros."""
        if len(parts) == 1:
            return parts[0]
        if entry.update == "constant":
            return self._joined_constant(entry, parts)
        axis = _row_axis(entry)
        if entry.update == "replace":
            return np.concatenate(parts, axis=axis)
        longest = max(past_lens)
        shape = list(parts[past_lens.index(longest)].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        rows = np.zeros(shape, dtype=parts[0].dtype)
        top = 0
        for part, past_len in zip(parts, past_lens, strict=True):
            place = list(self._place(entry, longest, past_len))
            place[axis] = slice(top, top + part.shape[axis])
            rows[tuple(place)] = part
            top += part.shape[axis]
        return rows

    def _joined_constant(self, entry: CacheEntry, parts: list[NDArray[Any]]) -> NDArray[Any]:
        """Padded at the end: the encoder's mask says what is whose."""
        lengths = [_length_of(entry, part) for part in parts]
        is_masked = any(helper.kind == "encoder_mask" for helper in self.schema.helpers)
        if len(set(lengths)) > 1 and (0 in lengths or not is_masked):
            raise InvalidRequest(
                f"{entry.past} holds {lengths} of the source in the caches to be joined: expected "
                "caches that all had their first run, over sources of one length where the graph "
                "takes no mask of them. Run these one by one."
            )
        padded: list[NDArray[Any]] = []
        for part, length in zip(parts, lengths, strict=True):
            widths = [(0, 0)] * part.ndim
            widths[entry.axis("S")] = (0, max(lengths) - length)
            padded.append(np.pad(part, widths))
        return np.concatenate(padded, axis=_row_axis(entry))


def _main_entry(schema: CacheSchema) -> int | None:
    """The entry whose key axis a mask covers that is of no fixed width."""
    growing = [i for i, entry in enumerate(schema.entries) if entry.grows]
    full = [i for i in growing if most_held(schema.entries[i]) is None]
    return next(iter(full or growing), None)


def _capacity(schema: CacheSchema) -> int | None:
    """The most tokens a row can have, where buffers have a fixed size and do not slide."""
    fixed = [e.capacity for e in schema.entries if e.grows and most_held(e) is None]
    return min((size for size in fixed if size is not None), default=None)


def _buffer_axis(entry: CacheEntry, axis: KeyAxis, query_len: int) -> KeyAxis:
    """The key axis of a mask that is as wide as the buffer alone.

    A window's then has the new tokens in it; a delta's has the cached ones only.
    """
    capacity = entry.capacity or 0
    starts = {"window": capacity - query_len, "delta": capacity}
    new_start = starts.get(entry.update, axis.new_start)
    return axis._replace(key_len=capacity, new_start=new_start)


def _is_one_way(entry: CacheEntry, past_len: int) -> bool:
    """Whether an entry cannot give back what it held some tokens ago."""
    most = most_held(entry)
    return entry.update == "replace" or (most is not None and past_len > most)


def _rows(entry: CacheEntry, array: NDArray[Any], rows: Sequence[int]) -> NDArray[Any]:
    """These rows of an entry's array."""
    if "B" not in entry.letters and list(rows) == [0]:
        return array
    return np.take(array, rows, axis=_row_axis(entry))


def _row_axis(entry: CacheEntry) -> int:
    if "B" not in entry.letters:
        raise InvalidRequest(
            f"{entry.past} has no axis for rows ({entry.layout}): expected one row. Run these one "
            "by one."
        )
    return entry.axis("B")


def _length_of(entry: CacheEntry, array: NDArray[Any]) -> int:
    """The size of the sequence axis, of an array with an axis for every letter."""
    return array.shape[entry.axis("S")]


def _along(entry: CacheEntry, tokens: slice) -> tuple[slice, ...]:
    return tuple(tokens if letter == "S" else slice(None) for letter in entry.letters)
