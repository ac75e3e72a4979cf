"""The values of helper inputs for one run: one pure function for each kind in the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ortkv.schema import HelperInput, HelperKind


class Run(NamedTuple):
    """What a run is about to do: rows with ``lengths`` cached tokens get ``query_len`` more.

    ``past_len`` is the longest row's cached tokens. (One is made every step: a frozen dataclass
    takes several times as long to make.)
    """

    lengths: list[int]
    past_len: int
    query_len: int
    row_alignment: Literal["start", "end"]

    @property
    def kv_len(self) -> int:
        """The sequence axis after the run."""
        return self.past_len + self.query_len


def feed(helper: HelperInput, run: Run) -> NDArray[Any]:
    """The array to bind to ``helper``, in its dtype and of its rank."""
    value = np.asarray(_VALUES[helper.kind](run), dtype=numpy_dtype(helper.dtype))
    if value.ndim == len(helper.dims):
        return value
    return value.reshape(value.shape + (1,) * (len(helper.dims) - value.ndim))


def _mask_2d(run: Run) -> NDArray[Any]:
    """[batch, kv_len]: 1 where a token is the row's own, 0 on padding."""
    mask = np.ones((len(run.lengths), run.kv_len), dtype=np.int64)
    if min(run.lengths) == run.past_len:
        return mask
    for row, length in enumerate(run.lengths):
        padding = run.past_len - length
        if padding and run.row_alignment == "start":
            mask[row, run.kv_len - padding :] = 0
        elif padding:
            mask[row, :padding] = 0
    return mask


def _positions(run: Run) -> NDArray[Any]:
    """[batch, query_len]: each new token's index in its own row."""
    return np.asarray(run.lengths)[:, None] + np.arange(run.query_len)


def _cache_position(run: Run) -> NDArray[Any]:
    """[query_len]: the new tokens' index, the same for all rows."""
    return run.past_len + np.arange(run.query_len)


def _last_positions(run: Run) -> NDArray[Any]:
    """[batch]: the index of each row's last token after the run (GroupQueryAttention)."""
    return np.asarray(run.lengths) + run.query_len - 1


_VALUES: dict[HelperKind, Callable[[Run], Any]] = {
    "mask_2d": _mask_2d,
    "positions": _positions,
    "cache_position": _cache_position,
    "last_positions": _last_positions,
    "past_length": lambda run: run.past_len,
    "total_length": lambda run: run.kv_len,
    "use_cache_branch": lambda run: run.past_len > 0,
    "num_logits_to_keep": lambda _: 1,
}
