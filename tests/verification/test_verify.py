"""verify accepts every real graph and rejects every planted fault."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import ortkv
import pytest
from ortkv.errors import ExecutionFailed, UnsupportedModel
from ortkv.loading import load_model
from ortkv.verification import verify_graph

if TYPE_CHECKING:
    from ortkv.decoder import LoadedGraph

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
GRAPHS = sorted(
    path.parent.name
    for name in ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
    for path in FIXTURES.glob(f"*/{name}")
)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_real_graph_is_verified(name: str) -> None:
    report = ortkv.verify(FIXTURES / name)
    assert report.ok
    assert report.max_abs_error <= report.tolerance
    assert report.greedy_agreement == 1.0
    assert len(report.checks) + len(report.skipped) == 5


def rejects(graph: LoadedGraph) -> bool:
    """Whether verify finds fault; a refusal is a fault found."""
    try:
        return not verify_graph(graph).ok
    except (ExecutionFailed, UnsupportedModel):
        return True


def _with_pasts_swapped(graph: LoadedGraph, i: int, j: int) -> LoadedGraph:
    entries = list(graph.schema.entries)
    first, second = entries[i].past, entries[j].past
    entries[i], entries[j] = replace(entries[i], past=second), replace(entries[j], past=first)
    return replace(graph, schema=replace(graph.schema, entries=tuple(entries)))


@pytest.mark.parametrize("name", GRAPHS)
def test_every_crossed_pair_of_entries_is_rejected(name: str) -> None:
    """K with V of a layer, two layers' keys, two layers' values: all shapes fit, all are wrong."""
    graph = load_model(FIXTURES / name).graph
    for i, j in combinations(range(len(graph.schema.entries)), 2):
        assert rejects(_with_pasts_swapped(graph, i, j)), (i, j)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_helper_left_to_the_wrong_rule_is_rejected(name: str) -> None:
    """One position for all tokens of a run: right for a step, wrong for a prompt."""
    graph = load_model(FIXTURES / name).graph
    positions = [h for h in graph.schema.helpers if h.kind == "positions"]
    if not positions:
        pytest.skip("this graph has no position_ids")
    frozen = tuple(
        replace(h, kind="past_length") if h in positions else h for h in graph.schema.helpers
    )
    wrong = replace(graph, schema=replace(graph.schema, helpers=frozen))
    assert rejects(wrong)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_int4_weights_are_verified_within_their_own_tolerance(tmp_path: Path) -> None:
    """Their kernel rounds one row and several differently; a crossed pair is still found."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(FIXTURES / "llama-optimum" / "model.onnx")
    quantizer = MatMulNBitsQuantizer(model, block_size=16, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, tmp_path / "model.onnx")  # pyright: ignore[reportAttributeAccessIssue]
    graph = load_model(tmp_path).graph
    assert graph.schema.quantized
    report = verify_graph(graph)
    assert report.ok
    assert (
        report.tolerance
        > 100 * verify_graph(load_model(FIXTURES / "llama-optimum").graph).tolerance
    )
    for i, j in combinations(range(len(graph.schema.entries)), 2):
        assert rejects(_with_pasts_swapped(graph, i, j))


def test_the_command_prints_numbers_and_exits_by_the_verdict() -> None:
    command = [sys.executable, "-m", "ortkv", "verify", str(FIXTURES / "llama-genai")]
    result = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert {check["name"] for check in document["checks"]} == {
        "prefill and steps", "chunked prefill", "rewind", "equal rows", "ragged rows",
    }  # fmt: skip
    table = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "ok (tolerance" in table.stdout
