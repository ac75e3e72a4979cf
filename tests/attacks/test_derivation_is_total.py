"""A graph from a stranger is derived or refused in words, whatever is wrong with it.

# hostile 27, 28.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import helper
from ortkv.errors import OrtkvError, UnsupportedModel
from ortkv.schema import CacheSchema, derive
from ortkv.signature import read_model, signature_of

from attacks.damage import KINDS, damaged, seeded
from conformance_cases import CASES
from graphs import Design, decoder

FIXTURES = sorted((Path(__file__).resolve().parents[1] / "fixtures").glob("*/*model*.onnx"))
MOST_CHARACTERS = 1000
INFO = helper.make_tensor_value_info


def schema_of(model: onnx.ModelProto) -> CacheSchema:
    return derive(signature_of(model), model)


def outcomes(models: list[onnx.ModelProto], count: int, seed: int) -> Counter[str]:
    """Of damaged copies: whatever but an error of ortkv's own comes up fails the test."""
    found, longest = Counter[str](), 0
    for turn in range(count):
        broken, kinds = damaged(models[turn % len(models)], seeded(f"{seed} {turn}"))
        try:
            schema_of(broken)
            found["derived"] += 1
        except OrtkvError as error:
            found["refused"] += 1
            longest = max(longest, len(str(error)))
        except Exception as error:
            error.add_note(f"damage {turn}: {', '.join(kinds)}")
            raise
    assert longest < MOST_CHARACTERS
    return found


def test_damaged_graphs_are_derived_or_refused() -> None:
    names = seeded(3).sample(sorted(CASES), 60)
    found = outcomes([decoder(CASES[name]) for name in names], 1200, seed=3)
    assert min(found["derived"], found["refused"]) > 300, found


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_damaged_exports_are_derived_or_refused(path: Path) -> None:
    outcomes([read_model(path)], 25, seed=4)


def test_every_kind_of_damage_changes_a_graph() -> None:
    """Else the tests above would test the undamaged."""
    model = decoder(Design(merged=True))
    for kind in KINDS:
        results = []
        for seed in range(12):
            broken = onnx.ModelProto()
            broken.CopyFrom(model)
            kind(broken, seeded(seed))
            results.append(broken != model)
        assert any(results), kind.__name__


def chain(op: str, count: int) -> onnx.ModelProto:
    """A sound decoder, and a chain of ops, each on its predecessor twice, on its past's shape."""
    model = decoder(Design(num_layers=1))
    past = "past_key_values.0.key"
    nodes = [helper.make_node("Shape", [past], ["c0"])]
    nodes += [helper.make_node(op, [f"c{i}"] * 2, [f"c{i + 1}"]) for i in range(count)]
    model.graph.node.extend(nodes)
    return model


def test_a_long_chain_needs_no_recursion() -> None:
    past = "past_key_values.0.key"
    model = decoder(Design(num_layers=1))
    nodes = [helper.make_node("Identity", [f"i{i}" if i else past], [f"i{i + 1}"])
             for i in range(10_000)]  # fmt: skip
    user = next(n for n in model.graph.node if past in n.input)
    user.input[:] = [f"i{len(nodes)}" if name == past else name for name in user.input]
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])
    assert schema_of(model).entries == schema_of(decoder(Design(num_layers=1))).entries


@pytest.mark.parametrize("op", ["Add", "Mul", "Gather", "Concat"])
def test_sizes_that_double_with_every_op_stay_bounded(op: str) -> None:
    """Of 200 squarings, the last would have 2^200 factors."""
    assert schema_of(chain(op, 200)).entries


def test_numbers_in_diamonds_are_walked_once() -> None:
    """40 ops that take one wire twice make 2^40 ways through them."""
    model = decoder(Design(num_layers=1))
    model.graph.input.append(INFO("past_length", 7, []))
    nodes = [helper.make_node("Reshape", [f"d{i}" if i else "past_length"] * 2, [f"d{i + 1}"])
             for i in range(40)]  # fmt: skip
    model.graph.node.extend([*nodes, helper.make_node("Identity", ["d40"], ["unread"])])
    assert len(schema_of(model).entries) == 2


def test_a_graph_in_a_circle_is_refused() -> None:
    model = decoder(Design())
    first = next(n for n in model.graph.node if n.op_type == "MatMul")
    first.input[0] = model.graph.node[-1].output[0]
    with pytest.raises(UnsupportedModel, match="goes in a circle"):
        schema_of(model)


def test_a_circle_through_a_branch_is_refused() -> None:
    model = decoder(Design(merged=True))
    outer = model.graph.node[0]
    inner = outer.attribute[0].g.node[0]
    inner.input[0] = outer.output[0]
    with pytest.raises(UnsupportedModel, match="goes in a circle"):
        schema_of(model)


@pytest.mark.parametrize("merged", [False, True])
def test_nodes_in_another_order_are_sorted(merged: bool) -> None:
    """onnxruntime sorts them too."""
    model = decoder(Design(merged=merged))
    nodes = model.graph.node[0].attribute[0].g.node if merged else model.graph.node
    mixed = seeded(1).sample(list(nodes), len(nodes))
    expected = schema_of(model).to_dict()
    del nodes[:]
    nodes.extend(mixed)
    assert schema_of(model).to_dict() == expected


def functions(count: int, *, recursive: bool = False) -> onnx.ModelProto:
    """Functions that each call the one before them twice."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    made = []
    for i in range(count):
        called, domain = (f"f{i - 1}", "local") if i or recursive else ("Identity", "")
        called = "f0" if recursive else called
        body = [helper.make_node(called, [x], [y], domain=domain) for x, y in ("xm", "my")]
        made.append(helper.make_function("local", f"f{i}", ["x"], ["y"], body, opsets))
    last = helper.make_node(f"f{count - 1}", ["a"], ["b"], domain="local")
    graph = helper.make_graph([last], "g", [INFO("a", 1, ["n"])], [INFO("b", 1, ["n"])])
    return helper.make_model(graph, functions=made, opset_imports=opsets)


@pytest.mark.parametrize(
    ("model", "words"),
    [(functions(60), "nodes when inlined"), (functions(1, recursive=True), "call themselves")],
)
def test_functions_that_never_end_are_refused(model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        schema_of(model)
