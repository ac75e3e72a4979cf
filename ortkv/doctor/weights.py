"""Checks of the weights: twice where once would do, and files larger than what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.doctor.finding import Finding, size
from ortkv.doctor.tensors import likeness, num_bytes, place, weights_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx

    from ortkv.doctor.subject import Subject

_LEAST = 256
"""Bytes from which a constant counts as weights, not as a shape or an index."""
_PADDING = 65536
"""The widest gap that aligning tensors in a file leaves.  Source: onnx and onnxruntime align
external data to 4 KiB, or to 64 KiB for memory maps on Windows."""


def weights_twice(subject: Subject) -> Iterator[Finding]:
    """The graph for first runs and the one for the steps each carry the weights."""
    if subject.prefill is None or subject.folder.prefill is None or not subject.weights_at_hand:
        return
    steps = _weights(subject.model, subject.folder.graph.parent)
    first = _weights(subject.prefill, subject.folder.prefill.parent)
    shared = steps.keys() & first.keys()
    in_memory = sum(num_bytes(steps[key]) for key in shared)
    if in_memory * 2 < sum(num_bytes(tensor) for tensor in steps.values()):
        return
    on_disk = sum(
        num_bytes(steps[k]) for k in shared if place(steps[k]) is None
        or place(steps[k]) != place(first[k])
    )  # fmt: skip
    files = f"{subject.folder.prefill.name} and {subject.folder.graph.name}"
    yield Finding(
        code="weights_twice",
        level="warning",
        message=f"{files} carry the same weights: {size(in_memory)} are in memory twice, "
        f"{size(on_disk)} on disk twice.",
        do="Export one graph for both (optimum's model.onnx, the GenAI builder, or transformers' "
        "exporter with multi_token_decode=True).",
    )


def unused_data(subject: Subject) -> Iterator[Finding]:
    """External data that no tensor of the graphs refers to."""
    known = {subject.folder.graph, subject.folder.prefill}
    parent = subject.folder.graph.parent
    if not subject.weights_at_hand or set(parent.glob("*.onnx")) - known:
        return  # another graph may use the rest
    taken: dict[str, list[tuple[int, int]]] = {}
    for tensor in (tensor for model in subject.models for tensor in weights_of(model)):
        where = place(tensor)
        if where is not None:
            taken.setdefault(where[0], []).append(where[1:])
    for location, ranges in taken.items():
        whole = (parent / location).stat().st_size
        unused = _gaps([*ranges, (whole, whole)])
        if unused * 10 > whole:
            yield Finding(
                code="unused_data",
                level="warning",
                message=f"{location} has {size(whole)}, of which {size(unused)} belong to no "
                "tensor: they are left from an earlier save, as onnx.save appends to a data file.",
                do="Delete the data file before saving the model again, or export again.",
            )


def _weights(model: onnx.ModelProto, folder: Path) -> dict[str, onnx.TensorProto]:
    large = (tensor for tensor in weights_of(model) if num_bytes(tensor) >= _LEAST)
    return {likeness(tensor, folder): tensor for tensor in large}


def _gaps(ranges: list[tuple[int, int]]) -> int:
    """Bytes in no range, gaps that alignment explains left out."""
    total = reached = 0
    for start, end in sorted(ranges):
        if start - reached > _PADDING:
            total += start - reached
        reached = max(reached, end)
    return total
