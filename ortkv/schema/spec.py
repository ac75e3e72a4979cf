"""The cache schema: what a graph's cache is, as frozen data with its byte arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ortkv.signature import Dim, numpy_dtype

Role = Literal["key", "value", "key_value", "cross_key", "cross_value", "conv", "recurrent"]
Update = Literal["concat", "in_place", "delta", "scatter", "window", "replace", "constant"]
Evidence = Literal["topology", "name", "shape", "stated"]
"""What an entry rests on; 'stated' is what the user said in ortkv.json or --kv-map."""
HelperKind = Literal[
    "mask_2d",
    "mask_4d",
    "positions",
    "cache_position",
    "past_length",
    "total_length",
    "last_positions",
    "use_cache_branch",
    "num_logits_to_keep",
    "encoder_states",
    "encoder_mask",
    "beam_indices",
    "token_types",
    "zeros",
    "stated",
]
"""How a helper input is computed; ``ortkv.feeds`` has one function for each. 'zeros' is the safe
default of an input that ortkv has no other rule for; 'stated' is a number that the user gave."""
MaskValues = Literal["keep", "drop", "additive"]
"""What a mask holds: 1 where a token is seen, 1 where it is not, or what to add to the scores."""
RowAlignment = Literal["start", "end"]


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One past/present pair. ``layout`` names the past's axes in the graph's order.

    Letters: B batch, H kv heads, S sequence, D head_dim, L stacked layers, 2 stacked key and
    value, X an axis of a state whose meaning is the model's own; letters in parentheses share
    one axis. ``num_layers``: how many L stands for. ``state_dims``: the sizes of the X.
    ``capacity``: the sequence axis' size where the graph fixes it. ``window``: the most tokens
    that are kept, the oldest dropped first; None for all. ``alignment``: at which end of a
    window of fixed capacity the tokens are while it is not full.
    ``past`` is None in a graph for first runs, which starts a cache and reads none; ``present``
    is None where the graph gives none out, as for cross-attention it only reads.
    """

    layer: int
    role: Role
    past: str | None
    present: str | None
    layout: str
    update: Update
    dtype: str
    num_kv_heads: int
    head_dim: int
    evidence: tuple[Evidence, ...]
    num_layers: int = 1
    capacity: int | None = None
    window: int | None = None
    alignment: RowAlignment = "end"
    state_dims: tuple[int, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether it holds something for every token, as opposed to a state or a source."""
        return self.update not in ("replace", "constant")

    @property
    def letters(self) -> str:
        """The layout with every letter an axis of its own."""
        return self.layout.replace("(", "").replace(")", "")

    def shape(self, *, batch: int, length: int) -> tuple[int, ...]:
        """The graph's tensor for ``batch`` rows of ``length`` tokens."""
        sizes = iter(self.full_shape(batch=batch, length=length))
        groups = re.findall(r"\((.*?)\)|(.)", self.layout)
        return tuple(prod(next(sizes) for _ in merged or one) for merged, one in groups)

    def full_shape(self, *, batch: int, length: int) -> tuple[int, ...]:
        """The same bytes with every letter an axis of its own."""
        sizes = {
            "B": batch,
            "H": self.num_kv_heads,
            "S": length,
            "D": self.head_dim,
            "L": self.num_layers,
            "2": 2,
        }
        state = iter(self.state_dims)
        return tuple(next(state) if letter == "X" else sizes[letter] for letter in self.letters)

    def axis(self, letter: str) -> int:
        """Where a letter is in ``full_shape``."""
        return self.letters.index(letter)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token of one row takes in this entry; a state's or a source's takes none."""
        return self.num_bytes(batch=1, length=1) if self.grows else 0

    def num_bytes(self, *, batch: int, length: int) -> int:
        """Bytes of the tensor for ``batch`` rows of ``length`` tokens."""
        shape = self.full_shape(batch=batch, length=length)
        return prod(shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class HelperInput:
    """An input that is neither tokens nor cache, and the rule that computes it.

    ``values`` is for masks alone, and ``open_values`` what else one may hold where its use does
    not tell; ``fill`` the number that a 'stated' one holds in every place.
    ``is_stated``: ortkv.json or --kv-map says what it is.
    """

    name: str
    kind: HelperKind
    dtype: str
    dims: tuple[Dim, ...]
    values: MaskValues = "keep"
    open_values: tuple[MaskValues, ...] = ()
    fill: float = 0.0
    is_stated: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheSchema:
    """Everything needed to feed a decoder graph: its entries and how each input is computed.

    ``tokens_dtype`` is that of the token ids, or of their embeddings where ``embeds`` (the graph
    takes these, [batch, query_len, hidden], and a graph beside it makes them of ids).
    ``fixed_batch``: the rows a run must have, None where any number will do; ``fixed_query_len``
    likewise the new tokens a row. ``one_token_steps``: over a past a run takes one new token a
    row and no more. ``quantized``: some products round their inputs, by a scale that may span
    several rows. ``row_alignment``: at which end of the sequence axis a row's tokens are that
    has fewer than another. ``takes_ragged_rows``: rows of unequal length can share a run and
    each stay exact; ``takes_ragged_sources``: rows may whose sources are of unequal length.
    ``logits_dims``: the graph's own, last axis vocab.
    """

    tokens: str
    tokens_dtype: str
    fixed_batch: int | None
    fixed_query_len: int | None
    one_token_steps: bool
    quantized: bool
    row_alignment: RowAlignment
    takes_ragged_rows: bool
    helpers: tuple[HelperInput, ...]
    logits: str
    logits_dtype: str
    logits_dims: tuple[Dim, ...]
    entries: tuple[CacheEntry, ...]
    embeds: bool = False
    takes_ragged_sources: bool = False

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        stacked = max(entry.num_layers for entry in self.entries)
        return stacked if stacked > 1 else len({entry.layer for entry in self.entries})

    @property
    def bytes_per_token(self) -> int:
        """Bytes one cached token of one row takes in all entries."""
        return sum(entry.bytes_per_token for entry in self.entries)

    @property
    def vocab_size(self) -> int | None:
        """The width of the logits, where the graph states it."""
        width = self.logits_dims[-1]
        return width if isinstance(width, int) else None

    @property
    def capacity(self) -> int | None:
        """The most tokens a row's cache can hold, where the graph fixes a buffer's size."""
        fixed = [e.capacity for e in self.entries if e.grows and e.update != "window"]
        return min((size for size in fixed if size is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The document ``ortkv inspect --json`` prints (docs/inspect.schema.json)."""
        fills = {h.name: h.fill for h in self.helpers if h.kind == "stated"}
        return {
            "format": 1,
            "inputs": {
                "tokens": self.tokens,
                "helpers": {h.name: h.kind for h in self.helpers},
                **({"values": fills} if fills else {}),
            },
            "outputs": {"logits": self.logits},
            "entries": [_entry_dict(entry) for entry in self.entries],
        }


def _entry_dict(entry: CacheEntry) -> dict[str, Any]:
    return {
        "layer": entry.layer,
        "role": entry.role,
        "past": entry.past,
        "present": entry.present,
        "layout": entry.layout,
        "update": entry.update,
        "dtype": entry.dtype,
        "num_kv_heads": None if entry.state_dims else entry.num_kv_heads,
        "head_dim": None if entry.state_dims else entry.head_dim,
        "evidence": list(entry.evidence),
    }
