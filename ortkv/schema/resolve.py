"""Weigh the evidence into one cache schema, or stop and show what was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names, shapes, topology
from ortkv.schema.helper_inputs import helper_of, is_tokens
from ortkv.schema.spec import CacheEntry, CacheSchema
from ortkv.schema.wiring import wire
from ortkv.signature import ONNX_TYPES, TensorSpec

if TYPE_CHECKING:
    import onnx

    from ortkv.schema.names import Named
    from ortkv.schema.spec import Evidence, HelperInput, Role
    from ortkv.schema.topology import Flow
    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Dim, Signature

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
_FLOATS = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A past input with what each kind of evidence says of it."""

    past: TensorSpec
    flow: Flow | None
    named: Named | None


def derive(signature: Signature, model: onnx.ModelProto) -> CacheSchema:
    """The cache schema of a decoder graph.

    Topology decides where it reaches a verdict; names and shapes confirm it or fill in.

    Raises: UnsupportedModel, listing what was seen, where a role stays open or two pieces
    of evidence leave different answers.
    """
    tokens = _tokens(signature)
    wiring = wire(model)
    candidates, helpers = _sort_inputs(signature, wiring)
    batch, query_len = tokens.dims or (None, None)
    drafts = [_entry(c, signature, candidates, batch) for c in candidates]
    entries = _numbered(candidates, drafts)
    _check_pairs(entries, signature)
    presents = {entry.present for entry in entries}
    logits = _logits(signature, presents)
    return CacheSchema(
        tokens=tokens.name,
        tokens_dtype=tokens.dtype,
        fixed_batch=batch if isinstance(batch, int) else None,
        fixed_query_len=query_len if isinstance(query_len, int) else None,
        one_token_steps=query_len == 1
        or any(s.name in presents and shapes.grows_by_one(s) for s in signature.outputs),
        quantized=wiring.has(_QUANTIZED),
        row_alignment="start" if any(e.update == "in_place" for e in entries) else "end",
        takes_ragged_rows=_takes_ragged_rows(candidates, entries, helpers),
        helpers=tuple(helpers),
        logits=logits.name,
        logits_dtype=logits.dtype,
        logits_dims=logits.dims or (),
        entries=tuple(entries),
    )


def _takes_ragged_rows(
    candidates: list[_Candidate], entries: list[CacheEntry], helpers: list[HelperInput]
) -> bool:
    kinds = {helper.kind for helper in helpers}
    if any(
        c.flow is not None and c.flow.update == "concat" and "GroupQueryAttention" in c.flow.path
        for c in candidates
    ):
        return False
    if any(e.update == "in_place" for e in entries):
        return bool(kinds & {"mask_2d", "last_positions"})
    return {"mask_2d", "positions"} <= kinds


def derive_prefill(signature: Signature, steps: CacheSchema) -> CacheSchema:
    """The schema of a graph for first runs, over the cache of the graph for the steps.

    Its presents are matched by name: the same, or the same layer and role.

    Raises: UnsupportedModel where a present is missing or an input is not understood.
    """
    tokens = _tokens(signature)
    helpers = [helper_of(spec) for spec in signature.inputs if spec != tokens]
    presents = [_first_present(entry, signature) for entry in steps.entries]
    if None in helpers or None in presents:
        raise UnsupportedModel(
            f"{_seen('inputs', signature.inputs)}; {_seen('outputs', signature.outputs)}: expected "
            "a graph for first runs with the same cache as the graph for the steps "
            f"({', '.join(entry.present for entry in steps.entries[:2])}, ...) and no past. "
            "Export both together."
        )
    logits = _logits(signature, {name for name in presents if name is not None})
    return replace(
        steps,
        tokens=tokens.name,
        tokens_dtype=tokens.dtype,
        fixed_query_len=None,
        helpers=tuple(helper for helper in helpers if helper is not None),
        logits=logits.name,
        logits_dtype=logits.dtype,
        logits_dims=logits.dims or (),
        entries=tuple(
            replace(entry, past=None, present=present)
            for entry, present in zip(steps.entries, presents, strict=True)
            if present is not None
        ),
    )


