"""Checks of what the cache costs: in each step, and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.doctor.finding import Finding, size
from ortkv.doctor.paths import is_free, ops_on
from ortkv.doctor.tensors import num_bytes, weights_of
from ortkv.signature import ONNX_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ortkv.doctor.subject import Subject
    from ortkv.schema import CacheEntry

UNKNOWN_CONTEXT = 2048
"""Tokens to state a cost at, where the model does not say how many it takes."""


def cache_copied(subject: Subject) -> Iterator[Finding]:
    """Present is past and new concatenated: each step copies the whole cache."""
    copied = [e for e in _entries(subject) if e.update == "concat"]
    if copied:
        yield Finding(
            code="cache_copied",
            level="warning",
            message=f"each step copies the cache to append to it (concat): {_cost(subject, copied)}"
            " for every token.",
            do="`ortkv export --from-onnx` rewrites the graph to update its cache in place "
            "(GroupQueryAttention); so does exporting with the ONNX Runtime GenAI builder.",
        )


def cache_transposed(subject: Subject) -> Iterator[Finding]:
    """The cache is kept in an axis order that attention does not take."""
    turned = [
        entry
        for entry in _entries(subject)
        if any(
            op.kind == "Transpose" and not is_free(subject.wiring, op)
            for op in ops_on(subject.wiring, entry.past or "")
        )
    ]
    if turned:
        layouts = ", ".join(sorted({entry.layout for entry in turned}))
        yield Finding(
            code="cache_transposed",
            level="warning",
            message=f"{len(turned)} cache tensors (layout {layouts}) are transposed whole in each "
            f"step: {_cost(subject, turned)} for every token.",
            do="Export with the cache in BHSD, the order in which attention reads it, or to "
            "GroupQueryAttention (`ortkv export --from-onnx`).",
        )


def cache_cast(subject: Subject) -> Iterator[Finding]:
    """The cache has another dtype than attention computes in."""
    cast = [
        entry
        for entry in _entries(subject)
        if any(
            op.kind == "Cast" and op.int_attribute("to", 0) != ONNX_TYPES[entry.dtype]
            for op in ops_on(subject.wiring, entry.past or "")
        )
    ]
    if cast:
        dtypes = ", ".join(sorted({entry.dtype for entry in cast}))
        yield Finding(
            code="cache_cast",
            level="warning",
            message=f"{len(cast)} cache tensors ({dtypes}) are cast whole to another dtype in each "
            f"step: {_cost(subject, cast)} for every token.",
            do="Export with one dtype for cache and attention, or with an attention op that reads "
            "the cache's dtype itself.",
        )


def memory(subject: Subject) -> Iterator[Finding]:
    """Weights and the cache of one row at full context against the memory there is."""
    weights = sum(num_bytes(t) for model in subject.models for t in weights_of(model))
    context = subject.context_length
    if subject.schema is None or context is None:
        return
    cache = subject.schema.bytes_per_token * context
    needed = f"{size(weights)} of weights and {size(cache)} of cache at the full context of "
    needed += f"{context} tokens, a row"
    if subject.providers[0] != "CPUExecutionProvider":
        yield Finding(
            code="memory_needed",
            level="note",
            message=f"the device must hold {needed}.",
            do="Compare with the device's free memory (nvidia-smi).",
        )
    elif subject.memory_bytes is not None and weights + cache > subject.memory_bytes:
        yield Finding(
            code="memory_short",
            level="error" if weights > subject.memory_bytes else "warning",
            message=f"{needed}, are more than the {size(subject.memory_bytes)} of memory that are "
            "free: long sequences will end in out_of_memory or in swapping.",
            do="Keep sequences shorter, free memory, or export with smaller weights "
            "(`ortkv export --precision int4`).",
        )


def context_unknown(subject: Subject) -> Iterator[Finding]:
    """No file says how many tokens a sequence may have."""
    unread = any(fault.code == "config_error" for fault in subject.faults)
    if subject.context_length is None and not unread:
        yield Finding(
            code="context_unknown",
            level="note",
            message="neither config.json nor genai_config.json states a context length: ortkv does "
            "not stop where the model's positions end, and text beyond is worthless.",
            do="Copy the original model's config.json beside the graph.",
        )


def _entries(subject: Subject) -> tuple[CacheEntry, ...]:
    entries = () if subject.schema is None else subject.schema.entries
    return tuple(entry for entry in entries if entry.past is not None)


def _cost(subject: Subject, entries: Iterable[CacheEntry]) -> str:
    tokens = subject.context_length or UNKNOWN_CONTEXT
    num = tokens * sum(entry.bytes_per_token for entry in entries)
    full = "the full context of " if subject.context_length else ""
    return f"{size(num)} at {full}{tokens} tokens,"
