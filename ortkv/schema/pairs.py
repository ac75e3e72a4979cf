"""Whether the entries together are one whole cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names
from ortkv.schema.seen import few, seen
from ortkv.schema.stated import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.entries import Candidate
    from ortkv.schema.spec import CacheEntry
    from ortkv.signature import Signature, TensorSpec


def check_pairs(candidates: Sequence[Candidate], entries: Sequence[CacheEntry]) -> None:
    """Each present feeds one past, in the order of tokens and of axes in which it came in."""
    presents = [entry.present for entry in entries if entry.present is not None]
    places = [(entry.layer, entry.role) for entry in entries]
    if len(set(presents)) < len(presents) or len(set(places)) < len(places):
        twice = [e for e, place in zip(entries, places, strict=True)
                 if presents.count(e.present or "") > 1 or places.count(place) > 1]  # fmt: skip
        pairs = few([f"{e.past} -> {e.present} (layer {e.layer} {e.role})" for e in twice])
        rivals = [
            {"past": e.past, "present": e.present, "layer": e.layer, "role": e.role} for e in twice
        ]
        raise UnsupportedModel(
            f"the cache is ambiguous, two inputs claim one place: {pairs}. Export again, with one "
            "past and one present for the key and the value of each layer; or say of each its own "
            "present, layer and role, and state any that is no cache under inputs.helpers. "
            + settle(entries=rivals)
        )
    for flow in (c.flow for c in candidates if c.flow is not None and not c.is_state):
        if flow.fault:
            raise UnsupportedModel(
                f"{flow.past} -> {flow.present}: the graph {flow.fault}: expected the past, then "
                "the new tokens, in one order of axes. Export the present as the past goes in."
            )


def check_complete(entries: Sequence[CacheEntry], signature: Signature, logits: TensorSpec) -> None:
    """Every layer with a key has a value, and no output is a present without a past.

    A cache that the graph only reads, beside an output with its very sizes, may not be constant at
    all: the new tokens' keys may come out apart from it.
    """
    claimed = {entry.present for entry in entries} | {logits.name}
    orphans = [
        spec for spec in signature.outputs if spec.name not in claimed and _is_cache(spec, entries)
    ]
    read_only = [s for s in signature.inputs if s.name in _without_present(entries)]
    loose = [s for s in signature.outputs if s.name not in claimed]
    orphans += [s for s in loose if any(_alike(s, past) for past in read_only)]
    for kind in ("", "cross_"):
        keys = {e.layer for e in entries if e.role == f"{kind}key"}
        values = {e.layer for e in entries if e.role == f"{kind}value"}
        if orphans or keys != values:
            raise UnsupportedModel(
                f"the cache is incomplete: {kind}keys of layers {_listed(keys)}, {kind}values of "
                f"layers {_listed(values)}, {seen('outputs without a past', orphans)}. Export "
                "again, with one past and one present for the key and the value of each layer"
                + ("." if orphans or keys & values else _settled_lone(entries, keys ^ values))
            )


def _settled_lone(entries: Sequence[CacheEntry], layers: set[int]) -> str:
    """How to state keys that have no values, the first two of them: latents look like this."""
    lone = [
        {"past": e.past, "layer": e.layer, "role": e.role}
        for e in entries
        if e.layer in layers and e.past is not None and e.present is not None
    ]
    if not lone:
        return "."
    return "; or say of each its layer and role, key_value where both are made of it. " + settle(
        entries=lone[:2]
    )


def _listed(layers: set[int]) -> str:
    return f"[{few([str(layer) for layer in sorted(layers)])}]"


def _is_cache(output: TensorSpec, entries: Sequence[CacheEntry]) -> bool:
    """Whether an output is a cache by its name.

    Not the source's keys and values in a graph that takes none: it makes them anew in every run.
    """
    named = names.read_present(output.name)
    if named is None:
        return False
    takes_cross = any(entry.role in ("cross_key", "cross_value") for entry in entries)
    return takes_cross or named.role not in ("cross_key", "cross_value")


def _without_present(entries: Sequence[CacheEntry]) -> set[str]:
    return {entry.past or "" for entry in entries if entry.present is None}


def _alike(output: TensorSpec, past: TensorSpec) -> bool:
    """Whether two tensors have one rank and the same sizes wherever both are fixed."""
    ours, theirs = output.dims or (), past.dims or ()
    return (
        output.dtype == past.dtype
        and len(ours) == len(theirs)
        and all(
            a == b
            for a, b in zip(ours, theirs, strict=True)
            if isinstance(a, int) or isinstance(b, int)
        )
    )
