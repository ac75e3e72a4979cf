"""Checks of the graph against the runtime: versions it takes, and kernels it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortkv.doctor.finding import Finding
from ortkv.errors import RuntimeMissing
from ortkv.runtime import accepts
from ortkv.signature import ONNX_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ortkv.doctor.subject import Subject
    from ortkv.schema.wiring import Op

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_HALF = ("float16", "bfloat16")
_FLOATS = ("float32", *_HALF)
DOCUMENTED: dict[str, dict[str, tuple[str, ...]]] = {
    _CPU: {
        "DecoderMaskedSelfAttention": (),
        "PackedAttention": (),
        "PackedMultiHeadAttention": (),
        "PagedAttention": (),
    },
    _CUDA: {
        "DecoderMaskedMultiHeadAttention": ("float32", "float16"),
        "DecoderMaskedSelfAttention": ("float32", "float16"),
        "DynamicQuantizeLinear": (),
        "DynamicQuantizeMatMul": (),
        "GroupQueryAttention": _HALF,
        "MatMulIntegerToFloat": (),
        "PagedAttention": _HALF,
        "QMoE": _HALF,
        "SparseAttention": _HALF,
    },
}
"""What a provider that is not installed lacks: the dtypes its kernels of an op take; any op that
is not here is taken to have one.  Source: onnxruntime, docs/OperatorKernels.md."""
_TYPED = frozenset(
    {
        "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention", "GroupQueryAttention",
        "MatMul", "MultiHeadAttention", "PagedAttention", "QMoE", "SparseAttention",
    }
)  # fmt: skip
"""Ops whose type parameter T is judged too: it is that of the first inputs whose dtype is told."""
_TYPED_INPUTS = 5
_NO_KERNEL = frozenset({"Constant", "If"})
"""Constant becomes a weight at load; If is control flow, which every build has."""


def runtime_too_old(subject: Subject) -> Iterator[Finding]:
    """The graph's IR or opset version is above what onnxruntime takes: asked by tiny graphs."""
    ir = subject.model.ir_version
    opset = _opsets(subject).get("ai.onnx", 1)
    try:
        # Each alone: a version that every onnxruntime takes stands for the other.
        newest_ir = _newest(ir, lambda version: accepts(_tiny(ir=version, opset=13)))
        newest_opset = _newest(opset, lambda version: accepts(_tiny(ir=8, opset=version)))
    except RuntimeMissing:
        return  # among the faults already
    for what, stated, newest in (("IR", ir, newest_ir), ("opset", opset, newest_opset)):
        if newest < stated:
            yield Finding(
                code="runtime_too_old",
                level="error",
                message=f"the graph is of {what} version {stated}, and this onnxruntime takes at "
                f"most {newest}: it makes no session.",
                do="Upgrade onnxruntime, or export for an older version.",
            )


def missing_kernels(subject: Subject) -> Iterator[Finding]:
    """Ops without a kernel on the provider: on none at all, or on the CPU alone."""
    nowhere, fallen = set[str](), set[str]()
    ops = subject.wiring.makers.values()
    kinds = {(op.domain, op.kind, _float_of(subject, op)): op for op in ops}
    for (_, kind, dtype), op in kinds.items():
        if (
            op.kind in _NO_KERNEL
            or _has_body(op, subject)
            or _has_kernel(subject, subject.providers[0], op)
        ):
            continue
        label = " ".join(filter(None, (dtype, kind)))
        elsewhere = any(_has_kernel(subject, name, op) for name in subject.providers[1:])
        (fallen if elsewhere else nowhere).add(label)
    if nowhere:
        yield Finding(
            code="missing_kernel",
            level="error",
            message=f"{', '.join(sorted(nowhere))}: no kernel on {' or '.join(subject.providers)}, "
            "so that no session can be made.",
            do="Choose a provider that has one, upgrade onnxruntime, or export in another dtype or "
            "without this op.",
        )
    if fallen:
        yield Finding(
            code="missing_kernel",
            level="warning",
            message=f"{', '.join(sorted(fallen))}: no kernel on {subject.providers[0]}. They run "
            "on the CPU, and what they read and write, a cache included, is copied to and fro in "
            "each step.",
            do="Export in float16 (GroupQueryAttention's CUDA kernels are for half precision), or "
            "use provider 'cpu'.",
        )


