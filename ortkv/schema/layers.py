"""The layer of each entry: by name where names count as the graph runs, else by order of use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.schema.entries import Candidate
    from ortkv.schema.spec import CacheEntry

_KINDS = (("key", "value", "key_value"), ("cross_key", "cross_value"), ("conv", "recurrent"))
"""Roles whose names are trusted together."""


def numbered(candidates: Sequence[Candidate], drafts: Sequence[CacheEntry]) -> list[CacheEntry]:
    """The entries with their layers, in the order of layers."""
    pairs = list(zip(candidates, drafts, strict=True))
    by_use = _layers_by_use(pairs)
    found = [
        entry if trusted else replace(entry, layer=by_use[entry.past or ""])
        for kind in _KINDS
        for group in [[pair for pair in pairs if pair[1].role in kind]]
        for trusted in [_names_count_as_used(group)]
        for _, entry in group
    ]
    return sorted(_from_zero(found), key=lambda entry: (entry.layer, entry.role))


def _from_zero(entries: list[CacheEntry]) -> list[CacheEntry]:
    """Layers counted from 1 without a gap, counted from 0."""
    layers = {entry.layer for entry in entries}
    if layers != set(range(1, len(layers) + 1)) or len(layers) == 1:
        return entries
    return [replace(entry, layer=entry.layer - 1) for entry in entries]


def _order(candidate: Candidate) -> int:
    if candidate.is_state or candidate.flow is None:
        return candidate.order
    return candidate.flow.order


def _names_count_as_used(pairs: Sequence[tuple[Candidate, CacheEntry]]) -> bool:
    """Whether all have names, and each role's layers rise in the order in which they are used."""
    if any(candidate.named is None for candidate, _ in pairs):
        return False
    for role in {entry.role for _, entry in pairs}:
        group = sorted((_order(c), e.layer) for c, e in pairs if e.role == role)
        layers = [layer for _, layer in group]
        if layers != sorted(set(layers)):
            return False
    return True


def _layers_by_use(pairs: Sequence[tuple[Candidate, CacheEntry]]) -> dict[str, int]:
    """Count on whenever a role comes up that the layer already has, or another kind of layer."""
    layers: dict[str, int] = {}
    layer = 0
    held: set[str] = set()
    ranks = {role: 0 for _, entry in pairs for role in [entry.role]}
    for candidate, entry in sorted(pairs, key=lambda pair: _order(pair[0])):
        if entry.role.startswith("cross"):
            layers[candidate.past.name] = ranks[entry.role]
            ranks[entry.role] += 1
            continue
        kind = next(kind for kind in _KINDS if entry.role in kind)
        if entry.role in held or held - set(kind):
            layer, held = layer + 1, set[str]()
        held.add(entry.role)
        layers[candidate.past.name] = layer
    return layers
