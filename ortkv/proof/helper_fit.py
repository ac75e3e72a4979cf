"""What no run can show: a helper that is wrong in the same way in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel

if TYPE_CHECKING:
    from ortkv.schema import CacheSchema

ONE_VALUE_A_RUN = frozenset(
    {
        "past_length",
        "total_length",
        "use_cache_branch",
        "num_logits_to_keep",
        "beam_indices",
        "last_positions",
    }
)


def check_helpers_fit(schema: CacheSchema) -> None:
    """Refuse a single number for an input that has an axis of tokens.

    onnxruntime broadcasts it: with one position for all tokens, steps and a full run agree and
    both are wrong.

    Raises: UnsupportedModel
    """
    for helper in schema.helpers:
        spread = len(helper.dims) > 1 and not isinstance(helper.dims[-1], int)
        if helper.kind in ONE_VALUE_A_RUN and spread:
            raise UnsupportedModel(
                f"{helper.name} is {helper.kind}, one number a run, but has dims "
                f"{list(helper.dims)}: expected a number for each token. State its kind in "
                "ortkv.json."
            )
