"""A cache written by a stand-in for the graph, against rows kept as plain arrays.

The stand-in writes numpy arrays where a graph would: after the past (concat) or into the
buffer at each row's own end (in_place).
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray
from ortkv.cache import Bound, Cache
from ortkv.errors import InvalidRequest
from ortkv.runtime import CPU
from ortkv.schema import CacheEntry, CacheSchema

LAYOUTS = (
    "BHSD", "BSHD", "BHDS", "2BHSD", "(BH)SD", "(BH)DS", "BS(HD)", "LBS(HD)", "BS(2D)", "HBSD",
    "SBHD", "L2SBHD",
)  # fmt: skip
HEADS, DEPTH, LAYERS, FEW = 2, 3, 2, 4


@dataclass(frozen=True)
class Rule:
    """An update rule as a schema says it, and at which end rows are then."""

    update: Any
    row_alignment: Any = "end"
    capacity: int | None = None
    window: int | None = None

    def kept(self, tokens: list[int]) -> list[int]:
        """What is held of a row: a window drops the oldest."""
        slides = self.update == "window" or self.window is not None
        most = self.capacity or self.window
        return tokens[-most:] if slides and most else tokens


RULES = {
    "concat": Rule("concat"),
    "in_place": Rule("in_place", "start"),
    "in_place fixed": Rule("in_place", "start", capacity=300),
    "scatter": Rule("scatter", "start"),
    "scatter at the end": Rule("scatter", "end"),
    "scatter fixed": Rule("scatter", "start", capacity=300),
    "delta": Rule("delta"),
    "delta fixed": Rule("delta", capacity=300),
    "delta window": Rule("delta", window=FEW),
    "delta window fixed": Rule("delta", capacity=FEW, window=FEW),
    "window": Rule("window", window=FEW),
    "window fixed": Rule("window", capacity=FEW, window=FEW),
    "window fixed alone": Rule("window", capacity=FEW),
}


def rule_of(entry: CacheEntry) -> Rule:
    return RULES[str(entry.past).rsplit(".", 1)[0]]


def entry_of(layout: str, name: str, dtype: str = "float32", layer: int = 0) -> CacheEntry:
    rule = RULES[name]
    return CacheEntry(
        layer=layer,
        role="key_value" if "2" in layout else "key",
        past=f"{name}.{layer}",
        present=f"present.{layer}",
        layout=layout,
        update=rule.update,
        dtype=dtype,
        num_kv_heads=HEADS if "H" in layout else 1,
        head_dim=DEPTH,
        evidence=(),
        num_layers=LAYERS if "L" in layout else 1,
        capacity=rule.capacity,
        window=rule.window,
    )


def schema_of(*entries: CacheEntry) -> CacheSchema:
    return CacheSchema(
        tokens="input_ids",
        tokens_dtype="int64",
        fixed_batch=None,
        fixed_query_len=None,
        one_token_steps=False,
        quantized=False,
        row_alignment=rule_of(entries[0]).row_alignment,
        takes_ragged_rows=True,
        helpers=(),
        logits="logits",
        logits_dtype="float32",
        logits_dims=("b", "s", 7),
        entries=entries,
    )


def values(entry: CacheEntry, tokens: list[int]) -> NDArray[Any]:
    """[(layers,) (2,) heads, len(tokens), head_dim]: a token's content, other in every place."""
    sizes = {"L": LAYERS, "2": 2, "H": HEADS, "S": 1, "D": DEPTH}
    shape = tuple(sizes[letter] for letter in "L2HSD" if letter in entry.letters)
    places = 1 + np.arange(math.prod(shape)).reshape(shape)
    at_s = len(shape) - 2
    each = [places + 64 * token for token in tokens] or [
        places[(slice(None),) * at_s + (slice(0),)]
    ]
    return ((1 - 2 * entry.layer) * np.concatenate(each, axis=at_s)).astype(entry.dtype)


