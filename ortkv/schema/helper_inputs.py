"""What each input that is not cache is for: tokens, mask, positions, lengths, flags.

The graph's use of an input decides; names decide what the use leaves open. A name that the
use, rank or dtype contradicts says nothing: exporters have called a mask a cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortkv.schema.spec import HelperInput
from ortkv.schema.uses import uses_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ortkv.schema.spec import HelperKind, MaskValues
    from ortkv.schema.uses import Uses
    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Dim, TensorSpec

INTEGERS = frozenset({"int32", "int64"})
FLOATS = frozenset({"float32", "float16", "bfloat16"})
_NUMBERS = INTEGERS | FLOATS | {"bool", "int8", "uint8"}
_MOST_TOKEN_TYPES = 4


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """An input may be of ``kind`` where its name, rank and dtype all fit."""

    kind: HelperKind
    pattern: re.Pattern[str]
    ranks: frozenset[int]
    dtypes: frozenset[str]


def _rule(kind: HelperKind, pattern: str, ranks: set[int], dtypes: frozenset[str]) -> _Rule:
    return _Rule(kind=kind, pattern=re.compile(pattern), ranks=frozenset(ranks), dtypes=dtypes)


_LEN = r"(_?len(gth)?s?)"
_RULES = (
    _rule("encoder_mask", r"encoder_(attention|attn)_mask", {2}, _NUMBERS),
    _rule("encoder_states", r"encoder_(hidden_states?|outputs?|states)", {3}, FLOATS),
    _rule("mask_2d", r".*(attention|attn)_?mask.*|mask|causal_mask", {2}, _NUMBERS),
    _rule(
        "mask_4d", r".*(attention|attn)_?mask.*|mask|causal_mask|attention_bias", {3, 4}, _NUMBERS
    ),
    _rule("cache_position", r"(.*\.)?cache_positions?", {1, 2}, INTEGERS),
    _rule(
        "positions",
        r"(decoder_)?(position_?ids?|positions?|pos_?ids?|pos|position_ids_increment)",
        {1, 2, 3},
        INTEGERS,
    ),
    _rule(
        "past_length",
        rf"past_(sequence|seq|key_values|kv|token|tokens)?{_LEN}|history{_LEN}|offset"
        r"|(.*\.)?cumulative_length|input_pos|write_indices|start_pos|seq_?lens?_?past",
        {0, 1, 2},
        INTEGERS,
    ),
    _rule(
        "total_length",
        rf"total_(sequence|seq|kv){_LEN}|kv_seq{_LEN}|all_seq{_LEN}",
        {0, 1},
        INTEGERS,
    ),
    _rule("last_positions", r"seqlens_k", {1, 2}, INTEGERS),
    _rule("use_cache_branch", r"use_cache(_branch)?", {0, 1}, frozenset({"bool"})),
    _rule("num_logits_to_keep", r"(num_)?logits_to_keep", {0, 1}, INTEGERS),
    _rule(
        "beam_indices",
        r"beam_id(x|s|ces)|cache_indirection|reorder_ids|beam_indices",
        {1, 3},
        INTEGERS,
    ),
    _rule("token_types", r"token_type_ids|segment_ids", {2}, INTEGERS),
)
_TOKENS = re.compile(r"((decoder_)?input_ids?|tokens?|token_ids?|input|ids)(?:[._:]\d+)?")
_EMBEDS = re.compile(r"(decoder_)?inputs?_?embed(s|dings)?|x|hidden_states?|embeddings?")


def find_tokens(
    inputs: Collection[TensorSpec],
    wiring: Wiring,
    vocab_sizes: Collection[Dim],
    cached: Collection[str] = (),
) -> list[TensorSpec]:
    """The inputs that may be the token ids, or their embeddings: one, where all is well.

    vocab_sizes: of the outputs that may be logits; the table that tokens index has as many rows.
    cached: names of inputs known to be cache.
    """
    ids = [s for s in inputs if s.dtype in INTEGERS and s.rank in (1, 2)]
    tables = {s.name: uses_of(wiring, s, ()).tables for s in ids}
    indexing = [s for s in ids if tables[s.name]]
    matching = [s for s in indexing if any(rows in vocab_sizes for rows, _ in tables[s.name])]
    named = [s for s in ids if _TOKENS.fullmatch(s.name) and s.rank == 2]
    for found in (
        [s for s in matching if s in named],
        matching,
        [s for s in indexing if s in named],
        named,
        [s for s in inputs if is_states(s) and _EMBEDS.fullmatch(s.name)],
        indexing,
    ):
        if found:
            return found
    return [s for s in inputs if is_states(s) and s.name not in cached]


def is_states(spec: TensorSpec) -> bool:
    """Whether an input may be hidden states, [batch, sequence, hidden size]."""
    if spec.dtype not in FLOATS or spec.dims is None or len(spec.dims) != len("BSD"):
        return False
    return isinstance(spec.dims[2], int) and not isinstance(spec.dims[1], int)


def table_of_tokens(tokens: TensorSpec, wiring: Wiring) -> tuple[int, int] | None:
    """(vocabulary, hidden size) of the table that the tokens index, where it is in the graph."""
    tables = uses_of(wiring, tokens, ()).tables
    return max(tables, default=None)


def helpers_of(
    specs: Collection[TensorSpec],
    wiring: Wiring,
    pasts: Collection[TensorSpec],
    tokens: TensorSpec,
    *,
    source_lengths: Collection[Dim] = (),
) -> Mapping[str, HelperInput]:
    """What is computed for each input of which it is known.

    source_lengths: dims of what the encoder made, which its mask has too.
    """
    names = [past.name for past in pasts]
    found: dict[str, HelperInput] = {}
    for spec in specs:
        uses = uses_of(wiring, spec, names)
        kind = _kind(spec, uses, tokens) if spec.dtype in _NUMBERS else None
        if kind is None or spec.dims is None:
            continue
        if kind == "positions" and len(spec.dims) == 1 and _is_per_token(spec, tokens):
            kind = "cache_position"
        found[spec.name] = HelperInput(
            name=spec.name,
            kind=kind,
            dtype=spec.dtype,
            dims=spec.dims,
            values=default_values(spec, kind, uses.mask),
            open_values=_open_values(spec, kind, uses),
        )
    return _encoder_apart(found, source_lengths)


def _kind(spec: TensorSpec, uses: Uses, tokens: TensorSpec) -> HelperKind | None:
    named: HelperKind | None = next((r.kind for r in _RULES if _fits(r, spec)), None)
    if not uses.used:
        return "zeros" if named in (None, "encoder_states") else named
    if len(uses.slots) == 1:
        slot: HelperKind = next(iter(uses.slots))
        return slot if slot != "positions" or spec.dtype in INTEGERS else named
    by_use = _kind_by_use(spec, uses, tokens)
    if by_use is not None and not _refines(named, by_use):
        return by_use
    return named


def _refines(named: HelperKind | None, by_use: HelperKind) -> bool:
    """Whether a name says more precisely what the use says too."""
    return (by_use, named) in (
        ("mask_2d", "encoder_mask"),
        ("positions", "cache_position"),
        ("past_length", "total_length"),
        ("past_length", "cache_position"),
        ("positions", "past_length"),
        ("cache_position", "positions"),
        ("cache_position", "past_length"),
        ("positions", "token_types"),
        ("token_types", "positions"),
    )


def _kind_by_use(spec: TensorSpec, uses: Uses, tokens: TensorSpec) -> HelperKind | None:
    if spec.dtype in INTEGERS and uses.moves_rows:
        return "beam_indices"
    if spec.dtype in INTEGERS and uses.tables and uses.mask is None:
        rows = max(rows for rows, _ in uses.tables)
        return "token_types" if rows <= _MOST_TOKEN_TYPES else _position_kind(spec, uses, tokens)
    if spec.dtype in INTEGERS and uses.rotary and uses.mask is None:
        return _position_kind(spec, uses, tokens)
    if spec.dtype in INTEGERS and uses.writes:
        return _position_kind(spec, uses, tokens)
    if uses.mask is not None and spec.rank in (2, 3, 4) and not _is_per_token(spec, tokens):
        return "mask_2d" if spec.rank == 2 else "mask_4d"
    if uses.rotary or uses.tables:
        return _position_kind(spec, uses, tokens)
    return "encoder_states" if is_states(spec) and uses.projected else None


def _position_kind(spec: TensorSpec, uses: Uses, tokens: TensorSpec) -> HelperKind | None:
    """An index for each new token; or one number, or one a row, that the graph counts on from."""
    if spec.dtype not in INTEGERS or spec.dims is None:
        return None
    batch, query_len = tokens.dims[:2] if tokens.dims and tokens.rank != 1 else (None, None)
    is_one = not spec.dims or (spec.dims == (1,) and query_len != 1)
    is_row = len(spec.dims) == 1 and spec.dims[0] == batch and batch not in (None, 1)
    if is_one or is_row:
        return "total_length" if uses.total else "past_length"
    return "cache_position" if len(spec.dims) == 1 else "positions"


def _is_per_token(spec: TensorSpec, tokens: TensorSpec) -> bool:
    """Whether an input has one number for each new token, as its dims say."""
    if spec.dtype not in INTEGERS or not spec.dims or not tokens.dims or tokens.rank == 1:
        return False
    return spec.dims[-1] is not None and spec.dims[-1] == tokens.dims[1]


def fits_kind(kind: HelperKind, spec: TensorSpec) -> bool:
    """Whether an input has a rank and a dtype that an input of a kind may have."""
    if kind in ("stated", "zeros"):
        return spec.dtype in _NUMBERS
    rules = [rule for rule in _RULES if rule.kind == kind]
    return any(spec.rank in rule.ranks and spec.dtype in rule.dtypes for rule in rules)


def _fits(rule: _Rule, spec: TensorSpec) -> bool:
    return bool(
        spec.dims is not None
        and spec.rank in rule.ranks
        and spec.dtype in rule.dtypes
        and rule.pattern.fullmatch(spec.name)
    )


def default_values(spec: TensorSpec, kind: HelperKind, used_as: MaskValues | None) -> MaskValues:
    """What a mask holds, by use; where that stays open, by what its dtype is used for elsewhere."""
    if kind not in ("mask_2d", "mask_4d", "encoder_mask"):
        return "keep"
    if used_as is not None:
        return used_as
    return "additive" if kind == "mask_4d" and spec.dtype in FLOATS else "keep"


def _open_values(spec: TensorSpec, kind: HelperKind, uses: Uses) -> tuple[MaskValues, ...]:
    """What else a mask of this dtype may hold, where it is used in a way that does not tell."""
    if kind not in ("mask_2d", "mask_4d") or uses.mask is not None or not uses.weighed:
        return ()
    likeliest = default_values(spec, kind, None)
    possible: tuple[MaskValues, ...] = ("keep", "drop")
    if spec.dtype in FLOATS:
        possible = ("keep", "drop", "additive")
    return tuple(values for values in possible if values != likeliest)


def _encoder_apart(
    found: dict[str, HelperInput], source_lengths: Collection[Dim]
) -> dict[str, HelperInput]:
    """A mask as long as what the encoder made is the encoder's."""
    states = [h for h in found.values() if h.kind == "encoder_states"]
    lengths = {h.dims[1] for h in states} | set(source_lengths) - {None}
    return {
        name: HelperInput(
            name=h.name, kind="encoder_mask", dtype=h.dtype, dims=h.dims, values=h.values
        )
        if h.kind == "mask_2d" and h.dims[-1] in lengths
        else h
        for name, h in found.items()
    }
