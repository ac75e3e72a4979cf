"""Scores of ortkv.sampling beside those of transformers' own processors, in its own order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ortkv.generation_config import GenerationConfig
from ortkv.sampling import processed, warped
from transformers import GenerationConfig as HFConfig
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
SEEDS = st.integers(0, 2**32 - 1)
VOCAB = st.integers(2, 60)
PLAIN = GenerationConfig(top_k=0)


def random_logits(seed: int, vocab: int, *, ties: bool = False) -> NDArray[np.float32]:
    """Wide normal scores; ``ties`` rounds them so that several are equal."""
    logits = np.random.default_rng(seed).normal(0.0, 3.0, vocab).astype(np.float32)
    return np.round(logits) if ties else logits


def reference(
    processors: list[LogitsProcessor] | LogitsProcessorList,
    logits: NDArray[np.float32],
    tokens: list[int],
) -> NDArray[np.float32]:
    """What transformers makes of one row."""
    ids: Any = torch.tensor([tokens], dtype=torch.long)
    scores = torch.from_numpy(logits.copy())[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].numpy()


def assert_same(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=1e-6, atol=1e-6)
    assert got.dtype == np.float32


@SETTINGS
@given(SEEDS, VOCAB, st.floats(0.05, 20.0), st.data())
def test_repetition_penalty_is_that_of_transformers(
    seed: int, vocab: int, penalty: float, data: st.DataObject
) -> None:
    """Positive scores are divided and negative ones multiplied; a token seen twice counts once."""
    logits = random_logits(seed, vocab)
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12))
    config = PLAIN.updated(repetition_penalty=penalty)
    wanted = reference([hf.RepetitionPenaltyLogitsProcessor(penalty)], logits, tokens)
    assert_same(processed(logits, tokens, 0, config), wanted)


@SETTINGS
@given(SEEDS, st.integers(2, 4), st.integers(1, 4), st.data())
def test_no_repeat_ngram_is_that_of_transformers(
    seed: int, vocab: int, size: int, data: st.DataObject
) -> None:
    """A tiny vocabulary, so that n-grams do come back; size 1 bans every token seen."""
    logits = random_logits(seed, vocab)
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=14))
    config = PLAIN.updated(no_repeat_ngram_size=size)
    wanted = reference([hf.NoRepeatNGramLogitsProcessor(size)], logits, tokens)
    assert_same(processed(logits, tokens, 0, config), wanted)


@SETTINGS
@given(SEEDS, st.integers(0, 5), st.integers(1, 5), st.sets(st.integers(0, 9), min_size=1))
def test_min_new_tokens_is_that_of_transformers(
    seed: int, num_new: int, minimum: int, ends: set[int]
) -> None:
    """Ends are banned until ``minimum`` tokens are there, and not one step longer."""
    logits, prompt = random_logits(seed, 10), [1, 2, 3]
    tokens = prompt + [4] * num_new
    config = PLAIN.updated(min_new_tokens=minimum, eos_token_id=sorted(ends))
    processor = hf.MinNewTokensLengthLogitsProcessor(len(prompt), minimum, sorted(ends))
    assert_same(processed(logits, tokens, num_new, config), reference([processor], logits, tokens))


@SETTINGS
@given(SEEDS, st.sets(st.integers(0, 9), min_size=1))
def test_suppress_tokens_is_that_of_transformers(seed: int, banned: set[int]) -> None:
    logits = random_logits(seed, 10)
    config = PLAIN.updated(suppress_tokens=sorted(banned))
    wanted = reference([hf.SuppressTokensLogitsProcessor(sorted(banned))], logits, [1])
    assert_same(processed(logits, [1], 0, config), wanted)


def test_suppressed_ids_beyond_the_vocabulary_change_nothing() -> None:
    logits = random_logits(0, 10)
    config = PLAIN.updated(suppress_tokens=[3, 10, 50_000])
    wanted = reference([hf.SuppressTokensLogitsProcessor([3])], logits, [1])
    assert_same(processed(logits, [1], 0, config), wanted)


WARPERS: dict[str, tuple[Callable[[float], LogitsProcessor], float, float]] = {
    "temperature": (hf.TemperatureLogitsWarper, 0.01, 50.0),
    "top_p": (hf.TopPLogitsWarper, 0.001, 0.999),
    "min_p": (hf.MinPLogitsWarper, 0.001, 1.0),
    "typical_p": (hf.TypicalLogitsWarper, 0.001, 0.999),
}


@pytest.mark.parametrize("name", WARPERS)
@SETTINGS
@given(seed=SEEDS, vocab=VOCAB, share=st.floats(0.0, 1.0))
def test_each_warper_is_that_of_transformers(
    name: str, seed: int, vocab: int, share: float
) -> None:
    make, low, high = WARPERS[name]
    value = low + share * (high - low)
    logits = random_logits(seed, vocab)
    got = warped(logits, PLAIN.updated(**{name: value}))
    assert_same(got, reference([make(value)], logits, [0]))


@SETTINGS
@given(SEEDS, VOCAB, st.integers(1, 80))
def test_top_k_is_that_of_transformers_with_ties(seed: int, vocab: int, k: int) -> None:
    """Tokens equal to the k-th best all stay; a k above the vocabulary keeps everything."""
    logits = random_logits(seed, vocab, ties=True)
    got = warped(logits, PLAIN.updated(top_k=k))
    assert_same(got, reference([hf.TopKLogitsWarper(k)], logits, [0]))


@SETTINGS
@given(SEEDS, st.integers(4, 40), st.floats(0.05, 0.95))
def test_typical_keeps_every_token_of_equal_distance(seed: int, vocab: int, mass: float) -> None:
    """Tokens tied with the last one kept were dropped by their place in the vocabulary."""
    logits = random_logits(seed, vocab, ties=True)
    got = warped(logits, PLAIN.updated(typical_p=mass))
    wanted = reference([hf.TypicalLogitsWarper(mass)], logits, [0])
    kept = np.isfinite(got)
    for value in np.unique(logits):
        assert len(set(kept[logits == value])) == 1, "equal scores, unequal fates"
    assert_same(got, wanted)


@pytest.fixture(scope="module")
def hf_model() -> Any:
    """Only its ``_get_logits_processor``, which orders the processors, is used."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1))


