"""A thousand corrupted schemas: verify rejects every one that changes any logit."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from ortkv.decoder import Decoder
from ortkv.errors import OrtkvError
from ortkv.loading import load_model
from ortkv.proof import verify_graph
from ortkv.proof.comparing import tolerance_of
from ortkv.proof.probe import with_probes

from graphs import Design, decoder
from verification.mutants import TOLD_APART, drawn, may_become

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from ortkv.decoder import LoadedGraph
    from ortkv.schema import CacheSchema

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NUM_MUTANTS = 1000
CPU_SECONDS = 60
GRAPHS = sorted(
    path.parent.name
    for name in ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
    for path in FIXTURES.glob(f"*/{name}")
)
DESIGNS = {
    "concat": Design(num_layers=3),
    "delta": Design(num_layers=3, update="delta"),
    "one head": Design(num_heads=1, layouts=("BHSD", "BSHD")),
    "square heads": Design(num_heads=4, head_dim=4, layouts=("BHDS", "BHSD")),
    "square, sequence last": Design(num_heads=4, head_dim=4, layouts=("BHDS", "BHDS")),
    "sequence first": Design(layouts=("BSHD", "BSHD")),
    "stacked key and value": Design(stacked="2"),
    "side by side": Design(stacked="2D", num_layers=3),
    "stacked layers": Design(stacked="L", num_layers=3),
    "all in one": Design(stacked="L2"),
    "merged": Design(merged=True),
    "shared buffer, from the mask": Design(attention="gqa_mask", head_dim=8),
    "shared buffer, from the shape": Design(attention="gqa_shape", head_dim=8),
}
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 11, 16)]


def run_through(graph: LoadedGraph) -> NDArray[np.float32]:
    """[runs, vocab_size]: the logits of a prefill, steps, a rewind and steps again."""
    sequence = Decoder(graph)
    logits = [sequence.prefill(TOKENS[:7]).copy()]
    logits += [sequence.step([token])[0].copy() for token in TOKENS[7:12]]
    sequence.cache.truncate(5)
    logits += [sequence.step([token])[0].copy() for token in TOKENS[12:]]
    return np.array(logits)


@dataclass
class Base:
    """A graph with its own schema, and what it answers."""

    graph: LoadedGraph
    logits: NDArray[np.float32]

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.graph, float(np.abs(self.logits).max()))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Base]:
    paths = [FIXTURES / name for name in GRAPHS]
    for design in DESIGNS.values():
        paths.append(tmp_path_factory.mktemp("design") / "model.onnx")
        onnx.save(decoder(design), paths[-1])
    graphs = [with_probes(load_model(path, threads=1).graph, 0) for path in paths]
    return [Base(graph=graph, logits=run_through(graph)) for graph in graphs]


def mutants(bases: list[Base]) -> Iterator[tuple[str, Base, LoadedGraph]]:
    random = Random(3)  # noqa: S311 - drawn, not secret
    for number in range(NUM_MUTANTS):
        base = bases[number % len(bases)]
        name, schema = drawn(base.graph.schema, random)
        yield name, base, replace(base.graph, schema=schema)


def outcome(base: Base, mutant: LoadedGraph) -> str:
    """Whether the mutant answers otherwise: 'refused', 'wrong' or 'same'."""
    try:
        found = run_through(mutant)
    except OrtkvError:
        return "refused"
    if found.shape != base.logits.shape:
        return "wrong"
    error = np.abs(found.astype(np.float64) - base.logits).max()
    return "same" if error <= base.tolerance else "wrong"


def is_rejected(mutant: LoadedGraph) -> bool:
    try:
        return not verify_graph(mutant).ok
    except OrtkvError:
        return True


def with_one_helper_of_another_kind(schema: CacheSchema) -> Iterator[CacheSchema]:
    for i, helper in enumerate(schema.helpers):
        for kind in TOLD_APART:
            if may_become(helper, kind):
                helpers = list(schema.helpers)
                helpers[i] = replace(helper, kind=kind)
                yield replace(schema, helpers=tuple(helpers))


def missed_by_verify(base: Base, mutant: LoadedGraph) -> tuple[str, bool]:
    """How the mutant comes out, and whether verify lets a changed answer pass."""
    found = outcome(base, mutant)
    return found, found != "same" and not is_rejected(mutant)


def test_every_mutant_that_changes_a_logit_is_rejected(bases: list[Base]) -> None:
    """Layers are labels, and some rules and axes come to the same: those are no faults."""
    start = time.process_time()
    counts: Counter[tuple[str, str]] = Counter()
    missed: list[str] = []
    for name, base, mutant in mutants(bases):
        found, is_missed = missed_by_verify(base, mutant)
        counts[name, found] += 1
        if is_missed:
            missed.append(f"{name} ({found}): {mutant.schema}")
    for (name, found), number in sorted(counts.items()):
        print(f"{name}: {number} {found}")  # shown by pytest -s, and where the test fails
    assert not missed, missed
    assert sum(counts.values()) == NUM_MUTANTS
    for name in ("pasts", "presents"):
        for where in ("a layer", "two layers"):
            swap = f"{name} of {where} swapped"
            assert counts[swap, "wrong"] > 50, "corrupted schemas must run, and answer wrongly"
            assert counts[swap, "same"] == 0
    assert time.process_time() - start < CPU_SECONDS


def test_a_helper_of_any_other_kind_is_rejected_where_it_changes_a_logit(
    bases: list[Base],
) -> None:
    """Every helper of every graph as every other kind: lengths off by one, by a run, constants."""
    changed = 0
    for base in bases:
        for schema in with_one_helper_of_another_kind(base.graph.schema):
            found, is_missed = missed_by_verify(base, replace(base.graph, schema=schema))
            assert not is_missed, (schema.helpers, found)
            changed += found != "same"
    assert changed > 100


def test_a_thousand_are_drawn_the_same_each_time(bases: list[Base]) -> None:
    first, again = ([m.schema for _, _, m in mutants(bases)] for _ in range(2))
    assert first == again
    assert len(set(first)) > NUM_MUTANTS // 2