def view(bound: Bound, entry: CacheEntry) -> NDArray[Any]:
    """A bound tensor's own memory as [batch, (layers,) (2,) heads, length, head_dim]."""
    size = math.prod(bound.shape)
    raw = bound.buffer.read()[: size * np.dtype(entry.dtype).itemsize]
    sizes = {"L": LAYERS, "2": 2, "H": HEADS, "D": DEPTH, "B": 0, "S": 0}
    whole = raw.view(entry.dtype).reshape(bound.shape)
    for place, merged in enumerate(re.findall(r"\(.*?\)|.", entry.layout)):
        if merged in ("B", "S"):
            sizes[merged] = bound.shape[place]
        elif merged == "(BH)":
            sizes["B"] = bound.shape[place] // HEADS
    array = whole.reshape([sizes[letter] for letter in entry.letters])
    letters = [letter for letter in "BL2HSD" if letter in entry.letters]
    return array.transpose([entry.letters.index(letter) for letter in letters])


def run(cache: Cache, new: list[list[int]]) -> None:
    """What a graph does with the same number of new tokens for every row."""
    query_len = len(new[0])
    bounds = cache.prepare(query_len)
    for entry, (past, present) in zip(cache.schema.entries, bounds, strict=True):
        assert present is not None
        old, out = view(past, entry), view(present, entry)
        fresh = np.stack([values(entry, tokens) for tokens in new])
        write(cache, entry, old, out, fresh)
        assert (past is present) == (entry.update == "in_place")
        assert (past.buffer is present.buffer) == (entry.update == "in_place")
    cache.commit(query_len)


def write(
    cache: Cache, entry: CacheEntry, old: NDArray[Any], out: NDArray[Any], fresh: NDArray[Any]
) -> None:
    """One entry's present [batch, .., length, head_dim], as its rule makes it of past and new."""
    rule, past_len, query_len = rule_of(entry), cache.past_len, fresh.shape[-2]
    if rule.update in ("in_place", "scatter"):
        assert out.shape == old.shape
        out[...] = old
        for row, length in enumerate(cache.lengths):
            start = length if rule.row_alignment == "start" else past_len
            out[row, ..., start : start + query_len, :] = fresh[row]
        return
    held = len(rule.kept(list(range(past_len))))
    assert old.shape[-2] == (rule.capacity or held)
    assert not old[..., : old.shape[-2] - held, :].any()
    if rule.update == "delta":
        out[...] = fresh
        return
    whole = np.concatenate([old, fresh], axis=-2)
    wanted = rule.capacity or len(rule.kept(list(range(past_len + query_len))))
    out[...] = whole[..., whole.shape[-2] - wanted :, :]


def assert_holds(cache: Cache, rows: list[list[int]]) -> None:
    assert cache.lengths == [len(row) for row in rows]
    assert (cache.batch, cache.past_len) == (len(rows), max(map(len, rows)))
    for entry in cache.schema.entries:
        for i, row in enumerate(rows):
            wanted = values(entry, rule_of(entry).kept(row))
            np.testing.assert_array_equal(cache.tensor(entry, i), wanted)


def cache_of(tokens: list[int], *entries: CacheEntry) -> Cache:
    """A cache of one row that ran its tokens as a prompt and then one by one."""
    cache = Cache(schema_of(*entries), CPU)
    if tokens[:2]:
        run(cache, [tokens[:2]])
    for token in tokens[2:]:
        run(cache, [[token]])
    return cache


both = pytest.mark.parametrize("update", RULES)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@both
@layouts
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_a_cache_holds_what_the_runs_wrote_in_the_canonical_layout(
    update: str, layout: str, dtype: str
) -> None:
    """Two layers, past the first growth of the buffers, checked after every run."""
    entries = [entry_of(layout, update, dtype, layer) for layer in range(2)]
    cache = Cache(schema_of(*entries), CPU)
    tokens = [5, 6, 7]
    run(cache, [tokens])
    assert_holds(cache, [tokens])
    for token in range(8, 20):
        run(cache, [[token]])
        tokens.append(token)
        assert_holds(cache, [tokens])
    run(cache, [list(range(100))])
    assert_holds(cache, [tokens + list(range(100))])


