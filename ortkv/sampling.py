"""Logits processors and the choice of a token: pure numpy, each a function.

Order and meaning are those of transformers 5, generation/logits_process.py: a token has the
same probability in both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ortkv.errors import NumericalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ortkv.generation_config import GenerationConfig

_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def choose(
    logits: NDArray[np.float32],
    tokens: Sequence[int],
    num_new: int,
    config: GenerationConfig,
    random: np.random.Generator,
) -> int:
    """The next token of one sequence.

    logits: [vocab_size] float32, not changed.   tokens: the sequence so far.
    num_new: how many of them were generated.

    Raises: NumericalError where the scores hold NaN or infinity, or leave no token.
    """
    scores = processed(logits, tokens, num_new, config)
    best = int(np.argmax(scores))
    if not math.isfinite(scores[best]):
        raise NumericalError(
            f"the best score is {scores[best]} at token {best}: expected finite logits with at "
            "least one token allowed. Try the model in fp32, or lift suppress_tokens."
        )
    if not config.do_sample:
        return best
    # The best score at zero: however small the temperature, it does not overflow.
    return _draw(warped(scores - scores[best], config), random)


def processed(
    logits: NDArray[np.float32], tokens: Sequence[int], num_new: int, config: GenerationConfig
) -> NDArray[np.float32]:
    """Scores after what applies to greedy and sampled choice alike.

    Aliases: ``logits`` itself where nothing applies.
    """
    scores = logits
    if config.repetition_penalty != 1.0:
        scores = _penalize_repetition(scores, tokens, config.repetition_penalty)
    if config.no_repeat_ngram_size:
        scores = _without(scores, _repeating(tokens, config.no_repeat_ngram_size))
    if num_new < config.min_new_tokens:
        scores = _without(scores, config.eos_token_id)
    if config.suppress_tokens:
        scores = _without(scores, config.suppress_tokens)
    return scores


def warped(scores: NDArray[np.float32], config: GenerationConfig) -> NDArray[np.float32]:
    """Scores after temperature and truncation; a token out of the draw has -inf."""
    if config.temperature != 1.0:
        with np.errstate(over="ignore"):
            scores = scores / np.float32(max(config.temperature, _LEAST_TEMPERATURE))
    if 0 < config.top_k < scores.size:
        scores = _top_k(scores, config.top_k)
    if config.top_p < 1.0:
        scores = _top_p(scores, config.top_p)
    if config.min_p > 0.0:
        scores = _min_p(scores, config.min_p)
    if config.typical_p < 1.0:
        scores = _typical(scores, config.typical_p)
    return scores


def _penalize_repetition(
    scores: NDArray[np.float32], tokens: Sequence[int], penalty: float
) -> NDArray[np.float32]:
    """Divide positive and multiply negative scores of tokens seen (Keskar et al. 2019, CTRL)."""
    seen = np.unique(np.asarray(tokens, dtype=np.int64))
    old = scores[seen]
    scores = scores.copy()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scores[seen] = np.where(old < 0, old * penalty, old / penalty)
    return scores


def _repeating(tokens: Sequence[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram of ``size`` that is already there."""
    if len(tokens) < size:
        return []
    ending = list(tokens[len(tokens) - size + 1 :])
    return [
        tokens[i + size - 1]
        for i in range(len(tokens) - size + 1)
        if list(tokens[i : i + size - 1]) == ending
    ]


def _without(scores: NDArray[np.float32], banned: Sequence[int]) -> NDArray[np.float32]:
    inside = [token for token in banned if token < scores.size]
    if not inside:
        return scores
    scores = scores.copy()
    scores[inside] = -np.inf
    return scores


def _top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    threshold = np.partition(scores, -k)[-k]
    return np.where(scores < threshold, np.float32(-np.inf), scores)


def _top_p(scores: NDArray[np.float32], top_p: float) -> NDArray[np.float32]:
    """The smallest set of likeliest tokens that holds ``top_p`` (Holtzman et al. 2019)."""
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(softmax(scores[order]))
    removed = order[below <= 1.0 - top_p]
    return _without(scores, removed[removed != order[-1]].tolist())


def _min_p(scores: NDArray[np.float32], min_p: float) -> NDArray[np.float32]:
    probabilities = softmax(scores)
    floor = min_p * probabilities.max()
    return np.where(probabilities < floor, np.float32(-np.inf), scores)


def _typical(scores: NDArray[np.float32], mass: float) -> NDArray[np.float32]:
    """Tokens whose surprise is nearest the entropy (Meister et al. 2022)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        probabilities = softmax(scores)
        surprise = -np.log(probabilities)
        entropy = np.nansum(probabilities * surprise)
        distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    last = int(np.searchsorted(np.cumsum(probabilities[order]), mass))
    farthest = distance[order[min(last, scores.size - 1)]]
    return np.where(distance > farthest, np.float32(-np.inf), scores)


def softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities of scores along their one axis."""
    shifted = np.exp(scores - scores.max())
    return shifted / shifted.sum()


def _draw(scores: NDArray[np.float32], random: np.random.Generator) -> int:
    """One token by its probability, from one uniform number."""
    total = np.cumsum(softmax(scores), dtype=np.float64)
    drawn = np.searchsorted(total, random.random() * float(total[-1]), side="right")
    return min(int(drawn), scores.size - 1)
