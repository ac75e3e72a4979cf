"""One entry's tensors for a number of rows: their shapes, sizes and views, by tokens."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ortkv.runtime import Buffer
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.runtime import Device
    from ortkv.schema import CacheEntry

GROWTH_TOKENS = 64
"""Buffers grow by a quarter, to a multiple of this many tokens."""


class Bound(NamedTuple):
    """A tensor to bind: where its bytes are and the shape they have."""

    buffer: Buffer
    shape: tuple[int, ...]


class Tensors:
    """The tensors of an entry with a sequence axis, for ``batch`` rows.

    The schema's own arithmetic, done once: a step asks for two shapes of every entry.
    """

    def __init__(self, entry: CacheEntry, batch: int, device: Device) -> None:
        self.entry = entry
        self.batch = batch
        self.device = device
        self.token_bytes = entry.num_bytes(batch=batch, length=1)
        self._dtype = numpy_dtype(entry.dtype)
        self._axis = entry.axis("S")
        self._shape = _by_length(entry.shape(batch=batch, length=1), _merged_axis(entry))
        self._full = _by_length(entry.full_shape(batch=batch, length=1), self._axis)

    def of(self, array: NDArray[Any]) -> Tensors:
        """The same for the rows of an array of ``view``'s axes."""
        return Tensors(self.entry, batch_of(self.entry, array), self.device)

    def shape(self, length: int) -> tuple[int, ...]:
        """The graph's tensor of ``length`` tokens."""
        before, unit, after = self._shape
        return (*before, unit * length, *after)

    def buffer(self, length: int) -> Buffer:
        """Zeroed room for ``length`` tokens."""
        return Buffer(length * self.token_bytes, self.device)

    def bound(self, length: int) -> Bound:
        """A zeroed tensor of ``length`` tokens."""
        return Bound(self.buffer(length), self.shape(length))

    def view(self, raw: NDArray[Any], length: int) -> NDArray[Any]:
        """The first bytes as ``length`` tokens, every letter an axis. Aliases: ``raw``."""
        before, unit, after = self._full
        whole = raw[: length * self.token_bytes].view(self._dtype)
        return whole.reshape(*before, unit * length, *after)

    def slice(self, array: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop) of an array of ``view``'s axes."""
        return array[(slice(None),) * self._axis + (slice(start, stop),)]

    def length(self, array: NDArray[Any]) -> int:
        """How many tokens such an array has."""
        return array.shape[self._axis]

    @property
    def appends(self) -> bool:
        """Whether a token's bytes are all after those of the tokens before it."""
        return prod(self._full[0]) == 1


def roomy(length: int) -> int:
    """The capacity to allocate for ``length`` tokens."""
    return -(-(length + length // 4) // GROWTH_TOKENS) * GROWTH_TOKENS


def batch_of(entry: CacheEntry, array: NDArray[Any]) -> int:
    """The rows of an array with an axis for every letter; one where none is for rows."""
    return array.shape[entry.axis("B")] if "B" in entry.letters else 1


def _by_length(one: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """A shape of one token as what is before the sequence axis, that axis, what is after."""
    return one[:axis], one[axis], one[axis + 1 :]


def _merged_axis(entry: CacheEntry) -> int:
    """The axis of the graph's tensor that S is in, alone or with others."""
    one, two = (entry.shape(batch=1, length=length) for length in (1, 2))
    return next(i for i, sizes in enumerate(zip(one, two, strict=True)) if sizes[0] != sizes[1])


def most_held(entry: CacheEntry) -> int | None:
    """The most tokens of a row that are kept, the oldest dropped first; None for all.

    A graph that writes into a buffer at a place of its own drops none, whatever its attention sees.
    """
    if entry.update == "window":
        return entry.capacity or entry.window
    if entry.update in ("concat", "delta") and entry.window is not None:
        return entry.capacity or entry.window
    return None
