"""The values of helper inputs for one run: one pure function for each kind in the schema."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from ortkv.errors import InvalidRequest, UnsupportedModel
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ortkv.schema import HelperInput, HelperKind
    from ortkv.schema.spec import RowAlignment


class KeyAxis(NamedTuple):
    """The axis of keys that attention sees in a run, ``key_len`` long.

    A row of n cached tokens has them at [new_start - n, new_start) and its new ones after that
    (rows aligned at their end), or at [0, n) with the new ones at n (at their start).
    ``window``: how many places before its own a query sees; None for all.
    """

    key_len: int
    new_start: int
    row_alignment: RowAlignment
    window: int | None = None


class Source(NamedTuple):
    """What cross-attention looks at. states: [batch, source_len, hidden] float, the encoder's.

    ``lengths``: each row's own; what is after them is padding.
    """

    states: NDArray[Any]
    lengths: list[int]


class Run(NamedTuple):
    """What a run is about to do: rows with ``lengths`` cached tokens get ``query_len`` more.

    ``past_len`` is the longest row's cached tokens. ``axes``: the key axis first that a mask
    of no fixed width covers, then those that one of fixed width may. (One is made every step:
    a frozen dataclass takes several times as long to make.)
    """

    lengths: list[int]
    past_len: int
    query_len: int
    axes: tuple[KeyAxis, ...]
    source: Source | None = None

    @property
    def kv_len(self) -> int:
        """The tokens of the longest row after the run."""
        return self.past_len + self.query_len


def feed(helper: HelperInput, run: Run) -> NDArray[Any]:
    """The array to bind to ``helper``, contiguous, in its dtype and of its rank.

    Raises: UnsupportedModel for a rank or dtype that the helper's kind has no values for;
    InvalidRequest where an encoder's output is wanted and there is none.
    """
    value = np.asarray(_VALUES[helper.kind](helper, run), numpy_dtype(helper.dtype), order="C")
    rank = len(helper.dims)
    return value if value.ndim == rank else value.reshape(value.shape + (1,) * (rank - value.ndim))


def _mask_2d(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, key_len], or [batch, 1, 1, key_len]: whether a token is the row's own."""
    axis = _axis(helper, run)
    if axis.key_len == run.kv_len and min(run.lengths) == run.past_len and helper.values == "keep":
        seen = np.ones((len(run.lengths), axis.key_len), numpy_dtype(helper.dtype))
        return _raised(seen, len(helper.dims))
    return _mask(helper, _raised(_own(run, axis), len(helper.dims)))


def _mask_4d(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, heads or 1, query_len, key_len]: whether a query sees a key.

    It sees its own row's cached tokens, and new ones up to itself.
    """
    axis = _axis(helper, run)
    keys = np.arange(axis.key_len)
    queries = _places(run, axis)[:, :, None]
    seen = _own(run, axis)[:, None] & (keys <= queries)
    if axis.window is not None:
        seen &= keys >= queries - axis.window
    dims = helper.dims
    if len(dims) == 4:
        heads = dims[1] if isinstance(dims[1], int) else 1
        seen = np.broadcast_to(seen[:, None], (len(seen), heads, *seen.shape[1:]))
    elif len(dims) == 2 and len(seen) == 1:
        seen = seen[0]
    elif len(dims) != 3:
        raise _unsupported(helper, "[batch, heads, query_len, key_len]")
    return _mask(helper, seen)


def _axis(helper: HelperInput, run: Run) -> KeyAxis:
    """The key axis a mask covers: of its own fixed width, else the first."""
    width = helper.dims[-1] if helper.dims else None
    if isinstance(width, int):
        for axis in run.axes:
            if axis.key_len == width:
                return axis
    return run.axes[0]


def _own(run: Run, axis: KeyAxis) -> NDArray[np.bool_]:
    """[batch, key_len]: the places of each row's own tokens, cached and new."""
    keys = np.arange(axis.key_len)
    lengths = np.array(run.lengths)[:, None]
    if axis.row_alignment == "start":
        return np.less(keys, lengths + run.query_len)
    return (keys >= axis.new_start - lengths) & (keys < axis.new_start + run.query_len)


def _places(run: Run, axis: KeyAxis) -> NDArray[np.int64]:
    """[batch or 1, query_len]: where on the axis each new token is."""
    if axis.row_alignment == "start":
        return _positions_of(run)
    return (axis.new_start + np.arange(run.query_len))[None]


def _mask(helper: HelperInput, seen: NDArray[Any]) -> NDArray[Any]:
    """What the graph wants where a token is seen, and where it is not."""
    if helper.values == "keep":
        return seen
    dtype = numpy_dtype(helper.dtype)
    shown, hidden = (0, 1) if helper.values == "drop" else (0, _lowest(helper.name, dtype))
    values: NDArray[Any] = np.full(seen.shape, hidden, dtype)
    values[seen] = shown
    return values


