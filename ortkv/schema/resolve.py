"""Weigh the evidence into one cache schema, or stop and show what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names, shapes, topology
from ortkv.schema.entries import Candidate, draft
from ortkv.schema.helper_inputs import FLOATS, find_tokens, helpers_of, table_of_tokens
from ortkv.schema.layers import numbered
from ortkv.schema.pairs import check_complete, check_pairs
from ortkv.schema.rows import row_alignment, takes_ragged_rows, takes_ragged_sources
from ortkv.schema.seen import seen
from ortkv.schema.sizes import graph_sizes, input_dims
from ortkv.schema.spec import CacheSchema
from ortkv.schema.states import state_pairs
from ortkv.schema.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import onnx

    from ortkv.schema.spec import HelperInput
    from ortkv.schema.topology import Flow
    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Dim, Signature, TensorSpec

_QUANTIZED = frozenset(
    {
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QLinearMatMul",
        "QMoE",
    }
)
"""Products in which an activation's rounding can depend on what else runs beside it."""
_CACHE_DTYPES = FLOATS | {"int8", "uint8"}
_NOT_LOGITS = ("hidden", "encoder", "embed")


def derive(signature: Signature, model: onnx.ModelProto) -> CacheSchema:
    """The cache schema of a decoder graph.

    Topology decides where it reaches a verdict; names and shapes confirm it or fill in.

    Raises: UnsupportedModel, listing what was seen, where a role stays open or two pieces
    of evidence leave different answers.
    """
    wiring = wire(model)
    sizes = graph_sizes(wiring, signature.inputs)
    ranks = {
        s.name: s.rank for s in signature.inputs if s.rank is not None and s.dtype in _CACHE_DTYPES
    }
    flows = topology.flows(wiring, sizes, ranks, [s.name for s in signature.outputs])
    tokens = _tokens(signature, wiring, flows)
    candidates, helpers = _sort_inputs(signature, wiring, flows, tokens)
    batch, query_len = (*input_dims(tokens), None, None)[:2]
    drafts = [draft(c, signature, sizes, batch) for c in candidates]
    entries = numbered(candidates, [d.entry for d in drafts])
    check_pairs(candidates, entries)
    presents = {entry.present for entry in entries if entry.present is not None}
    logits = _logits(signature, presents, table_of_tokens(tokens, wiring))
    check_complete(entries, signature, logits)
    batches = {d.fixed_batch for d in drafts} | {batch if isinstance(batch, int) else None}
    return CacheSchema(
        tokens=tokens.name,
        tokens_dtype=tokens.dtype,
        embeds=tokens.dtype in FLOATS,
        fixed_batch=_one_size(batches, "batch axis", signature),
        fixed_query_len=_query_len(query_len, candidates, signature),
        one_token_steps=query_len == 1
        or any(s.name in presents and shapes.grows_by_one(s) for s in signature.outputs),
        quantized=wiring.has(_QUANTIZED),
        row_alignment=row_alignment(candidates, helpers),
        takes_ragged_rows=takes_ragged_rows(wiring, candidates, helpers, logits.name),
        takes_ragged_sources=takes_ragged_sources(wiring, helpers, logits.name),
        helpers=tuple(helpers),
        logits=logits.name,
        logits_dtype=logits.dtype,
        logits_dims=logits.dims or (),
        entries=tuple(entries),
    )


def _tokens(signature: Signature, wiring: Wiring, flows: Collection[str]) -> TensorSpec:
    widths = {s.dims[-1] for s in signature.outputs if s.dims and s.dtype in FLOATS}
    found = find_tokens(signature.inputs, wiring, widths, flows)
    if len(found) == 1:
        return found[0]
    raise UnsupportedModel(
        f"{seen('inputs', signature.inputs)}: expected exactly one input of token ids "
        f"(integers, [batch, query_len], such as input_ids), found {len(found)}. Name it in "
        "ortkv.json or --kv-map."
    )


