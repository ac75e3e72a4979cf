"""What in the graph shows each entry: the ops between past and present, and those that read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ortkv.schema import topology
from ortkv.schema.fused_ops import fused
from ortkv.schema.moves import REARRANGING
from ortkv.schema.sizes import graph_sizes
from ortkv.schema.stated import STATES, groups
from ortkv.schema.uses import MEASURES
from ortkv.schema.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from ortkv.schema.flow import Flow
    from ortkv.schema.spec import CacheEntry, CacheSchema
    from ortkv.schema.wiring import Op, Wiring
    from ortkv.signature import Signature, TensorSpec

_MOST_STEPS = 20_000
"""Of a search for a path: a graph can have very many."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One op on the way. ``node`` is its name, or its first output's where it has none."""

    op: str
    node: str


@dataclass(frozen=True, kw_only=True)
class AxisReason:
    """Why an axis has its letters."""

    axis: int
    letters: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What shows one entry.

    path: ops from past to present; those of a delta's present come after the join.
    join: the op that adds the new tokens.   role_from: the op whose use of the past told the role.
    use: what that op does with it.
    """

    past: str | None
    present: str | None
    path: tuple[Step, ...]
    join: Step | None
    role_from: Step | None
    use: str
    axes: tuple[AxisReason, ...]

    def to_dict(self) -> dict[str, Any]:
        """As ``ortkv inspect --json --explain`` prints it (docs/inspect.schema.json)."""
        found = asdict(self)
        return found | {"path": list(found["path"]), "axes": list(found["axes"])}


def explain(signature: Signature, model: onnx.ModelProto, schema: CacheSchema) -> list[Explanation]:
    """An explanation for each of a schema's entries, in their order."""
    wiring = wire(model)
    sizes = graph_sizes(wiring, signature.inputs)
    inputs, outputs = (
        {spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs)
    )
    ranks = {e.past: len(groups(e.layout)) for e in schema.entries if e.past is not None}
    flows = topology.flows(wiring, sizes, ranks, list(outputs))
    return [
        _explained(
            entry,
            wiring,
            flows.get(entry.past or ""),
            inputs.get(entry.past or ""),
            outputs.get(entry.present or ""),
        )
        for entry in schema.entries
    ]


def _explained(
    entry: CacheEntry,
    wiring: Wiring,
    flow: Flow | None,
    past: TensorSpec | None,
    present: TensorSpec | None,
) -> Explanation:
    path = _path(wiring, entry, flow)
    reader = _reader(entry, flow)
    join = None if flow is None or entry.update in ("replace", "constant") else flow.join
    return Explanation(
        past=entry.past,
        present=entry.present,
        path=tuple(_step(op) for op in path),
        join=None if join is None else _step(join),
        role_from=None if reader is None else _step(reader),
        use=_use(entry, reader),
        axes=tuple(_axes(entry, flow, past, present)),
    )


def _step(op: Op) -> Step:
    return Step(op=op.kind, node=op.node.name or next((out for out in op.outputs if out), ""))


def _path(wiring: Wiring, entry: CacheEntry, flow: Flow | None) -> list[Op]:
    """The ops from past to present; past's alone, up to the join, where no value goes on."""
    if entry.past is None or entry.present is None:
        return []
    if flow is not None and flow.join is not None and entry.update not in ("replace", "constant"):
        before = _search(wiring, [entry.past], flow.join.inputs)
        after = _search(wiring, flow.join.outputs, (entry.present,))
        if after is None:  # the present is the new tokens alone
            partners = [name for name in flow.join.inputs if name and name != entry.past]
            sources = [source for name in partners for source in _sources(wiring, name)]
            after = _search(wiring, sources, (entry.present,))
        return [*(before or []), flow.join, *(after or [])]
    return _search(wiring, [entry.past], (entry.present,)) or []


