"""Checks of how many rows and tokens a run takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortkv.doctor.subject import Subject

_LENGTHS = frozenset({"mask_2d", "last_positions"})
"""Helper inputs that tell a run which cached tokens are a row's own; any mask is one."""


def mask_pruned(subject: Subject) -> Iterator[Finding]:
    """No mask goes in, though the batch is dynamic: rows of unequal length cannot share a run."""
    schema = subject.schema
    if schema is None or schema.fixed_batch is not None or _takes_lengths(subject):
        return
    yield Finding(
        code="mask_pruned",
        level="warning",
        message="the graph takes any number of rows but no attention_mask, so that rows of unequal "
        "length cannot share a run: ortkv runs them one by one. An exporter drops the mask when "
        "its sample input has a mask of ones alone.",
        do="Export again with a sample of two rows of which one is padded, or by "
        "`ortkv export --backend optimum`.",
    )


def positions_missing(subject: Subject) -> Iterator[Finding]:
    """A mask goes in, but rows that start at unequal places would count the padding."""
    schema = subject.schema
    if schema is None or schema.fixed_batch is not None or schema.takes_ragged_rows:
        return
    if not _takes_lengths(subject):
        return
    why = "it has no position_ids, so that positions count a row's padding"
    do = "with position_ids as an input (optimum does so for most models), or "
    if subject.wiring.has(frozenset({"GroupQueryAttention"})):
        why = "its attention op takes every row's length from the past's own shape"
        do = "with lengths that come from the mask: "
    yield Finding(
        code="positions_missing",
        level="warning",
        message=f"the graph has a mask, but {why}: rows of unequal length are run one by one.",
        do=f"Export again {do}to a graph that updates its cache in place (`ortkv export "
        "--from-onnx`, or the ONNX Runtime GenAI builder).",
    )


def fixed_sizes(subject: Subject) -> Iterator[Finding]:
    """The batch or the number of new tokens is a constant of the graph."""
    schema = subject.schema
    if schema is None:
        return
    if schema.fixed_batch is not None:
        refused = schema.fixed_batch != 1
        yield Finding(
            code="fixed_batch",
            level="error" if refused else "warning",
            message=f"the batch axis is fixed at {schema.fixed_batch}: "
            + ("ortkv cannot load it." if refused else "several rows are run one by one."),
            do="Export with a dynamic batch axis (a sample of two rows, where the exporter takes "
            "the axis from it).",
        )
    if schema.fixed_query_len not in (None, 1):
        yield Finding(
            code="fixed_query_len",
            level="error",
            message=f"a run takes exactly {schema.fixed_query_len} new tokens: expected one or "
            "any number, and ortkv cannot load it.",
            do="Export with a dynamic sequence axis.",
        )


def one_token_steps(subject: Subject) -> Iterator[Finding]:
    """Over a past a run takes one new token: text added to a sequence goes in token by token."""
    schema = subject.schema
    if schema is None or not schema.one_token_steps:
        return
    merged = any(helper.kind == "use_cache_branch" for helper in schema.helpers)
    first = merged or subject.prefill is not None
    what = "its branch with a past (use_cache_branch)" if merged else "a run over a past"
    cost = (
        "a first prompt is one run, but text added later (a chat's next turn, a long prompt's "
        "next chunk) costs a run a token"
        if first
        else "a prompt costs a run a token"
    )
    yield Finding(
        code="one_token_steps",
        level="warning",
        message=f"{what} takes one new token: {cost}.",
        do="Export again with a current exporter and a dynamic number of new tokens (optimum's "
        "single model.onnx; transformers' exporter with multi_token_decode=True).",
    )


def quantized_rows(subject: Subject) -> Iterator[Finding]:
    """Some products round their inputs, so that a row may depend on what runs beside it."""
    if subject.schema is None or not subject.schema.quantized:
        return
    yield Finding(
        code="quantized_rows",
        level="note",
        message="some products are quantized (such as MatMulNBits): a row's scores in a batch, or "
        "a prompt's in chunks, may differ from those alone in the last bits.",
        do="Nothing, unless results must be bitwise equal: then run rows alone.",
    )


def _takes_lengths(subject: Subject) -> bool:
    helpers = () if subject.schema is None else subject.schema.helpers
    return any(helper.kind in _LENGTHS or "mask" in helper.kind for helper in helpers)