def _sort_inputs(
    signature: Signature, wiring: Wiring, flows: dict[str, Flow], tokens: TensorSpec
) -> tuple[list[Candidate], list[HelperInput]]:
    """Every input but the tokens is either cache or computed; anything else is an error."""
    inputs = [spec for spec in signature.inputs if spec != tokens]
    cached = [_joined(spec, flows, signature) for spec in inputs]
    candidates = [candidate for candidate in cached if candidate is not None]
    rest = [spec for spec, c in zip(inputs, cached, strict=True) if c is None]
    helpers = helpers_of(
        rest,
        wiring,
        [c.past for c in candidates],
        tokens,
        source_lengths={_source_length(c) for c in candidates},
    )
    rest = [spec for spec in rest if spec.name not in helpers]
    taken = {c.present.name for c in candidates if c.present is not None}
    states = state_pairs(rest, [s for s in signature.outputs if s.name not in taken], wiring)
    candidates += [
        Candidate(past=past, present=present, flow=flows.get(past.name),
                  named=names.read_past(past.name), is_state=True,
                  order=min((op.order for op in wiring.consumers(past.name)), default=0))
        for past, present in states
    ]  # fmt: skip
    paired = {past.name for past, _ in states}
    _check_known([spec for spec in rest if spec.name not in paired], signature, candidates)
    return candidates, list(helpers.values())


def _source_length(candidate: Candidate) -> Dim:
    """The dim of the source in a cache that the graph only reads; None for others."""
    flow, dims = candidate.flow, candidate.past.dims or ()
    if flow is None or flow.update is not None or flow.sequence is None:
        return None
    return dims[flow.sequence.axis]


def _joined(spec: TensorSpec, flows: dict[str, Flow], signature: Signature) -> Candidate | None:
    """The candidate of an input that the graph joins with new tokens, or attends to."""
    flow, named = flows.get(spec.name), names.read_past(spec.name)
    outputs = {output.name: output for output in signature.outputs}
    if flow is None or (flow.update is None and flow.role is None):
        return None
    present = outputs.get(flow.present or "")
    if flow.kernel is not None:
        return present and Candidate(
            past=spec, present=present, flow=flow, named=named, is_state=True, order=flow.order
        )
    if flow.role is None and (named is None or named.role in ("conv", "recurrent")):
        return None
    return Candidate(past=spec, present=present, flow=flow, named=named)


def _check_known(
    unknown: list[TensorSpec], signature: Signature, candidates: Sequence[Candidate]
) -> None:
    named = [spec for spec in unknown if names.read_past(spec.name) is not None]
    if named:
        raise UnsupportedModel(
            f"{seen('inputs', named)}: caches by their names, but no output is their present and "
            f"no attention reads them. {seen('outputs', signature.outputs)}. Export past and "
            "present together, or pair them in ortkv.json or with --kv-map."
        )
    if unknown:
        raise UnsupportedModel(
            f"{seen('inputs', unknown)}: neither cache nor an input ortkv knows how to compute. "
            "Export the graph without them, or say what they are in ortkv.json or with --kv-map."
        )
    if not candidates:
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}: no key/value cache goes in, so that each token "
            "would cost a run over all before it. Export the model with its cache "
            "(optimum: task text-generation-with-past)."
        )


def _one_size(sizes: set[int | None], what: str, signature: Signature) -> int | None:
    fixed = {size for size in sizes if size is not None}
    if len(fixed) > 1:
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}: the {what} is fixed at {sorted(fixed)}: expected "
            "one size throughout. Export it symbolic."
        )
    return next(iter(fixed), None)


def _query_len(dim: Dim, candidates: Sequence[Candidate], signature: Signature) -> int | None:
    lengths: set[int | None] = {c.flow.query_len for c in candidates if c.flow is not None}
    return _one_size(
        lengths | {dim if isinstance(dim, int) else None}, "number of new tokens", signature
    )


def _logits(signature: Signature, presents: set[str], table: tuple[int, int] | None) -> TensorSpec:
    rest = [s for s in signature.outputs if s.name not in presents]
    named = [s for s in rest if s.name == "logits"]
    fitting = [s for s in rest if s.dtype in FLOATS and s.rank in (2, 3)]
    of_vocab = [s for s in fitting if s.dims and table and s.dims[-1] == table[0]]
    others = [s for s in fitting if not any(word in s.name.lower() for word in _NOT_LOGITS)]
    hidden = [s for s in others if s.dims and table and s.dims[-1] == table[1] != table[0]]
    found = named or of_vocab or [s for s in others if s not in hidden]
    if len(found) != 1 or found[0].dtype not in FLOATS or found[0].rank not in (2, 3):
        raise UnsupportedModel(
            f"{seen('outputs', signature.outputs)}: expected one output of logits (float, "
            f"[batch, query_len, vocab_size]), found {len(found)} that could be it. Export the "
            "model with its language-model head, or name the output in ortkv.json or --kv-map."
        )
    return found[0]
