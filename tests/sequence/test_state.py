"""Extend, rewind, fork and generate, in any order, against a full recompute."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule
from ortkv import Generator
from ortkv.errors import (
    ContextLengthExceeded,
    ExecutionFailed,
    InvalidRequest,
    TokenizerMissing,
)
from ortkv.generation_config import GenerationConfig
from ortkv.sequence import decode

from oracle import full_logits

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TOLERANCE = 1e-4  # fp32 on both sides; see tests/golden/reference.py
GRAPHS = ("llama-optimum", "llama-genai", "gpt2-ort", "llama-merged")
VOCAB_SIZE = 160
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=GRAPHS)
def generator(request: pytest.FixtureRequest) -> Generator:
    return Generator(FIXTURES / request.param)


@pytest.fixture(scope="module", params=["llama-optimum", "llama-genai"])
def bounded(request: pytest.FixtureRequest) -> Generator:
    """A model whose config states its context (ORT tools' GPT-2 comes without one)."""
    return Generator(FIXTURES / request.param)


def oracle_for(graph: str) -> Path:
    """The concat twin of the same checkpoint, run without a cache by plain onnxruntime."""
    return FIXTURES / ("gpt2-optimum" if graph.startswith("gpt2") else "llama-optimum")


class _Sequences(RuleBasedStateMachine):
    """Model: a list of tokens. Answer: all of them in one run of plain onnxruntime."""

    graph: str
    generator: Generator
    sequences = Bundle("sequences")

    @initialize(target=sequences, prompt=ids)
    def start(self, prompt: list[int]) -> tuple[object, list[int]]:
        return self.generator.start(prompt), list(prompt)

    @rule(pair=sequences, new=ids)
    def extend(self, pair: tuple, new: list[int]) -> None:
        sequence, tokens = pair
        if len(tokens) + len(new) < 60:
            sequence.extend(new)
            tokens += new

    @rule(pair=sequences, count=st.integers(1, 4))
    def generate(self, pair: tuple, count: int) -> None:
        """The turn ends without EOS: its last token must still enter the cache."""
        sequence, tokens = pair
        if len(tokens) + count < 60:
            tokens += sequence.generate_ids(max_new_tokens=count, eos_token_id=None)

    @rule(pair=sequences, share=st.floats(0, 1))
    def rewind(self, pair: tuple, share: float) -> None:
        sequence, tokens = pair
        del tokens[max(1, round(share * len(tokens))) :]
        sequence.rewind(len(tokens))

    @rule(target=sequences, pair=sequences)
    def fork(self, pair: tuple) -> tuple[object, list[int]]:
        sequence, tokens = pair
        return sequence.fork(), list(tokens)

    @rule(pair=sequences)
    def compare(self, pair: tuple) -> None:
        sequence, tokens = pair
        assert sequence.tokens == tokens
        expected = full_logits(oracle_for(self.graph), tokens)
        np.testing.assert_allclose(sequence.logits, expected, rtol=0, atol=TOLERANCE)


def _machine(name: str) -> type[RuleBasedStateMachine]:
    made = type(name, (_Sequences,), {"graph": name, "generator": Generator(FIXTURES / name)})
    made.TestCase.settings = settings(
        derandomize=True, deadline=None, max_examples=25, stateful_step_count=15
    )
    return made


@pytest.mark.parametrize("graph", GRAPHS)
def test_any_order_of_verbs_scores_as_a_full_recompute(graph: str) -> None:
    _machine(graph).TestCase().runTest()


def test_rewind_keeps_the_first_tokens_and_scores_the_next(generator: Generator) -> None:
    sequence = generator.start([5, 6, 7, 8, 9])
    sequence.generate_ids(max_new_tokens=5, eos_token_id=None)
    sequence.rewind(4)
    assert sequence.tokens == [5, 6, 7, 8]
    np.testing.assert_allclose(
        sequence.logits, generator.start([5, 6, 7, 8]).logits, rtol=0, atol=TOLERANCE
    )


def test_logits_are_a_copy(generator: Generator) -> None:
    sequence = generator.start([1, 2, 3])
    kept = sequence.logits
    before = kept.copy()
    sequence.generate_ids(max_new_tokens=3, eos_token_id=None)
    np.testing.assert_array_equal(kept, before)


def test_a_fork_goes_its_own_way(generator: Generator) -> None:
    sequence = generator.start([1, 2, 3])
    twin = sequence.fork()
    sequence.extend([4, 5])
    twin.extend([6])
    np.testing.assert_allclose(
        twin.logits, generator.start([1, 2, 3, 6]).logits, rtol=0, atol=TOLERANCE
    )
    np.testing.assert_allclose(
        sequence.logits, generator.start([1, 2, 3, 4, 5]).logits, rtol=0, atol=TOLERANCE
    )


def test_a_fork_draws_the_same_random_numbers(generator: Generator) -> None:
    sequence = generator.start([1, 2, 3])
    sequence.seed(11)
    twin = sequence.fork()
    drawn = [s.generate_ids(max_new_tokens=12, do_sample=True) for s in (sequence, twin)]
    assert drawn[0] == drawn[1]


def test_become_keeps_the_common_start_cached(generator: Generator) -> None:
    sequence = generator.start([1, 2, 3, 4, 5])
    sequence.become([1, 2, 3, 9])
    assert sequence.tokens == [1, 2, 3, 9]
    np.testing.assert_allclose(
        sequence.logits, generator.start([1, 2, 3, 9]).logits, rtol=0, atol=TOLERANCE
    )


def test_ids_outside_the_vocabulary_are_refused(generator: Generator) -> None:
    """-1 wraps silently in Gather; a float or a bool is no id.  # hostile 43."""
    for wrong in ([-1], [VOCAB_SIZE], [1.5], [True], [[1]], ["a"]):
        with pytest.raises(InvalidRequest) as raised:
            generator.start(wrong)  # pyright: ignore[reportArgumentType]
        assert raised.value.code == "invalid_request"


def test_a_refused_extension_leaves_the_sequence_as_it_was(bounded: Generator) -> None:
    sequence = bounded.start([1, 2, 3])
    before = sequence.logits
    with pytest.raises(InvalidRequest):
        sequence.extend([4, -1])
    with pytest.raises(ContextLengthExceeded):
        sequence.extend([4] * 1000)
    assert sequence.tokens == [1, 2, 3]
    np.testing.assert_array_equal(sequence.logits, before)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    bounded: Generator,
) -> None:
    """# hostile 39."""
    limit = bounded.context_length
    assert limit is not None
    for length in (limit + 1, 10 * limit):
        with pytest.raises(ContextLengthExceeded, match=f"{length} tokens.*{limit}") as raised:
            bounded.start([1] * length)
        assert raised.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthExceeded, match=str(limit)):
        bounded.generate_ids([[1] * limit], max_new_tokens=1)