@both
@layouts
def test_a_tensor_is_a_copy(update: str, layout: str) -> None:
    entry = entry_of(layout, update)
    cache = cache_of([1, 2, 3], entry)
    cache.tensor(entry)[...] = -1
    assert_holds(cache, [[1, 2, 3]])


@both
@layouts
@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_truncate_keeps_the_first_tokens_or_says_how_many_and_goes_on_from_there(
    update: str, layout: str, length: int
) -> None:
    tokens = [1, 2, 3, 4, 5]
    cache = cache_of(tokens, entry_of(layout, update))
    wanted = length if RULES[update].kept(tokens) == tokens or length == 5 else 0
    assert cache.truncate(length) == wanted
    run(cache, [[9]])
    run(cache, [[8, 7]])
    assert_holds(cache, [[*range(1, wanted + 1), 9, 8, 7]])


@both
@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_refuses_what_the_cache_does_not_hold(update: str, length: int) -> None:
    cache = cache_of([1, 2, 3, 4, 5], entry_of("BHSD", update))
    with pytest.raises(InvalidRequest, match=r"holds \[5\] tokens"):
        cache.truncate(length)
    assert_holds(cache, [[1, 2, 3, 4, 5]])


@both
def test_truncate_refuses_a_batch(update: str) -> None:
    one = cache_of([1], entry_of("BHSD", update))
    with pytest.raises(InvalidRequest, match="one row"):
        Cache.joined([one, one]).truncate(0)


@both
@layouts
@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [[1, 2, 3, 4], [5], [6, 7, 8]], [[], [1]]])
def test_rows_join_and_go_on_together(update: str, layout: str, rows: list[list[int]]) -> None:
    """Equal and ragged; the caches joined stay as they were and go their own way."""
    entry = entry_of(layout, update)
    parts = [cache_of(row, entry) for row in rows]
    whole = Cache.joined(parts)
    assert_holds(whole, rows)
    run(whole, [[50 + i] for i in range(len(rows))])
    run(whole, [[60 + i] for i in range(len(rows))])
    assert_holds(whole, [[*row, 50 + i, 60 + i] for i, row in enumerate(rows)])
    for part, row in zip(parts, rows, strict=True):
        assert_holds(part, [row])
        run(part, [[90]])
        assert_holds(part, [[*row, 90]])


@pytest.mark.parametrize("update", ["concat", "in_place"])
def test_padding_lies_on_the_side_the_schema_says_and_holds_no_garbage(update: str) -> None:
    """Not even NaN times a mask of zero may reach a row: what is not a token is zero."""
    entry = entry_of("BHSD", update)
    short = cache_of([1, 2, 3, 4, 5], entry)
    short.truncate(1)
    whole = Cache.joined([short, cache_of([6, 7, 8], entry)])
    past, _ = whole.prepare(1)[0]
    row = view(past, entry)[0, :, :3]
    own = slice(0, 1) if update == "in_place" else slice(2, 3)
    np.testing.assert_array_equal(row[:, own], values(entry, [1]))
    row = np.delete(row, own, axis=1)
    np.testing.assert_array_equal(row, np.zeros_like(row))


@both
@layouts
@pytest.mark.parametrize("rows", [[0], [2], [1, 2], [2, 0], [1, 1]])
def test_keep_drops_rows_and_shortens_the_axis(update: str, layout: str, rows: list[int]) -> None:
    entry = entry_of(layout, update)
    all_rows = [[1, 2, 3, 4], [5], [6, 7, 8]]
    cache = Cache.joined([cache_of(row, entry) for row in all_rows])
    run(cache, [[20], [21], [22]])
    cache.keep(rows)
    kept = [[*all_rows[row], 20 + row] for row in rows]
    assert_holds(cache, kept)
    run(cache, [[30]] * len(rows))
    assert_holds(cache, [[*row, 30] for row in kept])


