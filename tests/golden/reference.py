"""The independent answer: the checkpoint in transformers, fp32, computed in full."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHIPPED = ROOT / "models" / "shakespeare"

TOLERANCE = 1e-4
"""Of a logit, fp32 on both sides: other orders of summation over a few layers differ by some
1e-6 of the largest logits (about 10 here); a misplaced cache entry by 1e-2 and more."""


@functools.cache
def reference(checkpoint: Path) -> Any:
    """The checkpoint as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def full_logits(checkpoint: Path, tokens: list[int]) -> NDArray[np.float32]:
    """[len(tokens), vocab_size]: one run over all tokens, no cache."""
    with torch.no_grad():
        return reference(checkpoint)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def greedy(checkpoint: Path, prompt: list[int], num_new: int) -> list[int]:
    """New tokens of transformers' own greedy ``generate``, run to their full number."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference(checkpoint).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