def test_generation_ends_at_the_end_of_the_context(bounded: Generator) -> None:
    limit = bounded.context_length
    assert limit is not None
    sequence = bounded.start([1] * (limit - 3))
    assert len(sequence.generate_ids(max_new_tokens=50, eos_token_id=None)) == 3
    assert sequence.finish_reason == "length"


def test_a_run_that_fails_leaves_the_sequence_as_it_was() -> None:
    """No context is stated here: the position table's end is found by onnxruntime itself."""
    generator = Generator(FIXTURES / "gpt2-ort")
    sequence = generator.start([1, 2, 3])
    before = sequence.logits
    with pytest.raises(ExecutionFailed):
        sequence.extend([4] * 1000)
    assert sequence.tokens == [1, 2, 3]
    np.testing.assert_allclose(sequence.logits, before, rtol=0, atol=TOLERANCE)
    sequence.extend([4])
    np.testing.assert_allclose(
        sequence.logits, generator.start([1, 2, 3, 4]).logits, rtol=0, atol=TOLERANCE
    )


def test_an_interrupt_in_the_middle_of_a_run_leaves_a_sequence_that_goes_on(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after one entry took the run in and before the next did."""
    sequence = generator.start([1, 2, 3])
    slot = type(sequence.cache.slots[1])
    commit, calls = slot.commit, []

    def interrupted(self: object) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        commit(self)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(slot, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sequence.extend([4, 5])
    monkeypatch.undo()
    assert sequence.tokens == [1, 2, 3]
    sequence.extend([6])
    np.testing.assert_allclose(
        sequence.logits, generator.start([1, 2, 3, 6]).logits, rtol=0, atol=TOLERANCE
    )


def test_an_interrupt_within_a_rewind_leaves_the_sequence_as_it_was(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = generator.start([1, 2, 3, 4, 5])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(sequence.cache.slots[1]), "truncate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sequence.rewind(2)
    monkeypatch.undo()
    assert sequence.tokens == [1, 2, 3, 4, 5]
    for tokens in ([1, 2, 3, 4, 5, 9], [1, 2, 9]):
        sequence.rewind(len(tokens) - 1).extend([9])
        np.testing.assert_allclose(
            sequence.logits, generator.start(tokens).logits, rtol=0, atol=TOLERANCE
        )


def test_no_new_tokens_is_an_empty_result(generator: Generator) -> None:
    """# hostile 40."""
    assert generator.generate_ids([[1, 2], [3]], max_new_tokens=0) == [[], []]


def test_an_end_of_sequence_token_ends_its_row_alone(generator: Generator) -> None:
    prompts = [[5, 17, 42], [7, 1], [90]]
    free = generator.generate_ids(prompts, max_new_tokens=12, eos_token_id=None)
    stop = free[1][4]
    rows = generator.generate_ids(prompts, max_new_tokens=12, eos_token_id=stop)
    for row, whole in zip(rows, free, strict=True):
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert row == expected


def test_sampled_rows_equal_what_each_draws_alone(generator: Generator) -> None:
    prompts = [[5, 17, 42], [7, 1], [90, 2, 3, 4, 5]]
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 5, "max_new_tokens": 12}
    together = generator.generate_ids(prompts, **settings)
    assert together == [generator.generate_ids([p], **settings)[0] for p in prompts]