@both
@layouts
def test_a_copy_is_independent(update: str, layout: str) -> None:
    entry = entry_of(layout, update)
    cache = cache_of([1, 2, 3], entry)
    twin = cache.copy()
    run(cache, [[4]])
    twin.truncate(1)
    run(twin, [[9]])
    assert_holds(cache, [[1, 2, 3, 4]])
    assert_holds(twin, [[1, 9]])
    ragged = Cache.joined([cache, twin])
    other = ragged.copy()
    run(ragged, [[5], [6]])
    assert_holds(other, [[1, 2, 3, 4], [1, 9]])


@pytest.mark.parametrize(("layout", "stacked"), [("BHSD", 1), ("2BHSD", 2)])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_bytes_are_counted(layout: str, stacked: int, dtype: str, size: int) -> None:
    """heads 2 × head_dim 3 × size, twice where key and value are stacked."""
    entries = [entry_of(layout, "in_place", dtype, layer) for layer in range(2)]
    assert [entry.bytes_per_token for entry in entries] == [stacked * 6 * size] * 2
    schema = schema_of(*entries)
    assert schema.bytes_per_token == 2 * stacked * 6 * size
    cache = Cache(schema, CPU, batch=3)
    assert cache.num_bytes == 0
    cache.prepare(1)
    assert cache.num_bytes == 64 * 3 * schema.bytes_per_token


