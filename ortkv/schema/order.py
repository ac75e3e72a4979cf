"""A graph's nodes in an order in which they can run; ONNX asks for it, not every producer obeys."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx


def in_order(graph: onnx.GraphProto) -> Sequence[onnx.NodeProto]:
    """Each node after those whose outputs it takes; as they are listed, where they are so.

    Raises: UnsupportedModel where nodes go in a circle, or make one name twice.
    """
    makers = _makers(graph)
    needs = {
        at: {makers[name] for name in _taken(node) if name in makers}
        for at, node in enumerate(graph.node)
    }
    if all(before < at for at, needed in needs.items() for before in needed):
        return graph.node
    try:
        return [graph.node[at] for at in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        at: int = error.args[1][0]
        node = graph.node[at]
        raise UnsupportedModel(
            f"the graph goes in a circle through a {node.op_type[:60]} that makes "
            f"{', '.join(node.output)[:60]!r}: expected nodes that can run one after another. "
            "Export the model again."
        ) from error


def _makers(graph: onnx.GraphProto) -> dict[str, int]:
    """Each name that a graph defines -> the place of the node that makes it."""
    given = [value.name for value in graph.input]
    made = [(name, at) for at, node in enumerate(graph.node) for name in node.output if name]
    seen: set[str] = set()
    for name in (*given, *(name for name, _ in made)):
        if name in seen or "\0" in name:
            raise UnsupportedModel(
                f"the name {name[:60]!r} stands for two values of one graph, or is no text: "
                "expected every input and every output of a node to have a name of its own. "
                "Export the model again."
            )
        seen.add(name)
    return dict(made)


def _taken(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, in its subgraphs too."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in graph.input}
            own |= {tensor.name for tensor in graph.initializer}
            own |= {name for inner in graph.node for name in inner.output}
            reads = (name for inner in graph.node for name in _taken(inner))
            yield from (name for name in reads if name not in own)
