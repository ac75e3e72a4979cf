"""Every variant is derived as it was built, or refused with a reason that is written down here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ortkv.errors import UnsupportedModel
from ortkv.schema import CacheSchema, derive
from ortkv.signature import signature_of

from conformance_cases import CASES
from graph_truth import expected_entries, expected_helpers
from graphs import decoder

if TYPE_CHECKING:
    from graph_design import Design


def refusal(name: str, design: Design) -> str | None:
    """Why a graph truly does not say enough by itself; None where it must be derived."""
    if not design.past:
        return "it takes no cache: a graph for first runs needs its twin for the steps"
    if design.scales == "input":
        return "the scales of its cache are inputs: their values are the user's to state"
    if "unknown" in design.extras:
        return "it has an input that changes the logits and that nothing says the value of"
    if name == "other/cross-first_only/secret":
        return "which output is which layer's cross-attention, only names tell: no op joins them"
    return None


def same_kind(found: str | None, wanted: str, design: Design) -> bool:
    """Kinds that feed the very same numbers are one kind; what a graph ignores may get zeros."""
    if (found, wanted) == ("cache_position", "positions"):
        return design.position_input == "flat"
    if (found, wanted) == ("cache_position", "past_length"):
        return design.query_len == 1 or design.write in ("Where", "Blend")
    if (found, wanted) == ("zeros", "mask_2d"):
        return design.attention in ("gqa_shape", "gqa_inputs")
    return found == wanted


def schema_of(design: Design) -> CacheSchema:
    model = decoder(design)
    return derive(signature_of(model), model)


DERIVED = {name: design for name, design in CASES.items() if refusal(name, design) is None}
REFUSED = {name: design for name, design in CASES.items() if name not in DERIVED}


@pytest.mark.parametrize("name", DERIVED)
def test_the_schema_is_the_designs(name: str) -> None:
    design = DERIVED[name]
    schema = schema_of(design)
    entries = {entry.past: entry for entry in schema.entries}
    wanted = expected_entries(design)
    assert entries.keys() == {entry["past"] for entry in wanted}
    for want in wanted:
        entry = entries[want["past"]]
        for key in ("role", "present", "layout", "update"):
            assert getattr(entry, key) == want[key]
        if want["update"] != "replace":
            assert (entry.num_kv_heads, entry.head_dim) == (want["num_kv_heads"], want["head_dim"])
        # A layer may hold a conv and a recurrent state: which of two pairs is whose, names tell.
        if "CRA" not in design.layer_kinds or not name.endswith("/secret"):
            assert entry.layer == want["layer"]
        assert "topology" in entry.evidence


@pytest.mark.parametrize("name", DERIVED)
def test_every_helper_is_what_the_graph_uses_it_for(name: str) -> None:
    design = DERIVED[name]
    found = {helper.name: helper.kind for helper in schema_of(design).helpers}
    wanted = expected_helpers(design)
    assert found.keys() == wanted.keys()
    wrong = [n for n, kind in wanted.items() if not same_kind(found[n], kind, design)]
    assert not wrong, {n: (found[n], wanted[n]) for n in wrong}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_does_not_say_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel):
        schema_of(REFUSED[name])


def test_names_that_mean_nothing_are_as_good_as_any() -> None:
    """At least 150 variants without one telling name resolve, none of them wrongly."""
    assert sum(name.endswith(("/secret", "/nameless")) for name in DERIVED) >= 150
