"""A model's local functions, in the place of the nodes that call them."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import onnx

MAX_NODES = 1_000_000
"""Of a graph with its functions inlined: 30 that call one another twice make 2^30 nodes."""


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without local functions; itself where it has none.

    Raises: UnsupportedModel where they call themselves, or make too many nodes.
    """
    if not model.functions:
        return model
    _check_size(model)
    from onnx import checker, inliner

    try:
        return inliner.inline_local_functions(model)
    except (checker.ValidationError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"the model's local functions cannot be inlined ({reason}): expected functions that "
            "are sound. Export the model again, without functions."
        ) from error


def _check_size(model: onnx.ModelProto) -> None:
    """Functions are sized after those that they call, so that none is walked twice."""
    bodies = {(f.domain, f.name): f.node for f in model.functions}
    calls = {key: _calls(nodes, bodies) for key, nodes in bodies.items()}
    sizes: dict[tuple[str, str], int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            size = len(bodies[key]) + sum(sizes[called] for called in calls[key])
            sizes[key] = min(size, MAX_NODES + 1)
    except CycleError as error:
        raise UnsupportedModel(
            "the model's local functions call themselves: expected functions that end. Export "
            "the model again, without functions."
        ) from error
    total = sum(sizes[called] for called in _calls(model.graph.node, bodies))
    if total > MAX_NODES:
        raise UnsupportedModel(
            f"the model's local functions make more than {MAX_NODES} nodes when inlined: expected "
            "a graph of a size that can be run. Export the model again, without functions."
        )


def _calls(
    nodes: Iterable[onnx.NodeProto], functions: Container[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The functions that nodes call, each as often as it is called."""
    found: list[tuple[str, str]] = []
    for node in nodes:
        if (node.domain, node.op_type) in functions:
            found.append((node.domain, node.op_type))
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                found += _calls(graph.node, functions)
    return found