def test_an_abandoned_stream_leaves_a_sequence_that_goes_on(generator: Generator) -> None:
    sequence = generator.start([1, 2, 3])
    steps = decode([sequence], GenerationConfig(max_new_tokens=20), text=False)
    seen = [next(steps).token for _ in range(4)]
    steps.close()
    assert sequence.tokens == [1, 2, 3, *seen]
    np.testing.assert_allclose(
        sequence.logits, generator.start(sequence.tokens).logits, rtol=0, atol=TOLERANCE
    )


def test_empty_prompts_and_rows_are_refused(generator: Generator) -> None:
    """# hostile 38, 49."""
    for wrong in ([], [[]], "abc"):
        with pytest.raises(InvalidRequest):
            generator.generate_ids(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("change", ["extend", "rewind", "swap", "generate", "empty"])
def test_a_sequence_changed_under_a_generation_stops_it(
    generator: Generator, num_rows: int, change: str
) -> None:
    """It went on with the scores of what was there before. The sequence itself goes on."""
    sequences = [generator.start([1, 2, 3]), generator.start([4, 5, 6])][:num_rows]
    steps = decode(sequences, GenerationConfig(max_new_tokens=20), text=False)
    for _ in range(2 * num_rows):
        next(steps)
    changed = sequences[-1]
    if change == "extend":
        changed.extend([9])
    elif change == "rewind":
        changed.rewind(4)
    elif change == "swap":  # as many tokens as before
        changed.rewind(4).extend([9])
    elif change == "generate":
        changed.generate_ids(max_new_tokens=1, eos_token_id=None)
    else:
        changed.rewind(0)
    tokens = changed.tokens
    with pytest.raises(InvalidRequest, match=f"row {num_rows - 1} was changed"):
        list(steps)
    assert changed.tokens == tokens
    changed.extend([7])
    np.testing.assert_allclose(
        changed.logits, generator.start([*tokens, 7]).logits, rtol=0, atol=TOLERANCE
    )


def test_looking_at_a_sequence_does_not_stop_its_generation(generator: Generator) -> None:
    sequences = [generator.start([1, 2, 3]), generator.start([4, 5, 6])]
    expected = generator.generate_ids([[1, 2, 3], [4, 5, 6]], max_new_tokens=5, eos_token_id=None)
    config = GenerationConfig(max_new_tokens=5)
    for emitted in decode(sequences, config, text=False):
        sequence = sequences[emitted.row]
        _ = sequence.logits, sequence.fork().extend([1]), sequence.extend([])
    assert [s.tokens[3:] for s in sequences] == expected


def test_tokens_refused_by_become_leave_the_sequence_as_it_was(bounded: Generator) -> None:
    sequence = bounded.start([1, 2, 3, 4])
    before = sequence.logits
    for wrong in ([1, 2, -1], [1, VOCAB_SIZE], [1, 2, "a"], [1, 2] + [3] * 1000, []):
        with pytest.raises(InvalidRequest):
            sequence.become(wrong)  # pyright: ignore[reportArgumentType]
        assert sequence.tokens == [1, 2, 3, 4]
        assert sequence.past_len == 4
        np.testing.assert_array_equal(sequence.logits, before)


def test_a_run_that_fails_in_become_leaves_the_sequence_as_it_was() -> None:
    generator = Generator(FIXTURES / "gpt2-ort")
    sequence = generator.start([1, 2, 3, 4])
    before = sequence.logits
    with pytest.raises(ExecutionFailed):
        sequence.become([1, 2] + [4] * 1000)
    assert sequence.tokens == [1, 2, 3, 4]
    np.testing.assert_allclose(sequence.logits, before, rtol=0, atol=TOLERANCE)


def test_a_missing_tokenizer_is_a_fresh_error_each_time(bounded: Generator) -> None:
    """One object raised again and again carries every traceback it ever had."""
    errors = []
    for _ in range(2):
        with pytest.raises(TokenizerMissing) as raised:
            bounded.start("text")
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])
