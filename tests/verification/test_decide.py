"""Of several schemas of one session, the graph itself says which is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from ortkv.errors import UnsupportedModel
from ortkv.loading import load_model
from ortkv.proof import QuickReport, decide
from ortkv.proof.candidates import MARGIN

from graphs import Design, decoder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
GRAPHS = ["llama-optimum", "gpt2-merged", "llama-genai", "gpt2-two-files", "qwen3-optimum"]


def crossed(graph, i: int, j: int):
    """Two entries' pasts for each other: all shapes fit."""
    entries = list(graph.schema.entries)
    entries[i] = replace(entries[i], past=graph.schema.entries[j].past)
    entries[j] = replace(entries[j], past=graph.schema.entries[i].past)
    return replace(graph, schema=replace(graph.schema, entries=tuple(entries)))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("i", "j"), [(0, 1), (0, 2), (1, 3)])
def test_the_right_schema_is_taken_wherever_it_stands(name: str, i: int, j: int) -> None:
    right = load_model(FIXTURES / name).graph
    wrong = crossed(right, i, j)
    assert decide([right, wrong]).index == 0
    decision = decide([wrong, right])
    assert decision.index == 1
    rejected, taken = decision.outcomes
    assert isinstance(taken, QuickReport)
    assert taken.ok
    if isinstance(rejected, QuickReport):
        assert rejected.max_abs_error > MARGIN * rejected.tolerance
    assert "candidate 0" in str(decision)


def test_one_that_does_not_even_run_is_wrong(tmp_path: Path) -> None:
    """Of two layouts, one does not fit the graph."""
    onnx.save(decoder(Design(layouts=("BHSD", "BSHD"))), tmp_path / "model.onnx")
    right = load_model(tmp_path).graph
    entries = tuple(
        replace(e, layout=e.layout.translate({72: 83, 83: 72})) for e in right.schema.entries
    )
    wrong = replace(right, schema=replace(right.schema, entries=entries))
    assert decide([wrong, right]).index == 1


def test_none_right_or_several_is_an_error_that_shows_them() -> None:
    right = load_model(FIXTURES / "llama-optimum").graph
    wrong = [crossed(right, 0, 1), crossed(right, 0, 2)]
    with pytest.raises(UnsupportedModel, match=r"candidate 0: .*candidate 1: .*--kv-map"):
        decide(wrong)
    with pytest.raises(UnsupportedModel, match="does not tell which is right"):
        decide([right, right])


def test_wrong_by_too_little_is_an_error(tmp_path: Path) -> None:
    """Where both layers are the same, their caches differ by little: no decision by luck."""
    model = decoder(Design(head_dim=4))
    for tensor in model.graph.initializer:
        if tensor.name.startswith(("wk_", "wv_")):
            scale = 1e-6 if tensor.name.startswith("wv_") else 1.0
            array = onnx.numpy_helper.to_array(tensor) * scale
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    right = load_model(tmp_path).graph
    with pytest.raises(UnsupportedModel, match="does not tell which is right"):
        decide([right, crossed(right, 0, 2)])
