"""What each input that is not cache is for: tokens, mask, positions, lengths, flags."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.schema.spec import HelperInput

if TYPE_CHECKING:
    from ortkv.schema.spec import HelperKind
    from ortkv.signature import TensorSpec

_INTEGERS = frozenset({"int32", "int64"})
_NUMBERS = frozenset({"int32", "int64", "bool", "float32", "float16"})


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """An input is of ``kind`` where its name, rank and dtype all fit."""

    kind: HelperKind
    pattern: re.Pattern[str]
    ranks: frozenset[int]
    dtypes: frozenset[str]


def _rule(kind: HelperKind, pattern: str, ranks: set[int], dtypes: frozenset[str]) -> _Rule:
    return _Rule(kind=kind, pattern=re.compile(pattern), ranks=frozenset(ranks), dtypes=dtypes)


_RULES = (
    _rule("mask_2d", r"(decoder_)?(attention|attn)_mask|mask", {2}, _NUMBERS),
    _rule("positions", r"(decoder_)?position_ids|positions|pos_ids", {2}, _INTEGERS),
    _rule("cache_position", r"cache_position(s)?", {1}, _INTEGERS),
    _rule(
        "past_length",
        r"past_(sequence|seq|key_values)_len(gth)?|past_len(gth)?",
        {0, 1},
        _INTEGERS,
    ),
    _rule("total_length", r"total_(sequence|seq)_len(gth)?", {0, 1}, _INTEGERS),
    _rule("last_positions", r"seqlens_k", {1, 2}, _INTEGERS),
    _rule("use_cache_branch", r"use_cache(_branch)?", {0, 1}, frozenset({"bool"})),
    _rule("num_logits_to_keep", r"(num_)?logits_to_keep", {0, 1}, _INTEGERS),
)

_TOKENS = re.compile(r"((decoder_)?input_ids?|tokens?|token_ids|input)(?:[._:]\d+)?")


def is_tokens(spec: TensorSpec) -> bool:
    """True for the token ids: integers [batch, query_len] by a known name."""
    return spec.dtype in _INTEGERS and spec.rank == 2 and _TOKENS.fullmatch(spec.name) is not None


def helper_of(spec: TensorSpec) -> HelperInput | None:
    """The rule that computes this input, or None where none is known."""
    for rule in _RULES:
        if (
            spec.dims is not None
            and spec.rank in rule.ranks
            and spec.dtype in rule.dtypes
            and rule.pattern.fullmatch(spec.name)
        ):
            return HelperInput(name=spec.name, kind=rule.kind, dtype=spec.dtype, dims=spec.dims)
    return None
