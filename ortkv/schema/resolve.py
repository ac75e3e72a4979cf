"""Weigh the evidence into one cache schema, or stop and show what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names, shapes, topology
from ortkv.schema.entries import Candidate, draft
from ortkv.schema.helper_inputs import FLOATS, INTEGERS, find_tokens, helpers_of, table_of_tokens
from ortkv.schema.layers import numbered
from ortkv.schema.pairs import check_complete, check_pairs
from ortkv.schema.rows import row_alignment, takes_ragged_rows, takes_ragged_sources
from ortkv.schema.seen import seen
from ortkv.schema.settled import settled_flow, settled_helpers, settled_layers
from ortkv.schema.sizes import graph_sizes, input_dims
from ortkv.schema.spec import CacheSchema
from ortkv.schema.stated import NOTHING, check_names, settle
from ortkv.schema.states import state_pairs
from ortkv.schema.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import onnx

    from ortkv.schema.flow import Flow
    from ortkv.schema.spec import HelperInput, Role
    from ortkv.schema.stated import KvMap, StatedEntry
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


def derive(signature: Signature, model: onnx.ModelProto, stated: KvMap = NOTHING) -> CacheSchema:
    """The cache schema of a decoder graph.

    What is stated comes first. Topology decides where it reaches a verdict; names and shapes
    confirm it or fill in.

    Raises: UnsupportedModel, listing what was seen, where a role stays open or two pieces
    of evidence leave different answers; ConfigError where what is stated is not of this graph.
    """
    check_names(stated, signature)
    wiring = wire(model)
    sizes = graph_sizes(wiring, signature.inputs)
    ranks = {
        s.name: s.rank for s in signature.inputs if s.rank is not None and s.dtype in _CACHE_DTYPES
    }
    flows = topology.flows(wiring, sizes, ranks, [s.name for s in signature.outputs])
    tokens = _tokens(signature, wiring, flows, stated)
    candidates, helpers = _sort_inputs(signature, wiring, flows, tokens, stated)
    batch, query_len = (*input_dims(tokens), None, None)[:2]
    drafts = [draft(c, signature, sizes, batch) for c in candidates]
    entries = settled_layers(numbered(candidates, [d.entry for d in drafts]), stated)
    check_pairs(candidates, entries)
    presents = {entry.present for entry in entries if entry.present is not None}
    logits = _logits(signature, presents, table_of_tokens(tokens, wiring), stated)
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


def _tokens(
    signature: Signature, wiring: Wiring, flows: Collection[str], stated: KvMap
) -> TensorSpec:
    if stated.tokens is not None:
        return _stated_tokens(signature, stated)
    widths = {s.dims[-1] for s in signature.outputs if s.dims and s.dtype in FLOATS}
    found = find_tokens(signature.inputs, wiring, widths, flows)
    if len(found) == 1 and found[0].rank == 1:
        raise UnsupportedModel(
            f"{found[0]}: token ids without a batch axis: expected [batch, query_len]. Export the "
            "model with tokens of two axes, or put an Unsqueeze before it."
        )
    if len(found) == 1:
        return found[0]
    raise UnsupportedModel(
        f"{seen('inputs', signature.inputs)}: expected exactly one input of token ids "
        f"(integers, [batch, query_len], such as input_ids), found {len(found)}. "
        + settle(inputs={"tokens": found[0].name if found else "<input>"})
    )


def _stated_tokens(signature: Signature, stated: KvMap) -> TensorSpec:
    spec = next(spec for spec in signature.inputs if spec.name == stated.tokens)
    if (spec.dtype in INTEGERS and spec.rank == 2) or (spec.dtype in FLOATS and spec.rank == 3):
        return spec
    raise UnsupportedModel(
        f"{stated.source}: inputs.tokens is {spec}: expected integers of [batch, query_len], or "
        "floats of [batch, query_len, hidden]. Name the input that is."
    )


def _sort_inputs(
    signature: Signature,
    wiring: Wiring,
    flows: dict[str, Flow],
    tokens: TensorSpec,
    stated: KvMap,
) -> tuple[list[Candidate], list[HelperInput]]:
    """Every input but the tokens is either cache or computed; anything else is an error."""
    fed = settled_helpers(signature, wiring, stated)
    inputs = [spec for spec in signature.inputs if spec != tokens and spec.name not in fed]
    cached = [_cached(spec, flows, signature, stated, wiring) for spec in inputs]
    candidates = [candidate for candidate in cached if candidate is not None]
    rest = [spec for spec, c in zip(inputs, cached, strict=True) if c is None]
    helpers = helpers_of(
        [spec for spec in rest if spec.name not in stated.entries],
        wiring,
        [c.past for c in candidates],
        tokens,
        source_lengths={_source_length(c) for c in candidates},
    )
    rest = [spec for spec in rest if spec.name not in helpers]
    taken = {c.present.name for c in candidates if c.present is not None}
    untaken = [s for s in signature.outputs if s.name not in taken]
    states: list[tuple[TensorSpec, TensorSpec | None]] = [*state_pairs(rest, untaken, wiring)]
    paired = {past.name for past, _ in states}
    states += [(spec, None) for spec in rest if spec.name not in paired and _is_state(spec, stated)]
    candidates += [
        _state(past, present, signature, flows.get(past.name), wiring, stated)
        for past, present in states
    ]
    paired = {past.name for past, _ in states}
    rest = [spec for spec in rest if spec.name not in paired]
    _check_complete([e for spec in rest if (e := stated.entries.get(spec.name)) is not None])
    _check_known(rest, signature, candidates, flows)
    return candidates, [*helpers.values(), *fed.values()]


def _state(
    past: TensorSpec,
    shown: TensorSpec | None,
    signature: Signature,
    flow: Flow | None,
    wiring: Wiring,
    stated: KvMap,
) -> Candidate:
    """The candidate of a state: its present as stated, else as the graph shows it."""
    told = stated.entries.get(past.name)
    convolved = flow is not None and flow.kernel is not None
    present = next(
        (s for s in signature.outputs if told is not None and s.name == told.present), shown
    )
    return Candidate(
        past=past,
        present=present,
        flow=flow,
        named=names.read_past(past.name),
        is_state=True,
        order=flow.order if convolved and flow is not None else _first_use(wiring, past.name),
        stated=told,
        is_shown=present == shown,
    )


def _is_state(spec: TensorSpec, stated: KvMap) -> bool:
    told = stated.entries.get(spec.name)
    return told is not None and told.is_state and told.present is not None


def _first_use(wiring: Wiring, name: str) -> int:
    return min((op.order for op in wiring.consumers(name)), default=0)


def _check_complete(unfounded: Sequence[StatedEntry]) -> None:
    if unfounded:
        told = unfounded[0]
        missing = [key for key in ("present", "role", "layout") if getattr(told, key) is None]
        raise UnsupportedModel(
            f"{told.where} states {told.past!r}, of which the graph shows too little: expected "
            f"present, role and layout, found no {', '.join(missing)}. State them too."
        )


def _cached(
    spec: TensorSpec, flows: dict[str, Flow], signature: Signature, stated: KvMap, wiring: Wiring
) -> Candidate | None:
    """The candidate of an input that is stated or shown to be cache, other than by its state."""
    told = stated.entries.get(spec.name)
    shown = _joined(spec, flows, signature)
    if told is None:
        return shown
    if shown is not None and shown.is_state and (told.is_state or not (told.role or told.update)):
        return _state(spec, shown.present, signature, shown.flow, wiring, stated)
    outputs = {output.name: output for output in signature.outputs}
    flow = settled_flow(told, flows.get(spec.name))
    if flow is None or told.is_state:
        return None
    flow = replace(flow, order=flow.order or _first_use(wiring, spec.name))
    return Candidate(
        past=spec,
        present=outputs.get(flow.present or ""),
        flow=flow,
        named=names.read_past(spec.name),
        stated=told,
        is_shown=shown is not None and _is_as_shown(flow, shown),
    )


def _is_as_shown(flow: Flow, shown: Candidate) -> bool:
    """Whether nothing that is stated contradicts what the graph shows."""
    graphs = shown.flow
    return (
        graphs is not None
        and flow.update == graphs.update
        and graphs.present in (None, flow.present)
        and graphs.role in (None, (flow.role or "").removeprefix("cross_"))
    )


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
    unknown: list[TensorSpec],
    signature: Signature,
    candidates: Sequence[Candidate],
    flows: dict[str, Flow],
) -> None:
    named = [spec for spec in unknown if names.read_past(spec.name) is not None]
    if named:
        raise UnsupportedModel(
            f"{seen('inputs', named)}: caches by their names, but no output is their present and "
            f"no attention reads them. {seen('outputs', signature.outputs)}. Export past and "
            "present together, or pair them, each with its own present, role and layout. "
            + settle(entries=[_blank(spec, flows) for spec in named])
        )
    caches = [
        spec
        for spec in unknown
        if spec.dtype in FLOATS and (spec.rank or 0) >= topology.LEAST_CACHE_RANK
    ]
    if unknown:
        numbers = {spec.name: 1.0 for spec in unknown if spec not in caches}
        raise UnsupportedModel(
            f"{seen('inputs', unknown)}: neither cache nor an input ortkv knows how to compute. "
            "Export the graph without them, or say what they are: a number each under values, a "
            "kind under helpers, or a cache under entries with its own layer and role. "
            + settle(
                **({"inputs": {"values": numbers}} if numbers else {}),
                **({"entries": [_blank(spec, flows) for spec in caches]} if caches else {}),
            )
        )
    if not candidates:
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}: no key/value cache goes in, so that each token "
            "would cost a run over all before it. Export the model with its cache "
            "(optimum: task text-generation-with-past)."
        )


def _blank(spec: TensorSpec, flows: dict[str, Flow]) -> dict[str, object]:
    """An entry to fill in: its role alone, where the graph shows the rest."""
    flow = flows.get(spec.name)
    if flow is not None and flow.update is not None and flow.present is not None:
        told: list[Role | None] = [f.role for f in flows.values() if f.update is not None]
        return {"past": spec.name, "role": _missing_role(told)}
    return {
        "past": spec.name,
        "present": "<output>",
        "layer": 0,
        "role": "key",
        "layout": "BHSD",
    }


def _missing_role(told: Sequence[Role | None]) -> Role:
    """Of keys and values, those that the graph shows fewer of."""
    return "value" if told.count("key") > told.count("value") else "key"


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


def _logits(
    signature: Signature, presents: set[str], table: tuple[int, int] | None, stated: KvMap
) -> TensorSpec:
    rest = [s for s in signature.outputs if s.name not in presents]
    named = [s for s in rest if s.name == "logits"]
    fitting = [s for s in rest if s.dtype in FLOATS and s.rank in (2, 3)]
    of_vocab = [s for s in fitting if s.dims and table and s.dims[-1] == table[0]]
    others = [s for s in fitting if not any(word in s.name.lower() for word in _NOT_LOGITS)]
    hidden = [s for s in others if s.dims and table and s.dims[-1] == table[1] != table[0]]
    found = named or of_vocab or [s for s in others if s not in hidden]
    if stated.logits is not None:
        found = [s for s in rest if s.name == stated.logits]
    if len(found) != 1 or found[0].dtype not in FLOATS or found[0].rank not in (2, 3):
        raise UnsupportedModel(
            f"{seen('outputs', found or signature.outputs)}: expected one output of logits (float, "
            f"[batch, query_len, vocab_size]), found {len(found)} that could be it. Export the "
            "model with its language-model head, or name the output. "
            + settle(outputs={"logits": found[0].name if found else "<output>"})
        )
    return found[0]
