"""Check of the last product: for the last position alone, or for every one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.doctor.finding import Finding, size
from ortkv.schema.wiring import wire
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from ortkv.doctor.subject import Subject
    from ortkv.schema import CacheSchema
    from ortkv.schema.wiring import Op, Wiring

PROMPT_LEN = 2000
_LITTLE = 64 * 2**20
"""Bytes of logits below which they are no more than worth a note."""
_PRODUCTS = frozenset({"MatMul", "MatMulNBits", "Gemm", "MatMulInteger", "FusedMatMul"})
_BETWEEN = frozenset(
    {
        "Add", "Cast", "Div", "DynamicQuantizeLinear", "Identity", "LayerNormalization", "Mul",
        "Pow", "ReduceMean", "Reshape", "RMSNormalization", "SimplifiedLayerNormalization",
        "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Squeeze", "Sub", "Tanh",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Ops between the last layer's product and the logits: a norm, a scale, a cap."""
_SHAPED = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
_SELECTS = frozenset({"Gather", "GatherND", "GatherElements", "Slice"})


def logits_everywhere(subject: Subject) -> Iterator[Finding]:
    """A prompt's run computes logits of every position, though the last alone are used."""
    schema, model = subject.prefill_schema, subject.prefill
    if schema is None or model is None:
        schema, model = subject.schema, subject.model
    if schema is None or _for_last_alone(schema, model, subject):
        return
    vocab_size = schema.vocab_size or subject.config.get("vocab_size")
    if not isinstance(vocab_size, int):
        return
    prompt_len = min(PROMPT_LEN, subject.context_length or PROMPT_LEN)
    num = prompt_len * vocab_size * numpy_dtype(schema.logits_dtype).itemsize
    yield Finding(
        code="logits_everywhere",
        level="note" if num < _LITTLE else "warning",
        message=f"logits are computed for every position of a prompt: {size(num)} and as many "
        f"rows of the last product at {prompt_len} tokens in one run (ortkv's runs have at most "
        "512).",
        do="Export with logits of the last position alone (the GenAI builder's prune_lm_head, "
        "transformers' logits_to_keep).",
    )


def _for_last_alone(schema: CacheSchema, model: onnx.ModelProto, subject: Subject) -> bool:
    dims = schema.logits_dims
    if len(dims) == 2 or (len(dims) == 3 and dims[1] == 1) or schema.fixed_query_len == 1:
        return True
    if any(helper.kind == "num_logits_to_keep" for helper in schema.helpers):
        return True
    wiring = subject.wiring if model is subject.model else wire(model)
    branches = [leaf for leaf, result in wiring.leaves.items() if result == schema.logits]
    return all(_is_selected(wiring, start) for start in branches or [schema.logits])


def _is_selected(wiring: Wiring, start: str) -> bool:
    """Whether positions are chosen between the last layer and the logits."""
    front, seen = [(start, 0)], set[str]()
    while front:
        name, products = front.pop()
        op = wiring.makers.get(name)
        if op is None or name in seen:
            continue
        seen.add(name)
        if op.kind in _SELECTS and not _is_constant(wiring, op.input(0)):  # an embedding
            if not _is_on_vocab(wiring, op):
                return True
            front.append((op.input(0), products))
        products += op.kind in _PRODUCTS
        if products < 2 and (op.kind in _BETWEEN or op.kind in _PRODUCTS):
            data = op.inputs[:1] if op.kind in _SHAPED else op.inputs
            data = [i for i in data if i and not _is_constant(wiring, i)]
            front.extend((i, products) for i in data)
    return False


def _is_constant(wiring: Wiring, name: str) -> bool:
    """Weights, or weights moved about (an embedding tied to the last product)."""
    while name in wiring.makers and len(wiring.makers[name].inputs) == 1:
        name = wiring.makers[name].inputs[0]
    return name in wiring.constants


def _is_on_vocab(wiring: Wiring, op: Op) -> bool:
    """Whether the selection is along the last axis: a padded vocabulary cut to size."""
    if op.kind == "Slice":
        axes = wiring.ints(op.input(3))
        return axes is not None and set(axes) <= {-1, 2}
    return op.int_attribute("axis", 0) in (-1, 2)
