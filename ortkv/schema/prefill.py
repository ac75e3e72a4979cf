"""The schema of a graph for first runs, over the cache of the graph for the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ortkv.errors import UnsupportedModel
from ortkv.schema import names
from ortkv.schema.helper_inputs import find_tokens, helpers_of
from ortkv.schema.seen import seen
from ortkv.schema.settled import settled_helpers
from ortkv.schema.stated import NOTHING
from ortkv.schema.wiring import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

    from ortkv.schema.spec import CacheEntry, CacheSchema, HelperInput
    from ortkv.schema.stated import KvMap
    from ortkv.signature import Signature


def derive_prefill(
    signature: Signature, model: onnx.ModelProto, steps: CacheSchema, stated: KvMap = NOTHING
) -> CacheSchema:
    """Presents are matched by name: the same, or the same layer and role.

    What is stated of inputs holds for those of the same name here.

    Raises: UnsupportedModel where a present is missing or an input is not understood.
    """
    wiring = wire(model)
    outputs = {spec.name: spec for spec in signature.outputs}
    presents = [_first_present(entry, list(outputs)) for entry in steps.entries]
    logits = outputs.get(steps.logits)
    tokens = [spec for spec in signature.inputs if spec.name == stated.tokens]
    tokens = tokens or find_tokens(signature.inputs, wiring, {steps.vocab_size})
    fed = settled_helpers(signature, wiring, stated)
    rest = [spec for spec in signature.inputs if spec not in tokens and spec.name not in fed]
    helpers: Mapping[str, HelperInput] = {}
    if tokens:
        helpers = helpers_of(rest, wiring, (), tokens[0])
    if None in presents or logits is None or len(tokens) != 1 or len(helpers) < len(rest):
        raise UnsupportedModel(
            f"{seen('inputs', signature.inputs)}; {seen('outputs', signature.outputs)}: expected "
            "a graph for first runs with the same cache and logits as the graph for the steps "
            f"({', '.join(str(entry.present) for entry in steps.entries[:2])}, ...) and no past. "
            "Export both together."
        )
    return replace(
        steps,
        tokens=tokens[0].name,
        tokens_dtype=tokens[0].dtype,
        fixed_query_len=None,
        helpers=(*helpers.values(), *fed.values()),
        logits_dtype=logits.dtype,
        logits_dims=logits.dims or (),
        entries=tuple(
            replace(entry, past=None, present=present)
            for entry, present in zip(steps.entries, presents, strict=True)
        ),
    )


def _first_present(entry: CacheEntry, outputs: list[str]) -> str | None:
    if entry.present in outputs:
        return entry.present
    alike = [
        name
        for name in outputs
        if (named := names.read_present(name)) is not None
        and (named.layer, named.role) == (entry.layer, entry.role)
    ]
    return alike[0] if len(alike) == 1 else None
