"""The choice itself: frequencies, refusals, and that scores are only read."""

import numpy as np
import pytest
from ortkv.errors import NumericalError
from ortkv.generation_config import GenerationConfig
from ortkv.sampling import choose, processed, warped

GREEDY = GenerationConfig()
EVERYTHING = GenerationConfig(
    do_sample=True,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.3,
    no_repeat_ngram_size=2,
    min_new_tokens=3,
    eos_token_id=(1,),
    suppress_tokens=(2,),
)


def draws(logits: np.ndarray, config: GenerationConfig, count: int) -> np.ndarray:
    """How often each token is chosen."""
    random = np.random.default_rng(11)
    chosen = [choose(logits, [0], 0, config, random) for _ in range(count)]
    return np.bincount(chosen, minlength=logits.size)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square of 20,000 seeded draws: with 5 degrees of freedom, 20.5 is the 0.1% point."""
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -2.0], dtype=np.float32)
    config = GenerationConfig(do_sample=True, top_k=0, temperature=temperature)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = 20_000 * weights / weights.sum()
    counts = draws(logits, config, 20_000)
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


def test_a_token_out_of_the_draw_is_never_drawn() -> None:
    """Also at both ends of the vocabulary, where a search in the cumulative sum may slip."""
    logits = np.array([0.0, 3.0, 2.9, 2.8, 0.0], dtype=np.float32)
    counts = draws(logits, GenerationConfig(do_sample=True, top_k=3), 2_000)
    assert counts[[0, 4]].tolist() == [0, 0]
    assert (counts[1:4] > 500).all()


@pytest.mark.parametrize("first", [0.0, 1.0 - 2**-53])
def test_the_extremes_of_the_random_number_draw_an_allowed_token(first: float) -> None:
    """A uniform 0.0 must not pick a leading token of probability zero, nor 1-ε a trailing one."""

    class Stream(np.random.Generator):
        # numpy's stubs overload it for arrays, which `choose` never asks for.
        def random(self, *_: object, **__: object) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
            return first

    logits = np.array([-np.inf, 1.0, 2.0, -np.inf], dtype=np.float32)
    config = GenerationConfig(do_sample=True, top_k=0)
    token = choose(logits, [0], 0, config, Stream(np.random.PCG64(0)))
    assert token == (1 if first == 0.0 else 2)


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = np.array([1.0, 5.0, 5.0, -3.0], dtype=np.float32)
    random = np.random.default_rng(0)
    state = random.bit_generator.state
    assert choose(logits, [0], 0, GREEDY, random) == 1
    assert random.bit_generator.state == state, "a greedy choice must draw no random number"


def test_one_seed_gives_one_series() -> None:
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32)
    config = GenerationConfig(do_sample=True)
    series = [
        [choose(logits, [0], 0, config, random) for _ in range(20)]
        for random in (np.random.default_rng(5), np.random.default_rng(5), np.random.default_rng(6))
    ]
    assert series[0] == series[1] != series[2]


@pytest.mark.parametrize("config", [GREEDY, EVERYTHING, GenerationConfig(do_sample=True)])
@pytest.mark.parametrize(
    "poison",
    [{3: np.nan}, {0: np.nan, 3: np.inf}, {3: np.inf}, dict.fromkeys(range(8), -np.inf)],
    ids=["nan", "nan and inf", "inf", "all -inf"],
)
def test_scores_that_are_no_numbers_are_refused_without_a_warning(
    config: GenerationConfig, poison: dict[int, float]
) -> None:  # hostile 50
    """numpy's own warnings are errors in this suite."""
    logits = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    for token, value in poison.items():
        logits[token] = value
    with pytest.raises(NumericalError, match="finite logits"):
        choose(logits, [0, 5], 0, config, np.random.default_rng(0))


def test_suppressing_every_token_is_refused() -> None:  # hostile 50
    config = GenerationConfig(suppress_tokens=tuple(range(4)))
    with pytest.raises(NumericalError, match="suppress_tokens"):
        choose(np.zeros(4, dtype=np.float32), [0], 0, config, np.random.default_rng(0))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 5e-324])
def test_the_smallest_temperature_is_greedy(temperature: float) -> None:
    """Dividing by it overflowed to infinity, and by a float32 zero to NaN."""  # hostile 41
    logits = np.array([1.0, 2.0, 1.999, -4.0], dtype=np.float32)
    config = GenerationConfig(do_sample=True, temperature=temperature)
    assert draws(logits, config, 50).tolist() == [0, 50, 0, 0]


def test_scores_are_never_changed_in_place() -> None:
    """They may be the buffer onnxruntime writes into, or the copy a fork shares."""
    logits = np.random.default_rng(2).normal(size=30).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = False
    tokens = [4, 5, 4]
    for config in (GREEDY, EVERYTHING):
        choose(logits, tokens, 1, config, np.random.default_rng(0))
        warped(processed(logits, tokens, 1, config), config)
    np.testing.assert_array_equal(logits, before)
