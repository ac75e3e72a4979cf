"""Real exports of encoder-decoders, and what transformers computes of their checkpoints."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ortkv

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
OF_TOKENS = ("t5-optimum", "t5-two-files", "bart-optimum", "marian-optimum")
OF_FEATURES = ("whisper-optimum", "whisper-mobius")
EXPORTS = (*OF_TOKENS, *OF_FEATURES, "t5-mobius")
WITHOUT_START = ("t5-mobius", "whisper-mobius")
"""Their JSON does not say where the decoder starts."""
TOLERANCE = 1e-4  # of logits of up to 5; two roundings apart are 2e-5, a misplaced token 0.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """transformers' answers for one source: logits [n, vocab_size] after each of the tokens."""

    source: Any
    tokens: list[int]
    logits: NDArray[np.float32]
    greedy: list[int]


@functools.cache
def generator(name: str) -> ortkv.Generator:
    return ortkv.Generator(FIXTURES / name, threads=1)


@functools.cache
def rows(name: str) -> list[Row]:
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        return [
            Row(
                source=arrays[f"source_{i}"]
                if name in OF_FEATURES
                else arrays[f"source_{i}"].tolist(),
                tokens=arrays[f"tokens_{i}"].tolist(),
                logits=arrays[f"logits_{i}"],
                greedy=arrays[f"greedy_{i}"].tolist(),
            )
            for i in range(2)
        ]
