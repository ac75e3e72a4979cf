"""Real exporters' graphs of tiny random models: logits at every step against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from ortkv import Generator
from ortkv.cache import Cache
from ortkv.decoder import Decoder
from ortkv.loading import load_model

from golden.reference import FIXTURES, TOLERANCE, full_logits, greedy

STEPS = 32
PROMPTS = [[5, 17, 42, 99, 3, 8, 61], [7], [90, 14, 14, 2], [33, 150, 71, 20, 6, 11, 54, 9, 1, 12]]
GRAPHS = {
    "llama-optimum": "llama",
    "gpt2-optimum": "gpt2",
    "qwen2-optimum": "qwen2",
    "qwen3-optimum": "qwen3",
    "llama-genai": "llama",
    "gpt2-ort": "gpt2",
    "gpt2-ort-fused": "gpt2",
    "llama-merged": "llama",
    "gpt2-merged": "gpt2",
    "oldllama-merged": "oldllama",
    "gpt2-two-files": "gpt2",
    "llama-tf5": "llama",
}
IDS = list(GRAPHS)
ONE_LENGTH_A_RUN = {"gpt2-merged", "gpt2-two-files", "oldllama-merged"}
"""No position_ids: it counts positions from the past's length, padding included. Its rows of
unequal length must run one after the other."""


@pytest.mark.parametrize("graph", IDS)
def test_logits_at_every_step_are_transformers(graph: str) -> None:
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    sequence = Generator(FIXTURES / graph).start(PROMPTS[0])
    scored = []
    for _ in range(STEPS):
        scored.append(sequence.logits)
        sequence.extend([int(sequence.logits.argmax())])
    expected = full_logits(checkpoint, sequence.tokens)[len(PROMPTS[0]) - 1 : -1]
    np.testing.assert_allclose(np.array(scored), expected, rtol=0, atol=TOLERANCE)
    assert sequence.tokens[len(PROMPTS[0]) :] == greedy(checkpoint, PROMPTS[0], STEPS)


@pytest.mark.parametrize("graph", [graph for graph in IDS if graph not in ONE_LENGTH_A_RUN])
def test_ragged_rows_together_have_the_logits_of_transformers(graph: str) -> None:
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    model = load_model(FIXTURES / graph)
    alone = [Decoder(model.graph) for _ in PROMPTS]
    logits = np.array(
        [decoder.prefill(prompt).copy() for decoder, prompt in zip(alone, PROMPTS, strict=True)]
    )
    together = Decoder(model.graph, Cache.joined([decoder.cache for decoder in alone]))
    tokens = [list(prompt) for prompt in PROMPTS]
    scored = []
    for _ in range(STEPS):
        scored.append(logits.copy())
        chosen = [int(row.argmax()) for row in logits]
        for row, token in zip(tokens, chosen, strict=True):
            row.append(token)
        logits = together.step(chosen)
    for i, prompt in enumerate(PROMPTS):
        expected = full_logits(checkpoint, tokens[i])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(np.array(scored)[:, i], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("graph", IDS)
def test_greedy_tokens_of_a_ragged_batch_are_those_of_generate(graph: str) -> None:
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    generator = Generator(FIXTURES / graph)
    assert generator.schema.takes_ragged_rows == (graph not in ONE_LENGTH_A_RUN)
    rows = generator.generate_ids(PROMPTS, max_new_tokens=STEPS, eos_token_id=None)
    assert rows == [greedy(checkpoint, prompt, STEPS) for prompt in PROMPTS]


@pytest.mark.parametrize("graph", IDS)
def test_a_prompt_in_two_parts_scores_as_in_one(graph: str) -> None:
    """Several new tokens over a cache that is not empty: what extend and chunked prefill do."""
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    sequence = Generator(FIXTURES / graph).start(PROMPTS[3][:4]).extend(PROMPTS[3][4:])
    expected = full_logits(checkpoint, PROMPTS[3])[-1]
    np.testing.assert_allclose(sequence.logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("graph", IDS)
def test_every_entry_is_resolved_by_topology(graph: str) -> None:
    """Names may lie; these graphs all say by their wiring what their cache is."""
    for entry in Generator(FIXTURES / graph).schema.entries:
        assert "topology" in entry.evidence, entry
        assert entry.update == ("in_place" if "genai" in graph else "concat")


def test_a_merged_graph_traced_with_one_token_takes_one_a_step() -> None:
    """Optimum's Llama of 2023: several new tokens over a past would see each other's future.

    Nothing but its presents' dims ("past + 1") says so.
    """
    assert load_model(FIXTURES / "oldllama-merged").graph.schema.one_token_steps
    assert not load_model(FIXTURES / "llama-merged").graph.schema.one_token_steps
