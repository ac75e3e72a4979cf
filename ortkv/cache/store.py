"""The cache of a batch of rows: every entry's slot, and how many tokens each row has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.cache.slots import new_slot
from ortkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ortkv.cache.slots import Bound
    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry, CacheSchema


class Cache:
    """Owns the buffers and the lengths; changed by ``commit`` and the verbs that drop tokens.

    Rows of unequal length share one sequence axis of ``past_len``; the schema's
    ``row_alignment`` says at which end a shorter row's tokens are. The rest is padding.
    """

    def __init__(self, schema: CacheSchema, device: Device, batch: int = 1) -> None:
        self.schema = schema
        self.device = device
        self.lengths = [0] * batch
        self.slots = [new_slot(entry, batch, device) for entry in schema.entries]

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

    def prepare(self, query_len: int) -> list[tuple[Bound, Bound]]:
        """Room for ``query_len`` more tokens a row. Returns: (past, present), one per entry."""
        past_len = self.past_len
        return [slot.prepare(past_len, query_len) for slot in self.slots]

    def commit(self, query_len: int) -> None:
        """Take in the run that was prepared. Changes: every row is ``query_len`` longer."""
        lengths = self._let_go()
        for slot in self.slots:
            slot.commit()
        self.lengths = [length + query_len for length in lengths]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of a cache of one row.

        Raises: InvalidRequest where the cache has fewer, or more rows.
        """
        if self.batch != 1 or not 0 <= length <= self.past_len:
            raise InvalidRequest(
                f"the cache holds {self.lengths} tokens: cannot keep the first {length} of one "
                "row. Ask for no more than it holds."
            )
        past_len = self.past_len
        self._let_go()
        for slot in self.slots:
            slot.truncate(past_len, length)
        self.lengths = [length]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, given in their new order."""
        lengths, past_len = [self.lengths[row] for row in rows], self.past_len
        window = self._window(past_len, max(lengths))
        self._let_go()
        for entry, slot in zip(self.schema.entries, self.slots, strict=True):
            kept = np.take(slot.array(past_len), rows, axis=entry.axis("B"))
            slot.load(kept[_along(entry, window)])
        self.lengths = lengths

    def copy(self) -> Cache:
        """An independent cache of the same tokens."""
        return Cache.joined([self])

    @staticmethod
    def joined(caches: Sequence[Cache]) -> Cache:
        """One cache with the rows of all; theirs stay as they are.

        caches: of one schema and one device.
        """
        first = caches[0]
        whole = Cache(first.schema, first.device)
        whole.lengths = [length for cache in caches for length in cache.lengths]
        for i, (entry, slot) in enumerate(zip(whole.schema.entries, whole.slots, strict=True)):
            shape = entry.full_shape(batch=whole.batch, length=whole.past_len)
            parts = [cache.slots[i].array(cache.past_len) for cache in caches]
            rows = np.zeros(shape, dtype=parts[0].dtype)
            top = 0
            for part, cache in zip(parts, caches, strict=True):
                place = list(_along(entry, whole._window(whole.past_len, cache.past_len)))
                place[entry.axis("B")] = slice(top, top + cache.batch)
                rows[tuple(place)] = part
                top += cache.batch
            slot.load(rows)
        return whole

    def tensor(self, entry: CacheEntry, row: int = 0) -> NDArray[Any]:
        """A copy of one row's cached tokens in the canonical layout.

        Returns: [num_kv_heads, length, head_dim]; before these axes num_layers where layers
        are stacked in one entry, and 2 where key and value are.
        """
        slot = self.slots[self.schema.entries.index(entry)]
        window = self._window(self.past_len, self.lengths[row])
        array = slot.array(self.past_len)[_along(entry, window)]
        order = [entry.axis(letter) for letter in "BL2HSD" if letter in entry.letters]
        return array.transpose(order)[row].copy()

    def _let_go(self) -> list[int]:
        """Hold no tokens while the slots change one by one: stopped midway, the cache is empty.

        Returns: the lengths before.
        """
        lengths, self.lengths = self.lengths, [0] * self.batch
        return lengths

    def _window(self, length: int, tokens: int) -> slice:
        """Where ``tokens`` of a sequence axis of ``length`` are, by the schema's alignment."""
        if self.schema.row_alignment == "start":
            return slice(0, tokens)
        return slice(length - tokens, length)


def _along(entry: CacheEntry, window: slice) -> tuple[slice, ...]:
    return tuple(window if letter == "S" else slice(None) for letter in entry.letters)
