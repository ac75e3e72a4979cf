"""Where a graph's wiring leaves several schemas, the graph itself decides between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.errors import ExecutionFailed, UnsupportedModel
from ortkv.proof.quick import QuickReport, quick_proof

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortkv.decoder import LoadedGraph

Refused = ExecutionFailed | UnsupportedModel
"""What a run under a wrong schema ends in where the tensors do not even fit."""

MARGIN = 10.0
"""How many tolerances a rejected candidate must be off: less would be a guess."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which candidate is right. ``outcomes``: each one's report, or the error of its run."""

    index: int
    outcomes: tuple[QuickReport | Refused, ...]

    def __str__(self) -> str:
        return "; ".join(_said(i, outcome) for i, outcome in enumerate(self.outcomes))


def decide(candidates: Sequence[LoadedGraph], *, seed: int = 0) -> Decision:
    """Run each schema on the graph, and take the only one that agrees with full runs.

    candidates: of one session, each with another schema.
    Raises: UnsupportedModel where none is right, several are, or one is wrong by too little.
    """
    outcomes = tuple(_outcome(graph, seed) for graph in candidates)
    right = [i for i, outcome in enumerate(outcomes) if _is_right(outcome)]
    wrong = [i for i, outcome in enumerate(outcomes) if _is_wrong(outcome)]
    if len(right) != 1 or len(right) + len(wrong) != len(outcomes):
        found = "; ".join(_said(i, outcome) for i, outcome in enumerate(outcomes))
        raise UnsupportedModel(
            f"the graph leaves {len(outcomes)} cache schemas, and running them does not tell which "
            f"is right ({found}): expected one to agree with full runs and every other to be "
            f"{MARGIN:.0f} tolerances off. State the pairs in ortkv.json or with --kv-map."
        )
    return Decision(index=right[0], outcomes=outcomes)


def _outcome(graph: LoadedGraph, seed: int) -> QuickReport | Refused:
    try:
        return quick_proof(graph, seed=seed)
    except (ExecutionFailed, UnsupportedModel) as error:
        return error


def _is_right(outcome: QuickReport | Refused) -> bool:
    return isinstance(outcome, QuickReport) and bool(outcome.checks) and outcome.ok


def _is_wrong(outcome: QuickReport | Refused) -> bool:
    if not isinstance(outcome, QuickReport):
        return True
    return outcome.max_abs_error > MARGIN * outcome.tolerance


def _said(index: int, outcome: QuickReport | Refused) -> str:
    if not isinstance(outcome, QuickReport):
        return f"candidate {index}: {str(outcome).splitlines()[0]}"
    return (
        f"candidate {index}: off by {outcome.max_abs_error:.2e} with a tolerance of "
        f"{outcome.tolerance:.2e}"
    )