def _first_present(entry: CacheEntry, signature: Signature) -> str | None:
    outputs = [spec.name for spec in signature.outputs]
    if entry.present in outputs:
        return entry.present
    alike = [
        name
        for name in outputs
        if (named := names.read_present(name)) is not None
        and (named.layer, named.role) == (entry.layer, entry.role)
    ]
    return alike[0] if len(alike) == 1 else None


def _tokens(signature: Signature) -> TensorSpec:
    found = [spec for spec in signature.inputs if is_tokens(spec)]
    if len(found) == 1:
        return found[0]
    raise UnsupportedModel(
        f"{_seen('inputs', signature.inputs)}: expected exactly one input of token ids "
        f"(integers, [batch, query_len], such as input_ids), found {len(found)}."
    )


def _sort_inputs(
    signature: Signature, wiring: Wiring
) -> tuple[list[_Candidate], list[HelperInput]]:
    """Every input but the tokens is either cache or computed; anything else is an error."""
    ranks = {s.name: s.rank for s in signature.inputs if s.rank is not None and not is_tokens(s)}
    flows = topology.flows(wiring, ranks, [s.name for s in signature.outputs])
    candidates: list[_Candidate] = []
    helpers: list[HelperInput] = []
    unknown: list[TensorSpec] = []
    for spec in signature.inputs:
        flow, named, helper = flows.get(spec.name), names.read_past(spec.name), helper_of(spec)
        if is_tokens(spec):
            continue
        if flow is not None:
            candidates.append(_Candidate(past=spec, flow=flow, named=named))
        elif helper is not None:
            helpers.append(helper)
        elif named is not None:
            candidates.append(_Candidate(past=spec, flow=None, named=named))
        else:
            unknown.append(spec)
    if unknown:
        raise UnsupportedModel(
            f"{_seen('inputs', unknown)}: neither cache nor an input ortkv knows how to compute. "
            "Export the graph without them, or with the names that optimum or the ONNX Runtime "
            "GenAI builder use."
        )
    if not candidates:
        raise UnsupportedModel(
            f"{_seen('inputs', signature.inputs)}: no key/value cache goes in, so that each token "
            "would cost a run over all before it. Export the model with its cache "
            "(optimum: task text-generation-with-past)."
        )
    return candidates, helpers


def _entry(
    candidate: _Candidate, signature: Signature, peers: list[_Candidate], batch: Dim
) -> CacheEntry:
    """One entry, its layer still provisional."""
    past, flow, named = candidate.past, candidate.flow, candidate.named
    present = _present(candidate, signature)
    role = _role(candidate)
    by_shape = shapes.sequence_axis(past, present)
    sequence = flow.sequence_axis if flow is not None else by_shape
    if sequence is None:
        sequence = by_shape
    if sequence is None or past.dtype != present.dtype or past.dtype not in ONNX_TYPES:
        raise UnsupportedModel(
            f"{past} and {present}: a cache pair needs one dtype and one axis that grows with "
            "the tokens, and these do not show which. Export with named dynamic axes."
        )
    if past.dims is not None and isinstance(past.dims[sequence], int):
        raise UnsupportedModel(
            f"{past}: its sequence axis is fixed at {past.dims[sequence]}: expected a symbolic "
            "one, which a growing cache needs. Export with a dynamic past length."
        )
    stacks = () if flow is None else flow.stacks
    head_dim = None if flow is None else flow.head_dim
    axes = shapes.axes(
        past, present, sequence=sequence, stacks=stacks, batch=batch, head_dim=head_dim
    )
    if axes is None:
        raise UnsupportedModel(
            f"{past}: expected the number of key/value heads and head_dim as fixed sizes in a "
            "tensor whose other axes are batch, sequence and stacks. Export with static head sizes."
        )
    return CacheEntry(
        layer=named.layer if named is not None else len(peers),
        role=role,
        past=past.name,
        present=present.name,
        layout=axes.layout,
        update=flow.update if flow is not None else "concat",
        dtype=past.dtype,
        num_kv_heads=axes.num_kv_heads,
        head_dim=axes.head_dim,
        num_layers=axes.num_layers,
        evidence=_evidence(candidate, present, role, by_shape == sequence),
    )


def _present(candidate: _Candidate, signature: Signature) -> TensorSpec:
    outputs = {spec.name: spec for spec in signature.outputs}
    if candidate.flow is not None:
        return outputs[candidate.flow.present]
    named = candidate.named
    for spec in signature.outputs:
        present = names.read_present(spec.name)
        if present is not None and named is not None and present == named:
            return spec
    raise UnsupportedModel(
        f"{candidate.past}: a cache goes in under this name, but no output is its present. "
        f"{_seen('outputs', signature.outputs)}. Export past and present together."
    )


