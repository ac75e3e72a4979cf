"""The graphs beside a decoder: what goes into an encoder or an embedding graph, and comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names
from ortkv.schema.helper_inputs import FLOATS, INTEGERS, find_tokens, helpers_of, table_of_tokens
from ortkv.schema.seen import seen
from ortkv.schema.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from ortkv.schema.spec import CacheEntry, CacheSchema, HelperInput
    from ortkv.signature import Dim, Signature, TensorSpec

_STATES = ("last_hidden_state", "encoder_hidden_states", "hidden_states", "encoder_outputs")


@dataclass(frozen=True, kw_only=True)
class EncoderSchema:
    """How an encoder is fed, and which of its outputs the decoder takes.

    ``source``: its input of token ids [batch, source_len], or of features [batch, size, frames]
    where ``takes_features``. ``num_tokens``: the ids there are, where the graph shows it.
    ``states``: its output [batch, source_len, hidden], None where the decoder takes none.
    ``cross``: the decoder's pasts, each with the output that holds its keys or values.
    """

    source: str
    source_dtype: str
    source_dims: tuple[Dim, ...]
    takes_features: bool
    num_tokens: int | None
    helpers: tuple[HelperInput, ...]
    states: str | None
    cross: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class EmbeddingSchema:
    """Names of an embedding graph's input of token ids and its output of embeddings."""

    ids: str
    ids_dtype: str
    embeds: str


def loaded_entries(schema: CacheSchema, first: CacheSchema | None = None) -> tuple[CacheEntry, ...]:
    """Cross-attention's entries that the decoder does not compute itself in its first run.

    first: the schema of a graph of its own for first runs.
    """
    first = first or schema
    computes = any(helper.kind == "encoder_states" for helper in first.helpers)
    return tuple(
        entry
        for entry, its_first in zip(schema.entries, first.entries, strict=True)
        if entry.update == "constant" and not (computes and its_first.present is not None)
    )


def takes_source(schema: CacheSchema) -> bool:
    """Whether a decoder looks at an encoder's output."""
    of_encoder = ("encoder_states", "encoder_mask")
    return any(e.update == "constant" for e in schema.entries) or any(
        helper.kind in of_encoder for helper in schema.helpers
    )


def derive_encoder(
    signature: Signature, model: onnx.ModelProto, decoder: CacheSchema, first: CacheSchema | None
) -> EncoderSchema:
    """The schema of the encoder of a decoder.

    first: the schema of the decoder's own graph for first runs, if any.
    Raises: UnsupportedModel where an input is not understood, or an output is missing.
    """
    wiring = wire(model)
    ids = find_tokens([s for s in signature.inputs if s.dtype in INTEGERS], wiring, ())
    features = [s for s in signature.inputs if s.dtype in FLOATS and s.rank in (2, 3)]
    source = (ids or features)[0] if len(ids or features) == 1 else None
    rest = [s for s in signature.inputs if s is not source]
    helpers = [] if source is None else list(helpers_of(rest, wiring, (), source).values())
    if source is None or len(helpers) < len(rest):
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}: expected an encoder's one input of token ids "
            "(integers, [batch, source_len]) or features (floats), and besides it masks or "
            "positions. Export the encoder with these alone."
        )
    table = table_of_tokens(source, wiring) if ids else None
    cross = _cross(signature, loaded_entries(decoder, first))
    return EncoderSchema(
        source=source.name,
        source_dtype=source.dtype,
        source_dims=source.dims or (),
        takes_features=not ids,
        num_tokens=None if table is None else table[0],
        helpers=tuple(_own(helper) for helper in helpers),
        states=_states(signature, decoder, first, [output for _, output in cross]),
        cross=tuple(cross),
    )


def derive_embedding(signature: Signature, width: Dim) -> EmbeddingSchema:
    """The input and the output of an embedding graph. ``width``: of what the decoder takes.

    Raises: UnsupportedModel where there is not exactly one of each.
    """
    ids = [s for s in signature.inputs if s.dtype in INTEGERS and s.rank == 2]
    embeds = [s for s in signature.outputs if s.dtype in FLOATS and _is_wide(s, width)]
    if len(ids) != 1 or len(signature.inputs) != 1 or len(embeds) != 1:
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}; {seen('outputs', signature.outputs)}: expected "
            "an embedding graph with one input of token ids [batch, query_len] and one output of "
            f"embeddings [batch, query_len, {width}]. Export it with these alone."
        )
    return EmbeddingSchema(ids=ids[0].name, ids_dtype=ids[0].dtype, embeds=embeds[0].name)


def _own(helper: HelperInput) -> HelperInput:
    """To the encoder itself a mask of the source is one of its own tokens."""
    return replace(helper, kind="mask_2d") if helper.kind == "encoder_mask" else helper


def _cross(signature: Signature, entries: Sequence[CacheEntry]) -> list[tuple[str, str]]:
    """Each past with the output of its own name, or of its layer and role."""
    outputs = [spec.name for spec in signature.outputs]
    found: list[tuple[str, str]] = []
    for entry in entries:
        alike = [name for name in outputs if _is_of(entry, name)]
        same = [name for name in outputs if name in (entry.past, entry.present)]
        if entry.past is None or len(same or alike) != 1:
            raise UnsupportedModel(
                f"{seen('outputs', signature.outputs)}: expected among an encoder's outputs the "
                f"keys or values that the decoder reads from {entry.past}. Export encoder and "
                "decoder together."
            )
        found.append((entry.past, (same or alike)[0]))
    return found


def _is_of(entry: CacheEntry, output: str) -> bool:
    named = names.read_present(output) or names.read_past(output)
    return named is not None and (named.layer, named.role) == (entry.layer, entry.role)


def _states(
    signature: Signature, decoder: CacheSchema, first: CacheSchema | None, others: Sequence[str]
) -> str | None:
    schemas = [decoder, *([] if first is None else [first])]
    wanted = [h for schema in schemas for h in schema.helpers if h.kind == "encoder_states"]
    if not wanted:
        return None
    fitting = [
        s
        for s in signature.outputs
        if s.name not in others and s.dtype in FLOATS and _is_wide(s, wanted[0].dims[-1])
    ]
    named = [s for s in fitting if s.name == wanted[0].name or s.name in _STATES]
    found = named if len(fitting) > 1 else fitting
    if len(found) != 1:
        raise UnsupportedModel(
            f"{seen('outputs', signature.outputs)}: expected an encoder's one output of states "
            f"[batch, source_len, {wanted[0].dims[-1]}], found {len(found)} that could be it. "
            "Export encoder and decoder together."
        )
    return found[0].name


def _is_wide(spec: TensorSpec, width: Dim) -> bool:
    """Whether it is [batch, length, width], as far as sizes are known."""
    if spec.dims is None or len(spec.dims) != len("BSD"):
        return False
    last = spec.dims[-1]
    return not (isinstance(last, int) and isinstance(width, int)) or last == width
