"""Every variant through the public API: logits at every step, rows, and verify with its mutants."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from ortkv import Generator
from ortkv.errors import OrtkvError
from ortkv.loading import load_model
from ortkv.proof import verify_graph

from conformance.test_schemas import DERIVED
from graph_reference import full_logits
from graphs import decoder

if TYPE_CHECKING:
    from pathlib import Path

    from graph_design import Design

TOKENS = [3, 1, 4, 1, 5, 9, 2]
ROWS = ([3, 1, 4, 1], [1, 5], [2, 6, 5])
TOLERANCE = 3e-5
"""Of the largest logit: fp32, in another order of summation than numpy's float64."""
NARROW_TOLERANCE = 5e-2
"""Of the largest logit: one rounding of each cached number to 8 to 11 bits, through two layers."""

RUNNABLE = {
    name: design
    for name, design in DERIVED.items()
    # Those want an encoder's output or an embedding graph beside them: tests/encoder_decoder.
    if not design.cross and "inputs_embeds" not in design.extras
}
PLAIN = [name for name in RUNNABLE if not name.endswith(("/secret", "/nameless"))]


def generator_of(folder: Path, design: Design) -> Generator:
    onnx.save(decoder(design), folder / "model.onnx")
    return Generator(folder / "model.onnx", threads=1, certify=False)


def is_exact(design: Design) -> bool:
    return design.cache_dtype == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("name", RUNNABLE)
def test_logits_of_every_step_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    """A prompt, single tokens, a rewind, and a twin that goes another way."""
    design = RUNNABLE[name]
    sequence = generator_of(tmp_path, design).start(TOKENS[:3])
    found = [sequence.logits]
    found += [sequence.extend([token]).logits for token in TOKENS[3:]]
    found.append(sequence.rewind(4).logits)
    found.append(sequence.fork().extend(TOKENS[4:6]).logits)
    expected = full_logits(design, TOKENS)
    tolerance = TOLERANCE if is_exact(design) else NARROW_TOLERANCE
    np.testing.assert_allclose(
        found, expected[[2, 3, 4, 5, 6, 3, 5]], rtol=0, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", [n for n in RUNNABLE if is_exact(RUNNABLE[n])])
def test_rows_of_one_batch_equal_rows_alone(name: str, tmp_path: Path) -> None:
    generator = generator_of(tmp_path, RUNNABLE[name])
    rows = [list(row) for row in ROWS]
    together = generator.generate_ids(rows, max_new_tokens=4)
    assert together == [generator.generate_ids([row], max_new_tokens=4)[0] for row in rows]


@pytest.mark.parametrize("name", PLAIN)
def test_verify_accepts_the_schema_and_rejects_every_crossed_pair(
    name: str, tmp_path: Path
) -> None:
    """K and V of a layer, two layers' keys, two layers' values, two layers' states."""
    onnx.save(decoder(RUNNABLE[name]), tmp_path / "model.onnx")
    graph = load_model(tmp_path / "model.onnx", threads=1).graph
    if graph.schema.fixed_query_len == 1:
        pytest.skip("a graph of one token a run has no full run to verify against")
    assert verify_graph(graph).ok
    entries = graph.schema.entries
    for i, j in itertools.combinations(range(len(entries)), 2):
        crossed = list(entries)
        crossed[i] = replace(entries[i], past=entries[j].past)
        crossed[j] = replace(entries[j], past=entries[i].past)
        wrong = replace(graph, schema=replace(graph.schema, entries=tuple(crossed)))
        try:
            assert not verify_graph(wrong).ok, (entries[i].past, entries[j].past)
        except OrtkvError:
            continue
