"""Stacks x layouts x update rules, names random: schema, logits at every step, verify, mutants."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from ortkv import Generator
from ortkv.errors import ExecutionFailed
from ortkv.loading import load_model
from ortkv.verification import verify_graph

from graphs import Design, decoder, full_logits, layout_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 1e-4  # fp32 against float64 in numpy: a few 1e-6 of logits of up to 100
LAYOUTS = ("BHSD", "BSHD", "BHDS")
CASES = [
    (stacked, layouts, update)
    for stacked, layouts, update in itertools.product(
        ("", "2", "2D", "L", "L2"), itertools.product(LAYOUTS, LAYOUTS), ("concat", "delta")
    )
    # Key and value in one tensor have one layout; side by side they need head_dim last. Deltas
    # of stacks are stacks of deltas, which are not resolved yet.
    if (layouts[0] == layouts[1] or stacked in ("", "L"))
    and not (stacked == "2D" and layouts[0] == "BHDS")
    and not (stacked and update == "delta")
]


def random_names(seed: int) -> Callable[[str, int, str], str]:
    """Names that mean nothing, the same each time they are asked for."""
    known: dict[tuple[str, int, str], str] = {}
    source = random.Random(seed)  # noqa: S311

    def name(side: str, layer: int, role: str) -> str:
        letters = "".join(source.choices("abcdefghij", k=8))
        return known.setdefault((side, layer, role), f"{letters}{len(known)}")

    return name


def saved(folder: Path, design: Design) -> Path:
    onnx.save(decoder(design), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0] or 'single'}-{'-'.join(c[1])}-{c[2]}")
def design(request: pytest.FixtureRequest) -> Design:
    stacked, layouts, update = request.param
    return Design(
        num_layers=3,
        stacked=stacked,
        layouts=layouts,
        update=update,
        name=random_names(CASES.index(request.param)),
    )


def test_the_schema_is_the_designs(design: Design, tmp_path: Path) -> None:
    schema = Generator(saved(tmp_path, design)).schema
    expected = {
        (layer, role): layout_of(design, role).replace("d", "(2D)")
        for layer, role in [(e.layer, e.role) for e in schema.entries]
    }
    for entry in schema.entries:
        assert entry.layout == expected[entry.layer, entry.role]
        assert entry.past == design.name("past", entry.layer, entry.role)
        assert entry.present == design.name("present", entry.layer, entry.role)
        assert entry.update == design.update
        assert (entry.num_kv_heads, entry.head_dim) == (design.num_heads, design.head_dim)
        assert "topology" in entry.evidence
    assert schema.num_layers == design.num_layers


def test_logits_of_every_step_are_those_of_numpy(design: Design, tmp_path: Path) -> None:
    sequence = Generator(saved(tmp_path, design)).start([3, 1, 4, 1, 5])
    scored = []
    for token in (9, 2, 6, 5, 3):
        scored.append(sequence.logits)
        sequence.extend([token])
    sequence.rewind(7)
    scored.append(sequence.logits)
    expected = full_logits(design, [3, 1, 4, 1, 5, 9, 2, 6, 5])
    np.testing.assert_allclose(scored, expected[[4, 5, 6, 7, 8, 6]], rtol=0, atol=TOLERANCE)


def test_rows_of_one_batch_equal_rows_alone(design: Design, tmp_path: Path) -> None:
    generator = Generator(saved(tmp_path, design))
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6], [7]]
    together = generator.generate_ids(prompts, max_new_tokens=6)
    assert together == [generator.generate_ids([p], max_new_tokens=6)[0] for p in prompts]


def test_the_cached_tokens_are_the_same_in_every_layout(design: Design, tmp_path: Path) -> None:
    """Canonical views against those of the plain graph of the same weights."""
    tokens = [3, 1, 4, 1, 5]
    (tmp_path / "plain").mkdir()
    plain = Generator(saved(tmp_path / "plain", Design(num_layers=3))).start(tokens)
    expected = {(e.layer, e.role): plain.cache.tensor(e) for e in plain.cache.schema.entries}
    sequence = Generator(saved(tmp_path, design)).start(tokens[:2]).extend(tokens[2:])
    for entry in sequence.cache.schema.entries:
        layers = range(entry.num_layers) if entry.num_layers > 1 else [entry.layer]
        roles = ["key", "value"] if entry.role == "key_value" else [entry.role]
        wanted = np.stack([np.stack([expected[layer, role] for role in roles]) for layer in layers])
        found = sequence.cache.tensor(entry).reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_verify_accepts_the_schema_and_rejects_every_crossed_pair(
    design: Design, tmp_path: Path
) -> None:
    graph = load_model(saved(tmp_path, design)).graph
    assert verify_graph(graph).ok
    entries = graph.schema.entries
    for i, j in itertools.combinations(range(len(entries)), 2):
        crossed = list(entries)
        crossed[i] = replace(entries[i], past=entries[j].past)
        crossed[j] = replace(entries[j], past=entries[i].past)
        wrong = replace(graph, schema=replace(graph.schema, entries=tuple(crossed)))
        try:
            assert not verify_graph(wrong).ok, (i, j)
        except ExecutionFailed:
            assert entries[i].layout != entries[j].layout


@pytest.mark.parametrize("stacked", ["", "2", "2D", "L", "L2"])
@pytest.mark.parametrize("dtype", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_a_cache_of_half_precision_is_kept_in_it(stacked: str, dtype: int, tmp_path: Path) -> None:
    """fp32 arithmetic over a cache in fp16 or bf16, cast on the way in and out."""
    design = Design(num_layers=3, stacked=stacked, cache_dtype=dtype, name=random_names(dtype))
    path = saved(tmp_path, design)
    schema = Generator(path).schema
    stated = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
    assert {stated[entry.dtype] for entry in schema.entries} == {dtype}
    sequence = Generator(path).start([3, 1, 4, 1, 5]).extend([9]).extend([2, 6]).rewind(7)
    expected = full_logits(design, [3, 1, 4, 1, 5, 9, 2])[-1]
    # One rounding of each cached number, 5e-4 or 4e-3 of it, through three layers that grow it.
    tolerance = 2e-2 if dtype == onnx.TensorProto.FLOAT16 else 2e-1
    np.testing.assert_allclose(
        sequence.logits, expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )
    assert verify_graph(load_model(path).graph).ok