@functools.cache
def _lowest(name: str, dtype: np.dtype[Any]) -> Any:
    """The lowest finite number of a float dtype, as transformers adds it to masked scores."""
    try:
        return dtype.type(cast("Any", ml_dtypes.finfo)(dtype).min)
    except ValueError:
        raise UnsupportedModel(
            f"{name} is a mask that is added to scores, of {dtype}: expected floats."
        ) from None


def _raised(mask: NDArray[Any], rank: int) -> NDArray[Any]:
    """[batch, length] with axes of 1 between them, up to the rank."""
    return mask.reshape(len(mask), *(1,) * (rank - 2), -1) if rank > 2 else mask


def _positions(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, query_len]: each new token's index in its own row.

    Also flat; or once for each of m-rope's 3 (or 4) sections, before or after the other axes.
    """
    positions, dims = _positions_of(run), helper.dims
    if len(dims) == 2:
        return positions
    if len(dims) == 1:
        return positions.reshape(-1)
    if len(dims) == 3 and dims[0] in (3, 4):
        return np.broadcast_to(positions, (int(dims[0]), *positions.shape))
    if len(dims) == 3 and dims[-1] == 3:
        return np.repeat(positions[:, :, None], 3, axis=2)
    raise _unsupported(helper, "[batch, query_len], [query_len], or either for each of 3 sections")


def _positions_of(run: Run) -> NDArray[np.int64]:
    first = np.array(run.lengths)[:, None]
    return first if run.query_len == 1 else first + np.arange(run.query_len)


def _cache_position(helper: HelperInput, run: Run) -> Any:
    """[query_len], or [batch, query_len]: where the new tokens are written."""
    if len(helper.dims) == 2:
        lengths = run.lengths
        first = lengths if run.axes[0].row_alignment == "start" else [run.past_len] * len(lengths)
        return np.array(first)[:, None] + np.arange(run.query_len)
    return run.past_len + np.arange(run.query_len) if helper.dims else run.past_len


def _last_positions(_: HelperInput, run: Run) -> NDArray[Any]:
    """[batch]: the index of each row's last token after the run (GroupQueryAttention)."""
    return np.asarray(run.lengths) + run.query_len - 1


def _past_length(helper: HelperInput, run: Run) -> Any:
    """[batch]: each row's cached tokens; as a scalar or of one place, the longest's."""
    return np.array(run.lengths) if _is_per_row(helper) else run.past_len


def _total_length(helper: HelperInput, run: Run) -> Any:
    """As ``_past_length``, the new tokens included."""
    return np.array(run.lengths) + run.query_len if _is_per_row(helper) else run.kv_len


def _is_per_row(helper: HelperInput) -> bool:
    return bool(helper.dims) and helper.dims[0] != 1


def _encoder_states(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, source_len, hidden]."""
    return _source(helper, run).states


def _encoder_mask(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, source_len], or [batch, 1, 1, source_len]: whether it is the row's own."""
    states, lengths = _source(helper, run)
    source_len: int = states.shape[1]
    seen = np.arange(source_len) < np.array(lengths)[:, None]
    return _mask(helper, _raised(seen, len(helper.dims)))


def _source(helper: HelperInput, run: Run) -> Source:
    if run.source is None:
        raise InvalidRequest(
            f"{helper.name} wants an encoder's output and this cache has none: expected a cache "
            "with a source. Run the model's encoder first."
        )
    return run.source


def _beam_indices(helper: HelperInput, run: Run) -> NDArray[Any]:
    """[batch]: every row goes on from itself; [batch, beams, length]: zeros, for one beam."""
    batch = len(run.lengths)
    if len(helper.dims) == 1:
        return np.arange(batch)
    middle = [dim if isinstance(dim, int) else 1 for dim in helper.dims[1:-1]]
    last = helper.dims[-1] if helper.dims else None
    return np.zeros((batch, *middle, last if isinstance(last, int) else run.axes[0].key_len))


def _token_types(_: HelperInput, run: Run) -> NDArray[Any]:
    """[batch, query_len]: all of the first type."""
    return np.zeros((len(run.lengths), run.query_len))


def _filled(helper: HelperInput, _: Run) -> NDArray[Any]:
    """One number in the declared shape, in one place where the graph leaves a size open."""
    return np.full([dim if isinstance(dim, int) else 1 for dim in helper.dims], helper.fill)


def _unsupported(helper: HelperInput, expected: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{helper.name} has dims {list(helper.dims)}: expected {expected}. Export the model "
        "with one of these."
    )


_VALUES: dict[HelperKind, Callable[[HelperInput, Run], Any]] = {
    "mask_2d": _mask_2d,
    "mask_4d": _mask_4d,
    "positions": _positions,
    "cache_position": _cache_position,
    "last_positions": _last_positions,
    "past_length": _past_length,
    "total_length": _total_length,
    "use_cache_branch": lambda _, run: run.past_len > 0,
    "num_logits_to_keep": lambda _helper, _run: 1,
    "encoder_states": _encoder_states,
    "encoder_mask": _encoder_mask,
    "beam_indices": _beam_indices,
    "token_types": _token_types,
    "zeros": _filled,
    "stated": _filled,
}
