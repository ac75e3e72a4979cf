"""From a graph to its cache schema: three kinds of evidence, weighed into one answer."""

from ortkv.schema.prefill import derive_prefill
from ortkv.schema.resolve import derive
from ortkv.schema.spec import CacheEntry, CacheSchema, HelperInput, HelperKind, RowAlignment, Update
from ortkv.schema.stated import NOTHING, KvMap, read_map

__all__ = [
    "NOTHING",
    "CacheEntry",
    "CacheSchema",
    "HelperInput",
    "HelperKind",
    "KvMap",
    "RowAlignment",
    "Update",
    "derive",
    "derive_prefill",
    "read_map",
]
