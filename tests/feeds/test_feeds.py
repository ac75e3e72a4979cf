"""The arrays helper inputs are fed, written out."""

from typing import Any

import numpy as np
import pytest
from ortkv.errors import InvalidRequest, UnsupportedModel
from ortkv.feeds import KeyAxis, Run, Source, feed
from ortkv.schema import HelperInput, HelperKind

EQUAL = (3, 3)
RAGGED = (3, 1, 0)


def fed(kind: HelperKind, run: Run, dtype: str = "int64", rank: int = 2) -> np.ndarray:
    dims = ("batch", "length", "one")[:rank]
    return feed(HelperInput(name="x", kind=kind, dtype=dtype, dims=dims), run)


def helper_of(
    kind: HelperKind, dims: tuple[Any, ...], dtype: str = "int64", **more: Any
) -> HelperInput:
    return HelperInput(name="x", kind=kind, dtype=dtype, dims=dims, **more)


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


WIDER = Run([3, 1], 3, 2, (KeyAxis(8, 6, "end"), KeyAxis(5, 3, "start")))
"""Rows of 3 and 1 tokens before 2 new ones: right-aligned in a buffer of 6; or from the left."""


@pytest.mark.parametrize(
    ("width", "mask"),
    [
        ("k", [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]]),
        (8, [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]]),
        (5, [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    ],
)
def test_a_mask_of_fixed_width_covers_the_key_axis_of_that_width(width: Any, mask: Any) -> None:
    got = feed(helper_of("mask_2d", ("b", width)), WIDER)
    np.testing.assert_array_equal(got, mask)
    got = feed(helper_of("mask_2d", ("b", 1, 1, width)), WIDER)
    np.testing.assert_array_equal(got, np.array(mask)[:, None, None])


CAUSAL = [
    [[0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1]],
    [[0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 1]],
]
CAUSAL_START = [
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
]


@pytest.mark.parametrize(("width", "seen"), [("k", CAUSAL), (5, CAUSAL_START)])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "float16", "bfloat16"])
def test_a_query_sees_its_own_rows_keys_up_to_itself(width: Any, seen: Any, dtype: str) -> None:
    wanted = np.array(seen)[:, None]
    got = feed(helper_of("mask_4d", ("b", 1, "q", width), dtype), WIDER)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got.astype(int), wanted)
    got = feed(helper_of("mask_4d", ("b", "h", "q", width), dtype, values="drop"), WIDER)
    np.testing.assert_array_equal(got.astype(int), 1 - wanted)
    heads = feed(helper_of("mask_4d", ("b", 3, "q", width), dtype), WIDER)
    np.testing.assert_array_equal(heads.astype(int), np.repeat(wanted, 3, axis=1))
    rank_3 = feed(helper_of("mask_4d", ("b", "q", width), dtype), WIDER)
    np.testing.assert_array_equal(rank_3.astype(int), wanted[:, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["mask_2d", "mask_4d"])
def test_an_additive_mask_is_the_lowest_number_where_nothing_is_seen(kind: Any, dtype: str) -> None:
    dims = ("b", "k") if kind == "mask_2d" else ("b", 1, "q", "k")
    got = feed(helper_of(kind, dims, dtype, values="additive"), WIDER)
    seen = feed(helper_of(kind, dims, "bool"), WIDER)
    lowest = {
        "float32": -(2 - 2**-23) * 2.0**127,
        "float16": -65504,
        "bfloat16": -(2 - 2**-7) * 2.0**127,
    }
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(got.astype(float), np.where(seen, 0.0, lowest[dtype]))


def test_a_window_ends_before_what_is_too_far_back() -> None:
    run = Run([4], 4, 2, (KeyAxis(6, 4, "end", 2),))
    got = feed(helper_of("mask_4d", (1, 1, "q", "k")), run)
    np.testing.assert_array_equal(got[0, 0], [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        (("q",), [3, 4, 1, 2]),
        ((3, "b", "q"), [[[3, 4], [1, 2]]] * 3),
        ((4, "b", "q"), [[[3, 4], [1, 2]]] * 4),
        (("b", "q", 3), [[[3] * 3, [4] * 3], [[1] * 3, [2] * 3]]),
    ],
)
def test_positions_flat_and_for_each_section(dims: tuple[Any, ...], wanted: Any) -> None:
    got = feed(helper_of("positions", dims), WIDER)
    np.testing.assert_array_equal(got, wanted)
    assert got.flags.c_contiguous


@pytest.mark.parametrize(
    ("dims", "run", "wanted"),
    [
        (("b", "q"), WIDER, [[3, 4], [3, 4]]),
        (("b", "q"), run_of((3, 1), 2, "start"), [[3, 4], [1, 2]]),
        ((), run_of((3, 3), 1, "end"), 3),
    ],
)
def test_a_place_in_the_cache_for_each_row(dims: tuple[Any, ...], run: Run, wanted: Any) -> None:
    np.testing.assert_array_equal(feed(helper_of("cache_position", dims), run), wanted)


@pytest.mark.parametrize(("kind", "wanted"), [("past_length", [3]), ("total_length", [5])])
def test_a_length_of_one_place_is_the_longest_rows(kind: Any, wanted: list[int]) -> None:
    np.testing.assert_array_equal(feed(helper_of(kind, (1,)), WIDER), wanted)


@pytest.mark.parametrize(
    ("kind", "dims", "wanted"),
    [
        ("beam_indices", ("b",), [0, 1]),
        ("beam_indices", ("b", 1, 7), np.zeros((2, 1, 7))),
        ("beam_indices", ("b", "beams", "k"), np.zeros((2, 1, 8))),
        ("token_types", ("b", "q"), [[0, 0], [0, 0]]),
        ("zeros", ("a", 3), [[0, 0, 0]]),
        ("zeros", (), 0),
    ],
)
def test_safe_defaults(kind: Any, dims: tuple[Any, ...], wanted: Any) -> None:
    got = feed(helper_of(kind, dims, "int32"), WIDER)
    np.testing.assert_array_equal(got, np.array(wanted))
    assert got.shape == np.shape(wanted)


def test_a_source_is_fed_with_the_mask_of_its_own_tokens() -> None:
    states = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    run = WIDER._replace(source=Source(states, [3, 1]))
    got = feed(helper_of("encoder_states", ("b", "s", 2), "float16"), run)
    np.testing.assert_array_equal(got, states)
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(feed(helper_of("encoder_mask", ("b", "s")), run), mask)
    got = feed(helper_of("encoder_mask", ("b", 1, 1, "s"), "float32", values="additive"), run)
    np.testing.assert_array_equal(got == 0, mask[:, None, None] == 1)
    with pytest.raises(InvalidRequest, match="Run the model's encoder first"):
        feed(helper_of("encoder_mask", ("b", "s")), WIDER)


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        (helper_of("positions", ("b", 2, "q")), r"dims \['b', 2, 'q'\]"),
        (helper_of("mask_4d", ("q", "k")), r"dims \['q', 'k'\]"),
        (helper_of("mask_2d", ("b", "k"), "int32", values="additive"), "expected floats"),
    ],
)
def test_what_has_no_safe_value_is_refused(helper: HelperInput, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        feed(helper, WIDER)