COMBINED = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 3.0),
        "top_k": st.integers(0, 40),
        "top_p": st.floats(0.2, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "typical_p": st.floats(0.3, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "no_repeat_ngram_size": st.integers(0, 3),
        "min_new_tokens": st.integers(0, 6),
        "suppress_tokens": st.lists(st.integers(0, 39), max_size=3, unique=True),
        "eos_token_id": st.lists(st.integers(0, 39), min_size=1, max_size=3, unique=True),
    }
)


@pytest.mark.parametrize("do_sample", [False, True])
@SETTINGS
@given(seed=SEEDS, chosen=COMBINED, num_new=st.integers(0, 6))
def test_all_settings_together_apply_in_the_order_of_transformers(
    hf_model: Any, do_sample: bool, seed: int, chosen: dict, num_new: int
) -> None:
    """The list is the one GenerationMixin builds; a swap of two warpers changes who is left."""
    logits = random_logits(seed, 40)
    tokens = np.random.default_rng(seed).integers(0, 40, 5 + num_new).tolist()
    hf_config = HFConfig(do_sample=do_sample, num_beams=1, **chosen)
    hf_config._eos_token_tensor = torch.tensor(chosen["eos_token_id"])
    processors = hf_model._get_logits_processor(
        hf_config, input_ids_seq_length=5, encoder_input_ids=None, logits_processor=[]
    )
    config = GenerationConfig().updated(do_sample=do_sample, **chosen)
    got = processed(logits, tokens, num_new, config)
    if do_sample:
        got = warped(got, config)
    assert_same(got, reference(processors, logits, tokens))