def _search(
    wiring: Wiring, starts: list[str] | tuple[str, ...], targets: tuple[str, ...]
) -> list[Op] | None:
    """The fewest ops by which the value on a wire gets to another, an ``If`` around it passed."""
    front: list[tuple[str, tuple[Op, ...]]] = [(name, ()) for name in starts if name]
    seen = {name for name, _ in front}
    for name, path in front:  # grows as it is read
        if name in targets:
            return list(path)
        if len(front) > _MOST_STEPS:
            return None
        after: list[tuple[str, tuple[Op, ...]]] = [
            (out, (*path, op))
            for op in wiring.consumers(name)
            if op.kind not in MEASURES
            for out in op.outputs
        ]
        if name in wiring.leaves:
            after.append((wiring.leaves[name], path))
        for out, longer in after:
            if out and out not in seen:
                seen.add(out)
                front.append((out, longer))
    return None


def _sources(wiring: Wiring, name: str) -> Iterator[str]:
    """A wire and those that it is rearranged from."""
    yield name
    while (maker := wiring.makers.get(name)) is not None and maker.kind in REARRANGING:
        name = maker.input(0)
        yield name


def _reader(entry: CacheEntry, flow: Flow | None) -> Op | None:
    """The first op that uses the past as the entry's role."""
    readers = () if flow is None else flow.readers
    role = entry.role.removeprefix("cross_")
    ops = [op for told, op in readers if told == role or role == "key_value"]
    return min(ops, key=lambda op: op.order, default=None)


def _use(entry: CacheEntry, reader: Op | None) -> str:
    if reader is None and entry.role not in STATES and "stated" in entry.evidence:
        return "as stated"
    if reader is None and entry.role not in STATES and "name" in entry.evidence:
        return "its use does not tell, its name does"
    if reader is None:
        return {"conv": "a convolution's state", "recurrent": "replaced in every run"}.get(
            entry.role, "its use does not tell"
        )
    if fused(reader) is not None:
        return "the op's own input for it"
    if entry.role == "key_value":
        return "parts of it make scores and are weighed by them"
    if entry.role.endswith("key"):
        return "its product goes into the softmax"
    return "multiplied with what comes out of the softmax"


def _axes(
    entry: CacheEntry, flow: Flow | None, past: TensorSpec | None, present: TensorSpec | None
) -> Iterator[AxisReason]:
    if past is None:
        return
    dims = past.dims or ()
    news = present.dims if present is not None and present.dims is not None else ()
    for axis, letters in enumerate(groups(entry.layout)):
        dim = dims[axis] if axis < len(dims) else None
        size = "open" if dim is None else str(dim)
        new = news[axis] if len(news) == len(dims) else dim
        yield AxisReason(
            axis=axis, letters=letters, reason=f"{size}: {_reason(entry, letters, axis, flow, new)}"
        )


def _reason(entry: CacheEntry, letters: str, axis: int, flow: Flow | None, new: object) -> str:
    if "stated" in entry.evidence:
        return "as stated, or as the graph shows it where that states no layout"
    if letters == "S":
        return _sequence_reason(entry, axis, flow, new)
    if letters == "X":
        return "a fixed size of the state"
    if "2" in letters or letters == "L":
        return "taken apart into " + ("key and value" if "2" in letters else "layers")
    if letters == "D" and flow is not None and flow.depth is not None and flow.depth.axis == axis:
        return "the product with the query or the scores runs over it"
    if len(letters) > 1:
        return f"{' and '.join(letters)} share it, as the graph's Reshape or its size shows"
    return {
        "B": "the batch, as the tokens have it",
        "H": f"the {entry.num_kv_heads} kv heads",
        "D": f"the head's size, {entry.head_dim}",
    }[letters]


def _sequence_reason(entry: CacheEntry, axis: int, flow: Flow | None, new: object) -> str:
    found: list[str] = []
    if flow is not None and flow.sequence is not None and flow.sequence.axis == axis:
        joined = flow.join is not None and entry.update != "constant"
        found.append(
            f"{flow.join.kind} adds the new tokens along it"
            if joined and flow.join is not None
            else "attention runs over it"
        )
    if "shape" in entry.evidence and isinstance(new, str):
        found.append(f"its name says that it grows, to {new}")
    return ", ".join(found) or "the axis left for it"
