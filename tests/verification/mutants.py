"""Corrupted cache schemas of sound graphs, drawn with a seed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from ortkv.schema import CacheEntry, CacheSchema, HelperInput, HelperKind

    Mutation = Callable[[CacheSchema, Random], CacheSchema | None]

TOLD_APART: tuple[HelperKind, ...] = (
    "mask_2d",
    "positions",
    "cache_position",
    "past_length",
    "total_length",
    "last_positions",
    "use_cache_branch",
    "num_logits_to_keep",
    "beam_indices",
)
"""Kinds that depend on the run. One that is constant is wrong in every run alike, so that only a
reference can tell; the derivation gives it to nothing that the graph uses otherwise."""

OFF_BY_ONE_IN_EVERY_RUN = {("total_length", "last_positions")}
"""An op told one key too few leaves out the newest token in a full run and in steps alike."""

UPDATES = ("concat", "delta", "in_place")
SPECIAL = "()2L"
"""Of a layout: what stands for no axis that could be mistaken for another."""


def may_become(helper: HelperInput, kind: HelperKind) -> bool:
    """Whether this is another kind, and one that runs can tell from the helper's own."""
    return kind != helper.kind and (helper.kind, kind) not in OFF_BY_ONE_IN_EVERY_RUN


def drawn(schema: CacheSchema, random: Random) -> tuple[str, CacheSchema]:
    """A mutation's name and the schema it makes, never the one given."""
    while True:
        name = random.choice(list(MUTATIONS))
        mutant = MUTATIONS[name](schema, random)
        if mutant is not None and mutant != schema:
            return name, mutant


def _pair(schema: CacheSchema, random: Random, *, same_layer: bool) -> tuple[int, int] | None:
    entries = schema.entries
    pairs = [
        (i, j)
        for i in range(len(entries))
        for j in range(i)
        if (entries[i].layer == entries[j].layer) == same_layer
    ]
    return random.choice(pairs) if pairs else None


def _with(schema: CacheSchema, changed: dict[int, CacheEntry]) -> CacheSchema:
    entries = tuple(changed.get(i, entry) for i, entry in enumerate(schema.entries))
    return replace(schema, entries=entries)


def _swapped(side: str, *, same_layer: bool) -> Mutation:
    def mutate(schema: CacheSchema, random: Random) -> CacheSchema | None:
        pair = _pair(schema, random, same_layer=same_layer)
        if pair is None:
            return None
        i, j = (schema.entries[k] for k in pair)
        first = replace(i, **{side: getattr(j, side)})
        second = replace(j, **{side: getattr(i, side)})
        return _with(schema, {pair[0]: first, pair[1]: second})

    return mutate


def _one_entry(change: Callable[[CacheEntry, Random], CacheEntry]) -> Mutation:
    def mutate(schema: CacheSchema, random: Random) -> CacheSchema:
        index = random.randrange(len(schema.entries))
        return _with(schema, {index: change(schema.entries[index], random)})

    return mutate


def _every_entry(change: Callable[[CacheEntry, Random], CacheEntry]) -> Mutation:
    """All entries by the same draw: the mistake that a rule of derivation would make."""

    def mutate(schema: CacheSchema, random: Random) -> CacheSchema:
        state = random.getstate()
        changed: list[CacheEntry] = []
        for entry in schema.entries:
            random.setstate(state)
            changed.append(change(entry, random))
        return replace(schema, entries=tuple(changed))

    return mutate


def _other_axes(entry: CacheEntry, random: Random) -> CacheEntry:
    """Two axes of the layout for each other; parentheses and stacks stay where they are."""
    axes = [i for i, letter in enumerate(entry.layout) if letter not in SPECIAL]
    i, j = random.sample(axes, 2)
    letters = list(entry.layout)
    letters[i], letters[j] = letters[j], letters[i]
    return replace(entry, layout="".join(letters))


def _other_update(entry: CacheEntry, random: Random) -> CacheEntry:
    return replace(entry, update=random.choice([u for u in UPDATES if u != entry.update]))


def _other_layer(entry: CacheEntry, random: Random) -> CacheEntry:
    return replace(entry, layer=entry.layer + random.choice([1, 2]))


def _helper_dropped(schema: CacheSchema, random: Random) -> CacheSchema | None:
    if not schema.helpers:
        return None
    index = random.randrange(len(schema.helpers))
    return replace(schema, helpers=schema.helpers[:index] + schema.helpers[index + 1 :])


def _helper_of_another_kind(schema: CacheSchema, random: Random) -> CacheSchema | None:
    """The lengths among the kinds are one or a run's tokens off each other."""
    if not schema.helpers:
        return None
    index = random.randrange(len(schema.helpers))
    helper = schema.helpers[index]
    kind = random.choice([kind for kind in TOLD_APART if may_become(helper, kind)])
    changed = list(schema.helpers)
    changed[index] = replace(helper, kind=kind)
    return replace(schema, helpers=tuple(changed))


MUTATIONS: dict[str, Mutation] = {
    "pasts of a layer swapped": _swapped("past", same_layer=True),
    "pasts of two layers swapped": _swapped("past", same_layer=False),
    "presents of a layer swapped": _swapped("present", same_layer=True),
    "presents of two layers swapped": _swapped("present", same_layer=False),
    "axes of an entry swapped": _one_entry(_other_axes),
    "axes of every entry swapped": _every_entry(_other_axes),
    "update rule of an entry": _one_entry(_other_update),
    "update rule of every entry": _every_entry(_other_update),
    "layer of an entry": _one_entry(_other_layer),
    "helper dropped": _helper_dropped,
    "helper of another kind": _helper_of_another_kind,
}
