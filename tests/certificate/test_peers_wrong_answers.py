"""Ways in which other engines return wrong answers without an error; here each is right.

The engines' faults were measured on the same kinds of graphs (D1 to D5: tokens appended after an
unfinished turn, a prompt that ends in the pad id, attended padding, rows of unequal length on a
graph without lengths, a cache put back by hand). The answer is transformers' own, at logits; and
each test shows that the fault would have moved them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from ortkv import Generator
from ortkv.cache import Cache
from ortkv.decoder import Decoder
from ortkv.loading import load_model
from ortkv.sequence import decode

import graphs as designs
from golden.reference import FIXTURES, ROOT, SHIPPED, TOLERANCE, full_logits

if TYPE_CHECKING:
    from pathlib import Path

GRAPHS = {
    "llama-optimum": "llama",
    "gpt2-optimum": "gpt2",
    "qwen3-optimum": "qwen3",
    "llama-genai": "llama",
    "gpt2-ort-fused": "gpt2",
    "llama-merged": "llama",
    "gpt2-merged": "gpt2",
    "gpt2-two-files": "gpt2",
    "oldllama-merged": "oldllama",
}
WITHOUT_LENGTHS = ["gpt2-merged", "gpt2-two-files", "oldllama-merged"]
WITH_LENGTHS = [name for name in GRAPHS if name not in WITHOUT_LENGTHS]
PAD = 0
FAR = 100 * TOLERANCE


def assert_logits(found: object, expected: object) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=TOLERANCE)


def differ(one: object, other: object) -> bool:
    return float(np.abs(np.array(one) - np.array(other)).max()) > FAR


@functools.cache
def loaded(graph: str) -> Generator:
    return Generator(FIXTURES / graph)


def assert_greedy(generator: Generator, checkpoint: Path, prompts: list[list[int]]) -> None:
    """Rows run together: every new token is transformers' likeliest, and so are the last logits."""
    sequences = [generator.start(prompt) for prompt in prompts]
    settings = generator.defaults.updated(max_new_tokens=6, do_sample=False, eos_token_id=None)
    for _ in decode(sequences, settings, text=False):
        pass
    for sequence, prompt in zip(sequences, prompts, strict=True):
        expected = full_logits(checkpoint, sequence.tokens)
        assert sequence.tokens[len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert_logits(sequence.logits, expected[-1])


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> str:
    return request.param


def test_d1_tokens_after_a_turn_that_did_not_end(graph: str) -> None:
    """A turn ended by its length leaves its last token unrun: it must not be lost."""
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    sequence = loaded(graph).start([5, 17, 42, 99])
    scored: dict[int, np.ndarray] = {}
    before, more = sequence.tokens, [0]
    for more in ([61, 7], [3], [90, 14, 14]):
        sequence.generate_ids(max_new_tokens=3, eos_token_id=None)
        assert sequence.finish_reason == "length"
        before = sequence.tokens
        sequence.extend(more)
        assert sequence.tokens == before + more
        scored[len(sequence.tokens) - 1] = sequence.logits
    expected = full_logits(checkpoint, sequence.tokens)
    for position, logits in scored.items():
        assert_logits(logits, expected[position])
    assert differ(full_logits(checkpoint, before[:-1] + more)[-1], expected[-1])


def test_d1_text_after_a_stream_that_the_user_broke_off() -> None:
    sequence = Generator(ROOT / "models" / "shakespeare-onnx").start("ROMEO:")
    for pieces, _ in enumerate(sequence.stream(max_new_tokens=50)):
        if pieces == 5:
            break
    before = sequence.tokens
    sequence.extend("\nJULIET:")
    more = sequence.tokens[len(before) :]
    expected = full_logits(SHIPPED, sequence.tokens)[-1]
    assert_logits(sequence.logits, expected)
    assert differ(full_logits(SHIPPED, before[:-1] + more)[-1], expected)


def test_d2_a_prompt_that_ends_in_the_pad_id(graph: str) -> None:
    """What the user wrote is no padding, alone or beside a longer row."""
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    generator = loaded(graph)
    eos = generator.defaults.eos_token_id
    for pad in {PAD, *eos}:
        prompt = [5, 17, pad, pad]
        expected = full_logits(checkpoint, prompt)[-1]
        assert_logits(generator.start(prompt).logits, expected)
        assert differ(full_logits(checkpoint, prompt[:2])[-1], expected)
        assert_greedy(generator, checkpoint, [prompt, [7, 8, 9, 10, 11, 12], [pad, 3]])


@pytest.mark.parametrize("graph", WITH_LENGTHS)
@pytest.mark.parametrize("rows", [([7], [5, 17, 42, 99, 3]), ([90, PAD], [5] * 9, [PAD] * 4)])
def test_d3_the_padding_of_a_shorter_row_is_never_attended(
    graph: str, rows: tuple[list[int], ...]
) -> None:
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    model = load_model(FIXTURES / graph)
    alone = [Decoder(model.graph) for _ in rows]
    for decoder, row in zip(alone, rows, strict=True):
        decoder.prefill(row)
    together = Decoder(model.graph, Cache.joined([decoder.cache for decoder in alone]))
    longest = max(map(len, rows))
    tokens = [list(row) for row in rows]
    scored = []
    for step in range(6):
        for i, row in enumerate(tokens):
            row.append(20 + 7 * i + step)
        scored.append(together.step([row[-1] for row in tokens]).copy())
    expected = [full_logits(checkpoint, row)[-6:] for row in tokens]
    assert_logits(scored, np.stack(expected, axis=1))
    padded = [PAD] * (longest - len(rows[0])) + tokens[0]
    assert differ(full_logits(checkpoint, padded)[-1], expected[0][-1])


@pytest.mark.parametrize("graph", WITHOUT_LENGTHS)
def test_d4_rows_of_unequal_length_where_the_graph_knows_no_lengths(graph: str) -> None:
    """They run one after the other; rows of equal length still share their runs."""
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    generator = loaded(graph)
    assert not generator.schema.takes_ragged_rows
    prompts = [[5, 17, 42, 99, 3], [7, 8], [90, 14, 61, 2, 2]]
    assert_greedy(generator, checkpoint, prompts)
    # Without positions and lengths the padded row's answer would be another one.
    padded = [PAD] * 3 + prompts[1]
    assert differ(full_logits(checkpoint, padded)[-1], full_logits(checkpoint, prompts[1])[-1])


def test_d4_a_fused_attention_that_counts_by_the_pasts_shape(tmp_path) -> None:
    """GroupQueryAttention with its lengths from the past's own shape, against numpy."""
    design = designs.Design(attention="gqa_shape", head_dim=8)
    onnx.save(designs.decoder(design), tmp_path / "model.onnx")
    generator = Generator(tmp_path)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8]]
    sequences = [generator.start(prompt) for prompt in prompts]
    settings = generator.defaults.updated(max_new_tokens=5, eos_token_id=None)
    for _ in decode(sequences, settings, text=False):
        pass
    for sequence in sequences:
        assert_logits(sequence.logits, designs.full_logits(design, sequence.tokens)[-1])


def test_d5_a_cache_carried_into_another_decoder_answers_at_every_step(graph: str) -> None:
    """One peer's first token was right after that, and every later one wrong."""
    checkpoint = FIXTURES / "checkpoints" / GRAPHS[graph]
    model = load_model(FIXTURES / graph)
    first = Decoder(model.graph)
    tokens = [5, 17, 42, 99, 3]
    first.prefill(tokens)
    carried = Decoder(model.graph, Cache.joined([first.cache]))
    first.step([1])  # the one it came from goes its own way
    del first
    more = [61, 7, 90, 14, 33, 150]
    scored = [carried.step([token])[0].copy() for token in more]
    assert_logits(scored, full_logits(checkpoint, tokens + more)[-len(more) :])