def _role(candidate: _Candidate) -> Role:
    """What the graph does with it; its name only where the graph leaves that open."""
    if candidate.flow is not None and candidate.flow.role is not None:
        return candidate.flow.role
    if candidate.named is not None:
        return candidate.named.role
    raise UnsupportedModel(
        f"{candidate.past}: a cache, but neither its use in the graph nor its name says whether "
        "it holds keys or values."
    )


def _evidence(
    candidate: _Candidate, present: TensorSpec, role: Role, shape_agrees: bool
) -> tuple[Evidence, ...]:
    """The kinds of evidence that agree with the verdict."""
    found: list[Evidence] = []
    if candidate.flow is not None:
        found.append("topology")
    named = candidate.named
    if named is not None and named.role == role and names.read_present(present.name) == named:
        found.append("name")
    if shape_agrees:
        found.append("shape")
    return tuple(found)


def _numbered(candidates: list[_Candidate], drafts: list[CacheEntry]) -> list[CacheEntry]:
    """Layers by name where the names' order is the order of use; else by order of use."""
    ranks: dict[str, int] = {}
    roles = {entry.role for entry in drafts}
    trusted = all(candidate.named is not None for candidate in candidates)
    for role in roles:
        group = [(c, e) for c, e in zip(candidates, drafts, strict=True) if e.role == role]
        if any(c.flow is None for c, _ in group):
            continue
        group.sort(key=lambda pair: pair[0].flow.order if pair[0].flow else 0)
        layers = [e.layer for _, e in group]
        trusted = trusted and layers == sorted(set(layers))
        ranks |= {c.past.name: rank for rank, (c, _) in enumerate(group)}
    if not trusted:
        drafts = [
            replace(e, layer=ranks.get(c.past.name, e.layer))
            for c, e in zip(candidates, drafts, strict=True)
        ]
    return sorted(drafts, key=lambda entry: (entry.layer, entry.role))


def _check_pairs(entries: list[CacheEntry], signature: Signature) -> None:
    """Each present feeds one past, and every layer has the same roles."""
    presents = [entry.present for entry in entries]
    slots = [(entry.layer, entry.role) for entry in entries]
    if len(set(presents)) < len(presents) or len(set(slots)) < len(slots):
        pairs = ", ".join(f"{e.past} -> {e.present} (layer {e.layer} {e.role})" for e in entries)
        raise UnsupportedModel(
            f"the cache is ambiguous, two inputs claim one place: {pairs}. Export again, "
            "with one past and one present for the key and the value of each layer."
        )
    claimed = set(presents)
    orphans = [
        spec
        for spec in signature.outputs
        if names.read_present(spec.name) is not None and spec.name not in claimed
    ]
    keys = {e.layer for e in entries if e.role == "key"}
    values = {e.layer for e in entries if e.role == "value"}
    if orphans or keys != values:
        raise UnsupportedModel(
            f"the cache is incomplete: keys of layers {sorted(keys)}, values of layers "
            f"{sorted(values)}, {_seen('outputs without a past', orphans)}. Export again, with "
            "one past and one present for the key and the value of each layer."
        )


def _logits(signature: Signature, presents: set[str]) -> TensorSpec:
    rest = [s for s in signature.outputs if s.name not in presents]
    named = [s for s in rest if s.name == "logits"]
    found = named or [s for s in rest if s.dtype in _FLOATS and s.rank in (2, 3)]
    if len(found) != 1 or found[0].dtype not in _FLOATS or found[0].rank not in (2, 3):
        raise UnsupportedModel(
            f"{_seen('outputs', signature.outputs)}: expected one output of logits (float, "
            f"[batch, query_len, vocab_size]), found {len(found)} that could be it."
        )
    return found[0]


def _seen(what: str, specs: list[TensorSpec] | tuple[TensorSpec, ...]) -> str:
    shown = ", ".join(str(spec) for spec in specs[:8]) or "none"
    more = f" and {len(specs) - 8} more" if len(specs) > 8 else ""
    return f"{what}: {shown}{more}"
