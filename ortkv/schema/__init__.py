"""From a graph to its cache schema: three kinds of evidence, weighed into one answer."""

from ortkv.schema.alternatives import alternatives
from ortkv.schema.companions import (
    EmbeddingSchema,
    EncoderSchema,
    derive_embedding,
    derive_encoder,
    loaded_entries,
    takes_source,
)
from ortkv.schema.prefill import derive_prefill
from ortkv.schema.resolve import derive
from ortkv.schema.spec import CacheEntry, CacheSchema, HelperInput, HelperKind, RowAlignment, Update
from ortkv.schema.stated import NOTHING, KvMap, read_map

__all__ = [
    "NOTHING",
    "CacheEntry",
    "CacheSchema",
    "EmbeddingSchema",
    "EncoderSchema",
    "HelperInput",
    "HelperKind",
    "KvMap",
    "RowAlignment",
    "Update",
    "alternatives",
    "derive",
    "derive_embedding",
    "derive_encoder",
    "derive_prefill",
    "loaded_entries",
    "read_map",
    "takes_source",
]
