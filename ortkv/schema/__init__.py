"""From a graph to its cache schema: three kinds of evidence, weighed into one answer."""

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

__all__ = [
    "CacheEntry",
    "CacheSchema",
    "EmbeddingSchema",
    "EncoderSchema",
    "HelperInput",
    "HelperKind",
    "RowAlignment",
    "Update",
    "derive",
    "derive_embedding",
    "derive_encoder",
    "derive_prefill",
    "loaded_entries",
    "takes_source",
]
