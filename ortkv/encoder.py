"""An encoder's graph: what it makes of a source, for a decoder's cross-attention to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.cache import Cache
from ortkv.errors import InvalidRequest
from ortkv.feeds import KeyAxis, Run, Source, feed
from ortkv.runtime import run
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ortkv.runtime import Device, Session
    from ortkv.schema import CacheEntry, CacheSchema, EncoderSchema


@dataclass(frozen=True, kw_only=True)
class EncoderGraph:
    """A session that runs an encoder, and how it is fed."""

    session: Session
    schema: EncoderSchema


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a decoder's cross-attention looks at, of one row. Never changed once made.

    ``source``: the encoder's states. ``cross``: keys and values by the decoder's past, in the
    graph's own layout, where an encoder gives these out.
    """

    source: Source
    cross: Mapping[str, NDArray[Any]]

    @property
    def source_len(self) -> int:
        """The tokens or frames that cross-attention sees."""
        return self.source.lengths[0]


def cache_over(schema: CacheSchema, device: Device, encoded: Encoded | None) -> Cache:
    """An empty cache of one row that looks at what was encoded, where anything was."""
    if encoded is None:
        return Cache(schema, device)
    cache = Cache(schema, device, source=encoded.source)
    for entry in schema.entries:
        if entry.past is not None and entry.past in encoded.cross:
            cache.load(entry, encoded.cross[entry.past])
    return cache


def encode(
    encoder: EncoderGraph, source: Sequence[int] | NDArray[Any], entries: Sequence[CacheEntry]
) -> Encoded:
    """Run the encoder over one row.

    source: token ids, or features [size, frames] of floats.
    entries: the decoder's, of which it may give keys and values.
    Raises: InvalidRequest for a source that the encoder does not take.
    """
    fed, outputs = _fed(encoder.schema, source), _outputs(encoder.schema)
    io = encoder.session.io_binding()
    for name, array in fed.items():
        io.bind_cpu_input(name, array)
    for name in outputs:
        io.bind_output(name, "cpu")
    run(encoder.session, io)
    arrays = [value.numpy().copy() for value in io.get_outputs()]
    made = dict(zip(outputs, arrays, strict=True))
    by_past = {entry.past: entry for entry in entries}
    cross = {
        past: made[output].astype(numpy_dtype(by_past[past].dtype), copy=False)
        for past, output in encoder.schema.cross
    }
    if encoder.schema.states is not None:
        states = made[encoder.schema.states]
    else:
        past, array = next(iter(cross.items()))
        unit = math.prod(by_past[past].shape(batch=1, length=1))
        states = np.zeros((1, array.size // unit, 0), np.float32)
    return Encoded(source=Source(states, [states.shape[1]]), cross=cross)


def _outputs(schema: EncoderSchema) -> list[str]:
    states = [] if schema.states is None else [schema.states]
    return list(dict.fromkeys([*states, *(output for _, output in schema.cross)]))


def _fed(schema: EncoderSchema, source: Sequence[int] | NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Every input's array: a row of tokens is a first run that nothing comes before."""
    array = _features(schema, source) if schema.takes_features else _ids(schema, source)
    source_len = array.shape[-1]
    ahead = Run([0], 0, source_len, (KeyAxis(source_len, 0, "end"),))
    return {schema.source: array} | {h.name: feed(h, ahead) for h in schema.helpers}


def _ids(schema: EncoderSchema, source: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """[1, source_len] of token ids."""
    ids = np.asarray(source)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(
            f"found a source of shape {ids.shape} and dtype {ids.dtype}: expected text or at least "
            f"one token id, as {schema.source} of the encoder takes."
        )
    num_tokens = schema.num_tokens
    wrong = [int(i) for i in ids if i < 0 or (num_tokens is not None and i >= num_tokens)]
    if wrong:
        raise InvalidRequest(
            f"found token ids {wrong[:5]} in the source, which the encoder does not have: expected "
            f"ids from 0 to {(num_tokens or 2**31) - 1}. Use the model's own tokenizer."
        )
    array = ids[None].astype(numpy_dtype(schema.source_dtype))
    _check_dims(schema, array)
    return array


def _features(schema: EncoderSchema, source: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """[1, size, frames] of floats."""
    rank = len(schema.source_dims)
    array = np.asarray(source)
    if np.issubdtype(array.dtype, np.floating) and array.ndim == rank - 1:
        array = array[None]
    if not np.issubdtype(array.dtype, np.floating) or array.ndim != rank or len(array) != 1:
        raise InvalidRequest(
            f"found a source of shape {array.shape} and dtype {array.dtype}: expected features of "
            f"one row, floats of dims {list(schema.source_dims[1:])}, as {schema.source} of the "
            "encoder takes. Compute them with the model's feature extractor."
        )
    made = np.ascontiguousarray(array, dtype=numpy_dtype(schema.source_dtype))
    _check_dims(schema, made)
    return made


def _check_dims(schema: EncoderSchema, array: NDArray[Any]) -> None:
    fits = all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(schema.source_dims, array.shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f"found a source of shape {array.shape}: expected {list(schema.source_dims)}, as "
            f"{schema.source} of the encoder takes. Pad or cut it to that."
        )
