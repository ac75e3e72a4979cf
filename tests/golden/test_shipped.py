"""The shipped model's graph against its checkpoint in transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ortkv import Generator, inspect

from golden.reference import ROOT, SHIPPED, TOLERANCE, full_logits, greedy

ONNX = ROOT / "models" / "shakespeare-onnx"
STEPS = 200


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(ONNX)


@pytest.mark.parametrize("prompt", ["ROMEO:", "First Citizen:\nBefore we proceed"])
def test_200_greedy_tokens_and_their_logits_are_transformers(
    generator: Generator, prompt: str
) -> None:
    sequence = generator.start(prompt)
    num_prompt = len(sequence.tokens)
    scored = []
    for _ in range(STEPS):
        scored.append(sequence.logits)
        sequence.generate_ids(max_new_tokens=1)
    expected = full_logits(SHIPPED, sequence.tokens)[num_prompt - 1 : -1]
    np.testing.assert_allclose(np.array(scored), expected, rtol=0, atol=TOLERANCE)
    assert sequence.tokens[num_prompt:] == greedy(SHIPPED, sequence.tokens[:num_prompt], STEPS)


def test_rows_together_equal_rows_alone(generator: Generator) -> None:
    prompts = ["ROMEO:", "First Citizen:\nBefore we proceed", "K", "What light"]
    alone = [generator.generate(prompt, max_new_tokens=24) for prompt in prompts]
    assert generator.generate(prompts, max_new_tokens=24) == alone


def test_a_stream_joined_is_the_text_and_no_piece_splits_a_character(generator: Generator) -> None:
    pieces = list(generator.stream("JULIET:\n", max_new_tokens=60))
    assert "".join(pieces) == generator.generate("JULIET:\n", max_new_tokens=60)
    assert len(pieces) > 30
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_same_seed_draws_the_same_text(generator: Generator) -> None:
    settings = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 30}
    first = generator.generate("KING", seed=3, **settings)
    assert first == generator.generate("KING", seed=3, **settings)
    assert first != generator.generate("KING", seed=4, **settings)


def test_manifest_states_the_schema_and_every_file() -> None:
    manifest = json.loads((ONNX / "ortkv.json").read_text())
    assert manifest["schema"] == inspect(ONNX).to_dict()
    there = {p.name for p in ONNX.iterdir() if p.name != "ortkv.json"}
    assert set(manifest["files"]) == there
    for name, stated in manifest["files"].items():
        assert (ONNX / name).stat().st_size == stated["bytes"]
