"""The arrays helper inputs are fed, written out."""

from typing import Any

import numpy as np
import pytest
from ortkv.feeds import KeyAxis, Run, feed
from ortkv.schema import HelperInput, HelperKind

EQUAL = (3, 3)
RAGGED = (3, 1, 0)


def fed(kind: HelperKind, run: Run, dtype: str = "int64", rank: int = 2) -> np.ndarray:
    dims = ("batch", "length", "one")[:rank]
    return feed(HelperInput(name="x", kind=kind, dtype=dtype, dims=dims), run)


def run_of(lengths: tuple[int, ...], query_len: int, alignment: Any) -> Run:
    past_len = max(lengths)
    axis = KeyAxis(past_len + query_len, past_len, alignment)
    return Run(list(lengths), past_len, query_len, (axis,))


@pytest.mark.parametrize(
    ("lengths", "query_len", "alignment", "mask"),
    [
        ((0,), 3, "end", [[1, 1, 1]]),
        ((2,), 1, "start", [[1, 1, 1]]),
        (EQUAL, 1, "end", [[1, 1, 1, 1]] * 2),
        (EQUAL, 2, "start", [[1, 1, 1, 1, 1]] * 2),
        # Padding lies before the row's own tokens, which end where the new ones begin.
        (RAGGED, 1, "end", [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]),
        (RAGGED, 2, "end", [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]),
        # Each row counts from the start: new tokens follow its own, padding comes last.
        (RAGGED, 1, "start", [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
        (RAGGED, 2, "start", [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]),
        ((1, 2), 1, "end", [[0, 1, 1], [1, 1, 1]]),
        ((1, 2), 1, "start", [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_the_mask_shows_each_rows_own_tokens(
    lengths: tuple[int, ...], query_len: int, alignment: str, mask: list[list[int]]
) -> None:
    run = run_of(lengths, query_len, alignment)
    np.testing.assert_array_equal(fed("mask_2d", run), mask)


@pytest.mark.parametrize("alignment", ["start", "end"])
@pytest.mark.parametrize(
    ("lengths", "query_len", "positions"),
    [((0,), 3, [[0, 1, 2]]), (EQUAL, 2, [[3, 4], [3, 4]]), (RAGGED, 1, [[3], [1], [0]]),
     (RAGGED, 2, [[3, 4], [1, 2], [0, 1]])],
)  # fmt: skip
def test_positions_count_each_rows_own_tokens(
    lengths: tuple[int, ...], query_len: int, positions: list[list[int]], alignment: str
) -> None:
    """Never the padding, whichever side it is on."""
    got = fed("positions", run_of(lengths, query_len, alignment))
    np.testing.assert_array_equal(got, positions)


@pytest.mark.parametrize(
    ("kind", "rank", "lengths", "query_len", "wanted"),
    [
        ("cache_position", 1, EQUAL, 2, [3, 4]),
        ("cache_position", 1, (0,), 3, [0, 1, 2]),
        ("last_positions", 1, RAGGED, 1, [3, 1, 0]),
        ("last_positions", 1, (0,), 5, [4]),
        ("last_positions", 2, RAGGED, 1, [[3], [1], [0]]),
        ("past_length", 0, EQUAL, 2, 3),
        ("past_length", 1, RAGGED, 2, [3, 1, 0]),
        ("total_length", 0, RAGGED, 2, 5),
        ("total_length", 1, RAGGED, 2, [5, 3, 2]),
        ("num_logits_to_keep", 0, EQUAL, 4, 1),
        ("num_logits_to_keep", 1, EQUAL, 4, [1]),
    ],
)
def test_lengths_and_positions_have_the_rank_the_graph_wants(
    kind: HelperKind, rank: int, lengths: tuple[int, ...], query_len: int, wanted: Any
) -> None:
    got = fed(kind, run_of(lengths, query_len, "start"), "int32", rank)
    np.testing.assert_array_equal(got, np.array(wanted))
    assert got.shape == np.shape(wanted)
    assert got.dtype == np.int32


@pytest.mark.parametrize(("lengths", "wanted"), [((0, 0), False), ((0, 1), True), ((4,), True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cache_branch_is_taken_once_there_is_a_cache(
    lengths: tuple[int, ...], wanted: bool, rank: int
) -> None:
    """A merged decoder's other branch ignores the past it is given."""
    got = fed("use_cache_branch", run_of(lengths, 1, "end"), "bool", rank)
    assert got.tolist() == (wanted if rank == 0 else [wanted])
    assert got.dtype == np.bool_


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float32", "float16"])
def test_a_mask_has_the_dtype_the_graph_wants(dtype: str) -> None:
    got = fed("mask_2d", run_of((1, 0), 1, "end"), dtype)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got.astype(int), [[1, 1], [0, 1]])