def half_on_cpu(subject: Subject) -> Iterator[Finding]:
    """float16 products where the CPU has none: onnxruntime casts to float32 around them."""
    if subject.providers[0] != _CPU or _listed(subject, _CPU, "MatMul", "float16"):
        return
    ops = subject.wiring.makers.values()
    if any(op.kind == "MatMul" and _float_of(subject, op) == "float16" for op in ops):
        yield Finding(
            code="half_on_cpu",
            level="warning",
            message="the weights are float16, and this onnxruntime's CPU provider multiplies in "
            "float32: weights take twice their size in memory, and values are cast in each step.",
            do="On the CPU use a float32 or an int4 export (`ortkv export --precision`).",
        )


def _newest(stated: int, takes: Callable[[int], bool]) -> int:
    """The highest version at or below ``stated`` that is taken."""
    if takes(stated):
        return stated
    low, high = 0, stated
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) else (low, middle)
    return low


def _tiny(*, ir: int, opset: int) -> bytes:
    from onnx import helper

    a, b = (helper.make_tensor_value_info(name, ONNX_TYPES["float32"], [1]) for name in "ab")
    graph = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "tiny", [a], [b])
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir).SerializeToString()


def _opsets(subject: Subject) -> dict[str, int]:
    return {o.domain or "ai.onnx": o.version for o in subject.model.opset_import}


def _has_body(op: Op, subject: Subject) -> bool:
    """Whether the op's definition is made of others, which stand in where it has no kernel."""
    from onnx import defs

    if op.domain != "ai.onnx":
        return False
    try:
        schema: Any = defs.get_schema(op.kind, _opsets(subject).get("ai.onnx", 1), "")
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _has_kernel(subject: Subject, provider: str, op: Op) -> bool:
    dtype = _float_of(subject, op)
    if provider == _CPU and dtype == "float16":
        dtype = None  # onnxruntime casts around what the CPU lacks
    if any(kernel.provider == provider for kernel in subject.kernels or ()):
        return _listed(subject, provider, op.kind, dtype, op.domain)
    takes = DOCUMENTED.get(provider, {}).get(op.kind, _FLOATS)
    return bool(takes) and (dtype is None or dtype in takes)


def _listed(
    subject: Subject, provider: str, kind: str, dtype: str | None, domain: str = "ai.onnx"
) -> bool:
    """Whether an installed provider has a kernel for the op, its version and its T."""
    since = _since(kind, domain, _opsets(subject).get(domain, 1))
    wanted = None if dtype is None else f"tensor({'float' if dtype == 'float32' else dtype})"
    return any(
        kernel.provider == provider
        and (kernel.domain or "ai.onnx", kernel.op) == (domain, kind)
        and kernel.versions[0] <= since <= kernel.versions[1]
        and (wanted is None or wanted in kernel.types.get("T", (wanted,)))
        for kernel in subject.kernels or ()
    )


def _since(kind: str, domain: str, opset: int) -> int:
    """The version of the op's definition that an opset has."""
    from onnx import defs

    try:
        return defs.get_schema(kind, opset, "" if domain == "ai.onnx" else domain).since_version
    except defs.SchemaError:
        return opset


def _float_of(subject: Subject, op: Op) -> str | None:
    """The floating dtype of an op whose kernels are told apart by it; None where it is not told."""
    if op.kind not in _TYPED:
        return None
    told = {spec.name: spec.dtype for spec in subject.signature.inputs}
    names = {number: name for name, number in ONNX_TYPES.items()}
    for wire in op.inputs[:_TYPED_INPUTS]:
        constant = subject.wiring.constants.get(wire)
        dtype = told.get(wire) if constant is None else names.get(constant.data_type)
        if dtype in _FLOATS:
            return dtype
    return None
