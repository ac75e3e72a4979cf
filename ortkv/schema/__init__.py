"""From a graph to its cache schema: three kinds of evidence, weighed into one answer."""

from ortkv.schema.prefill import derive_prefill
from ortkv.schema.resolve import derive
from ortkv.schema.spec import CacheEntry, CacheSchema, HelperInput, HelperKind, RowAlignment, Update

__all__ = [
    "CacheEntry",
    "CacheSchema",
    "HelperInput",
    "HelperKind",
    "RowAlignment",
    "Update",
    "derive",
    "derive_prefill",
]