@pytest.mark.parametrize("update", ["concat", "in_place", "scatter", "delta"])
def test_memory_follows_the_tokens(update: str) -> None:
    """Capacity is a quarter above need, in steps of 64; others have two buffers of it at most."""
    cache = Cache(schema_of(entry_of("BHSD", update)), CPU)
    per_token = cache.schema.bytes_per_token
    for token in range(300):
        run(cache, [[token]])
        need = cache.past_len * per_token
        limit = (cache.past_len * 5 // 4 + 64) * per_token
        assert need <= cache.num_bytes <= limit * (1 if update == "in_place" else 2)


def test_an_in_place_buffer_is_bound_once_until_it_grows() -> None:
    """Binding compares identity: a new object a step would bind the whole cache each time."""
    cache = Cache(schema_of(entry_of("BHSD", "in_place")), CPU)
    seen = []
    for token in range(100):
        past, present = cache.prepare(1)[0]
        assert past is present
        if not any(past is old for old in seen):
            seen.append(past)
        run(cache, [[token]])
    assert [bound.shape for bound in seen] == [(1, HEADS, 64, DEPTH), (1, HEADS, 128, DEPTH)]


def test_a_run_that_was_prepared_and_failed_changes_nothing() -> None:
    for update in RULES:
        entry = entry_of("BHSD", update)
        cache = cache_of([1, 2, 3], entry)
        _, present = cache.prepare(100)[0]
        assert present is not None
        view(present, entry)[..., 3:, :] = np.nan
        assert_holds(cache, [[1, 2, 3]])
        run(cache, [[4, 5]])
        assert_holds(cache, [[1, 2, 3, 4, 5]])


@dataclass
class Held:
    """A cache and the rows it must hold."""

    cache: Cache
    rows: list[list[int]] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Any order of runs, truncations, copies, joins and keeps, over a few caches."""

    entries: tuple[CacheEntry, ...]

    def __init__(self) -> None:
        super().__init__()
        self.held = [Held(Cache(schema_of(*self.entries), CPU), [[]])]
        self.next = 0

    def pick(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.held))

    @rule(data=st.data(), query_len=st.sampled_from([1, 1, 2, 70]))
    def extend(self, data: st.DataObject, query_len: int) -> None:
        held = self.pick(data)
        if max(map(len, held.rows)) + query_len > 300:
            return
        start = self.next = self.next + 1
        new = [[(start + 7 * i + j) % 97 for j in range(query_len)] for i in range(len(held.rows))]
        run(held.cache, new)
        held.rows = [row + more for row, more in zip(held.rows, new, strict=True)]

    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: st.DataObject, share: float) -> None:
        held = self.pick(data)
        if len(held.rows) == 1:
            length = round(share * len(held.rows[0]))
            kept = held.cache.truncate(length)
            assert kept == length or kept == 0
            held.rows = [held.rows[0][:kept]]

    @precondition(lambda self: len(self.held) < 4)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.held.append(Held(held.cache.copy(), [list(row) for row in held.rows]))

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        parts = [self.pick(data), self.pick(data)]
        rows = [list(row) for part in parts for row in part.rows]
        if len(rows) <= 4:
            self.held = [*self.held[:3], Held(Cache.joined([p.cache for p in parts]), rows)]

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        held = self.pick(data)
        places = st.integers(0, len(held.rows) - 1)
        rows = data.draw(st.lists(places, min_size=1, max_size=4))
        held.cache.keep(rows)
        held.rows = [list(held.rows[row]) for row in rows]

    @invariant()
    def every_cache_holds_its_rows(self) -> None:
        for held in self.held:
            assert_holds(held.cache, held.rows)


@pytest.mark.parametrize("layout", ["BSHD", "(BH)DS", "L2SBHD"])
@both
def test_any_order_of_verbs_leaves_every_cache_with_its_own_rows(update: str, layout: str) -> None:
    entries = (entry_of(layout, update), entry_of("BHSD", update, layer=1))
    machine = type("Machine", (CacheMachine,), {"entries": entries})
    machine.TestCase.settings = settings(
        max_examples=10, stateful_step_count=15, deadline=None, derandomize=True, database=None
    )
    machine.TestCase("runTest").runTest()


@both
def test_an_interrupted_commit_leaves_an_empty_cache_that_starts_from_nothing(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots before the interrupt have taken in their run: ``write`` looks for what is left."""
    cache = cache_of([1, 2, 3], entry_of("BHSD", update), entry_of("BHSD", update, layer=1))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.slots[1], "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(cache, [[4]])
    assert cache.lengths == [0]
    run(cache, [[5]])
    run(cache, [[6]])
    assert_holds(cache, [[5, 6]])


STATE = CacheEntry(
    layer=0, role="conv", past="concat.s", present="s", layout="XBX", update="replace",
    dtype="float32", num_kv_heads=1, head_dim=1, evidence=(), state_dims=(2, 3),
)  # fmt: skip


def step_state(cache: Cache, numbers: list[float]) -> list[NDArray[Any]]:
    """A run that adds a number to each row's state. Returns: the states before, [2, 3] each."""
    past, present = cache.prepare(1)[0]
    assert present is not None
    assert past.shape == present.shape == (2, len(numbers), 3)
    old, new = (
        bound.buffer.read().view(np.float32).reshape(bound.shape) for bound in (past, present)
    )
    before = [old[:, row].copy() for row in range(len(numbers))]
    for row, number in enumerate(numbers):
        new[:, row] = old[:, row] + number + np.arange(6).reshape(2, 3)
    cache.commit(1)
    return before


def test_states_are_joined_kept_and_copied_and_start_at_zero() -> None:
    places = np.arange(6).reshape(2, 3)
    first, second = (Cache(schema_of(STATE), CPU) for _ in range(2))
    assert not np.any(step_state(first, [5]))
    step_state(second, [7])
    step_state(second, [7])
    whole = Cache.joined([first, second, Cache(schema_of(STATE), CPU)])
    assert whole.lengths == [1, 2, 0]
    for row, wanted in enumerate([5 + places, 14 + 2 * places, 0 * places]):
        np.testing.assert_array_equal(whole.tensor(STATE, row), wanted)
    step_state(whole, [1, 2, 3])
    whole.keep([2, 1])
    twin = whole.copy()
    before = step_state(whole, [0, 0])
    np.testing.assert_array_equal(before, [3 + places, 16 + 3 * places])
    np.testing.assert_array_equal(twin.tensor(STATE, 1), 16 + 3 * places)
    np.testing.assert_array_equal(whole.tensor(STATE, 1), 16 + 4 * places)
    assert whole.num_bytes == 2 * 2 * 6 * 4
    assert first.truncate(1) == 1
    np.testing.assert_array_equal(first.tensor(STATE), 5 + places)
    assert second.truncate(1) == 0
    assert not np.any(second.tensor(STATE))
    assert not np.any(step_state(second, [9]))
