"""The cache schema: what a graph's cache is, as frozen data with its byte arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ortkv.signature import Dim, numpy_dtype

Role = Literal["key", "value", "key_value", "cross_key", "cross_value", "conv", "recurrent"]
Update = Literal["concat", "in_place", "delta", "scatter", "window", "replace", "constant"]
Evidence = Literal["topology", "name", "shape"]
HelperKind = Literal[
    "mask_2d",
    "positions",
    "cache_position",
    "past_length",
    "total_length",
    "last_positions",
    "use_cache_branch",
    "num_logits_to_keep",
]
"""How a helper input is computed; ``ortkv.feeds`` has one function for each."""


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One past/present pair. ``layout`` names the past's axes in the graph's order.

    Letters: B batch, H kv heads, S sequence, D head_dim, L stacked layers, 2 stacked key and
    value; letters in parentheses share one axis. ``num_layers``: how many L stands for.
    ``past`` is None in a graph for first runs, which starts a cache and reads none.
    """

    layer: int
    role: Role
    past: str | None
    present: str
    layout: str
    update: Update
    dtype: str
    num_kv_heads: int
    head_dim: int
    evidence: tuple[Evidence, ...]
    num_layers: int = 1

    @property
    def letters(self) -> str:
        """The layout with every letter an axis of its own."""
        return self.layout.replace("(", "").replace(")", "")

    def shape(self, *, batch: int, length: int) -> tuple[int, ...]:
        """The graph's tensor for ``batch`` rows of ``length`` tokens."""
        sizes = self._sizes(batch, length)
        groups = re.findall(r"\((.*?)\)|(.)", self.layout)
        return tuple(prod(sizes[letter] for letter in merged or one) for merged, one in groups)

    def full_shape(self, *, batch: int, length: int) -> tuple[int, ...]:
        """The same bytes with every letter an axis of its own."""
        sizes = self._sizes(batch, length)
        return tuple(sizes[letter] for letter in self.letters)

    def axis(self, letter: str) -> int:
        """Where a letter is in ``full_shape``."""
        return self.letters.index(letter)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one cached token of one row takes in this entry."""
        return prod(self.full_shape(batch=1, length=1)) * numpy_dtype(self.dtype).itemsize

    def _sizes(self, batch: int, length: int) -> dict[str, int]:
        return {
            "B": batch,
            "H": self.num_kv_heads,
            "S": length,
            "D": self.head_dim,
            "L": self.num_layers,
            "2": 2,
        }


@dataclass(frozen=True, kw_only=True)
class HelperInput:
    """An input that is neither tokens nor cache, and the rule that computes it."""

    name: str
    kind: HelperKind
    dtype: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True, kw_only=True)
class CacheSchema:
    """Everything needed to feed a decoder graph: its entries and how each input is computed.

    ``tokens_dtype`` is that of the token ids; ``fixed_batch`` the rows a run must have, None
    where any number will do; ``fixed_query_len`` likewise the new tokens a row;
    ``one_token_steps``: over a past a run takes one new token a row and no more;
    ``quantized``: some products round their inputs, by a scale that may span several rows;
    ``equal_rows_only``: an attention op takes every row's length from the past's own shape, and
    no padding between past and new; ``logits_dims`` the graph's own, last axis vocab.
    """

    tokens: str
    tokens_dtype: str
    fixed_batch: int | None
    fixed_query_len: int | None
    one_token_steps: bool
    quantized: bool
    equal_rows_only: bool
    helpers: tuple[HelperInput, ...]
    logits: str
    logits_dtype: str
    logits_dims: tuple[Dim, ...]
    entries: tuple[CacheEntry, ...]

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
    def row_alignment(self) -> Literal["start", "end"]:
        """Where rows of unequal length sit in a batch's sequence axis.

        In-place ops count each row from the start; a concatenation appends at one common end.
        """
        return "start" if any(e.update == "in_place" for e in self.entries) else "end"

    @property
    def takes_ragged_rows(self) -> bool:
        """True where rows of unequal length can share a run and each stay exact.

        A mask says which cached tokens are a row's own. Where the graph joins past and new
        itself, positions must be an input too: derived from the past's length, they would
        count the padding.
        """
        if self.equal_rows_only:
            return False
        kinds = {helper.kind for helper in self.helpers}
        if self.row_alignment == "start":
            return bool(kinds & {"mask_2d", "last_positions"})
        return {"mask_2d", "positions"} <= kinds

    def to_dict(self) -> dict[str, Any]:
        """The document ``ortkv inspect --json`` prints (docs/inspect.schema.json)."""
        return {
            "format": 1,
            "inputs": {"tokens": self.tokens, "helpers": {h.name: h.kind for h in self.helpers}},
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
        "num_kv_heads": entry.num_kv_heads,
        "head_dim": entry.head_dim,
        "evidence": list(entry.evidence),
    }
