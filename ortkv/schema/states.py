"""States of fixed size: which output replaces which input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.schema import names
from ortkv.schema.helper_inputs import FLOATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Dim, TensorSpec

_LEAST_RANK = 2


def state_pairs(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], wiring: Wiring
) -> list[tuple[TensorSpec, TensorSpec]]:
    """Inputs with the outputs that are their next values.

    An output's past is, of the inputs with its dims, the one taken up last on the way to it: a
    layer's state depends on the states of the layers before it, and on its own.
    """
    pairs: list[tuple[TensorSpec, TensorSpec]] = []
    for kind in dict.fromkeys(_kind(spec) for spec in inputs if _may_be_state(spec)):
        olds = {spec.name: spec for spec in inputs if _kind(spec) == kind}
        news = [spec for spec in outputs if _kind(spec) == kind]
        latest = _latest(wiring, list(olds))
        found = {spec.name: latest.get(spec.name) for spec in news}
        named = {
            spec.name: old
            for spec in news
            for old in olds
            if (name := names.read_past(old)) is not None and names.read_present(spec.name) == name
        }
        if len(set(found.values()) - {None}) < len(olds) <= len(named):
            found = dict(named)
        by_past = {old: spec for spec in news if (old := found.get(spec.name)) is not None}
        pairs += [(olds[old], spec) for old, spec in by_past.items()]
    return pairs


def _may_be_state(spec: TensorSpec) -> bool:
    """Floats with a fixed size behind the batch."""
    dims = spec.dims or ()
    return (
        spec.dtype in FLOATS
        and len(dims) >= _LEAST_RANK
        and all(isinstance(dim, int) for dim in dims[1:])
    )


def _kind(spec: TensorSpec) -> tuple[str, tuple[Dim, ...]]:
    return spec.dtype, (spec.dims or ())[1:]


def _latest(wiring: Wiring, inputs: list[str]) -> dict[str, str]:
    """For every wire, the one of some inputs that is taken up last on the way to it."""
    first_use = {
        name: min((op.order for op in wiring.consumers(name)), default=-1) for name in inputs
    }
    found = {name: name for name in inputs}
    for op in wiring.ops:
        sources = {found[name] for name in op.inputs if name in found}
        if not sources:
            continue
        last = max(sources, key=lambda name: first_use[name])
        for out in op.outputs:
            found[out] = last
            if out in wiring.leaves:
                found[wiring.leaves[out]] = last
    return found
