"""Where verify fails, it says at which layer the cached tokens part ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ortkv.loading import load_model
from ortkv.verification import by_layer, verify_graph

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def test_the_first_layer_that_differs_is_the_one_at_fault() -> None:
    """Layer 1's key and value crossed: layer 0's tokens are the same either way."""
    graph = load_model(FIXTURES / "llama-optimum").graph
    entries = list(graph.schema.entries)
    key, value = (
        next(e for e in entries if e.layer == 1 and e.role == r) for r in ("key", "value")
    )
    for old, past in ((key, value.past), (value, key.past)):
        entries[entries.index(old)] = replace(old, past=past)
    wrong = replace(graph, schema=replace(graph.schema, entries=tuple(entries)))
    report = verify_graph(wrong)
    assert not report.ok
    lines = by_layer(report).splitlines()
    assert len(lines) == 1 + graph.schema.num_layers
    largest = {
        layer: max(e.max_abs_error for e in report.entries if e.layer == layer)
        for layer in range(graph.schema.num_layers)
    }
    for layer, line in enumerate(lines[1:]):
        assert line.startswith(f"  layer {layer}: key ")
        assert f"{largest[layer]:.2e}" in line
    assert largest[0] <= report.tolerance
    assert largest[1] > 100 * report.tolerance
    sound = verify_graph(graph)
    assert all(entry.max_abs_error < sound.tolerance for entry in sound.entries)
