"""Attention ops that take a cache by their own definition, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.schema.spec import Role
    from ortkv.schema.wiring import Op

KEY: Role = "key"
VALUE: Role = "value"
KEY_VALUE: Role = "key_value"


@dataclass(frozen=True, kw_only=True)
class FusedOp:
    """How an attention op names its cache: past input -> (present output, role).

    Pasts and presents are [batch, num_kv_heads, sequence, head_dim], behind an axis of 2 where
    one holds both. ``operands``: inputs that carry the whole key or value, joined before.
    ``lengths``: inputs that state the true length, so that buffers may be longer (in place).
    ``row_lengths``: the one among them with a length for each row.
    ``share_flag``: the attribute that says past and present are one buffer.
    ``masks``: the inputs that may be a mask; a floating one is added to the scores.
    """

    pairs: dict[int, tuple[int, Role]]
    operands: dict[int, Role] = field(default_factory=lambda: {1: KEY, 2: VALUE})
    lengths: tuple[int, ...] = ()
    row_lengths: int | None = None
    share_flag: str = ""
    masks: tuple[int, ...] = ()


_SHARED = "past_present_share_buffer"
FUSED_OPS: dict[tuple[str, str], FusedOp] = {
    ("com.microsoft", "GroupQueryAttention"): FusedOp(
        pairs={3: (1, KEY), 4: (2, VALUE)}, lengths=(5, 6), row_lengths=5, masks=(10,)
    ),
    ("com.microsoft", "MultiHeadAttention"): FusedOp(
        pairs={6: (1, KEY), 7: (2, VALUE)}, lengths=(8,), masks=(4, 5)
    ),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): FusedOp(
        pairs={5: (1, KEY), 6: (2, VALUE)}, share_flag=_SHARED, masks=(3, 4)
    ),
    ("com.microsoft", "Attention"): FusedOp(
        pairs={4: (1, KEY_VALUE)}, operands={}, share_flag=_SHARED, masks=(3, 5)
    ),
    ("ai.onnx", "Attention"): FusedOp(pairs={4: (1, KEY), 5: (2, VALUE)}, masks=(3,)),
}
"""Source: onnxruntime docs/ContribOperators.md; ONNX operator Attention, opsets 23 and 24."""


def fused(op: Op) -> FusedOp | None:
    """What the table says of an op, if it is in it."""
    return FUSED_OPS.get((op.domain, op.kind))
