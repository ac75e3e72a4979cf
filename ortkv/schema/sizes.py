"""Sizes as the graph computes them: each wire's dims, as polynomials in the inputs' own symbols.

Enough of shape inference to follow a Reshape: what exporters write between ``Shape`` and
``Reshape`` is a few integer ops on small vectors, and these are run here on symbols.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortkv.schema.reordered import MAX_RANK, squeezed, transposed, unsqueezed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ortkv.schema.wiring import Op, Wiring
    from ortkv.signature import Dim, TensorSpec

Monomial = tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """A sum of products of symbols: monomial (sorted symbols) -> coefficient."""

    terms: frozenset[tuple[Monomial, int]]

    @staticmethod
    def of(dim: int | str) -> Size:
        """A number or a symbol."""
        if isinstance(dim, int):
            return Size(frozenset({((), dim)} if dim else ()))
        return Size(frozenset({((dim,), 1)}))

    @property
    def number(self) -> int | None:
        """Its value, where no symbol is in it."""
        if not self.terms:
            return 0
        ((monomial, factor), *more) = self.terms
        return factor if not more and not monomial else None

    @property
    def is_small(self) -> bool:
        """Whether it is of a size that a product with another such can be computed."""
        return len(self.terms) <= _MAX_TERMS and all(
            len(monomial) <= MAX_RANK and abs(factor) < _MAX_NUMBER
            for monomial, factor in self.terms
        )

    def __add__(self, other: Size) -> Size:
        total = Counter(dict(self.terms))
        for monomial, factor in other.terms:
            total[monomial] += factor
        return Size(frozenset((m, f) for m, f in total.items() if f))

    def __mul__(self, other: Size) -> Size:
        total = Counter[Monomial]()
        for m1, f1 in self.terms:
            for m2, f2 in other.terms:
                total[tuple(sorted((*m1, *m2)))] += f1 * f2
        return Size(frozenset((m, f) for m, f in total.items() if f))

    def over(self, other: Size) -> Size | None:
        """The quotient by a single product, where it comes out even."""
        if len(other.terms) != 1:
            return Size.of(1) if self == other else None
        ((divisor, by),) = other.terms
        parts: list[tuple[Monomial, int]] = []
        for monomial, factor in self.terms:
            rest = Counter(monomial)
            rest.subtract(Counter(divisor))
            if factor % by or min(rest.values(), default=0) < 0:
                return None
            parts.append((tuple(sorted(rest.elements())), factor // by))
        return Size(frozenset(parts))


Sizes = tuple["Size | None", ...]
_MINUS_ONE = Size.of(-1)
_MAX_VALUES = 16
_MAX_TERMS = 64
_MAX_NUMBER = 2**63
"""Bounds on what is computed, so that no graph makes it grow with every op: x * x, of that ..."""
_SAME_SHAPE = frozenset(
    {
        "Identity", "Cast", "Neg", "Sqrt", "Reciprocal", "Tanh", "Sigmoid", "Erf", "Relu", "Gelu",
        "Softmax", "Exp", "Cos", "Sin", "Not", "Clip", "LayerNormalization", "CumSum",
        "SimplifiedLayerNormalization", "RMSNormalization", "RotaryEmbedding", "Dropout",
        "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "QuickGelu", "FastGelu",
        "BiasGelu", "Trilu", "ScatterND", "ScatterElements", "TensorScatter",
    }
)  # fmt: skip
_BROADCAST = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Equal", "Greater", "Less",
     "GreaterOrEqual", "LessOrEqual", "Max", "Min", "Mod"}
)  # fmt: skip
_PASSED_ON = frozenset({"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"})
"""Ops that hand a vector of sizes on as it is: a scalar counts as a vector of one."""
_VALUE_OPS = _PASSED_ON | {"Concat", "Gather", "Slice", "Add", "Sub", "Mul", "Div"}


@dataclass
class GraphSizes:
    """Dims of every wire, and the values of those that carry sizes."""

    wiring: Wiring
    dims: dict[str, Sizes] = field(default_factory=dict[str, Sizes])
    values: dict[str, list[Size | None]] = field(default_factory=dict[str, "list[Size | None]"])

    def of(self, wire: str) -> Sizes | None:
        """A wire's dims, each None where it is not known; None without even a rank."""
        if not wire:
            return None
        if wire in self.wiring.constants:
            return tuple(Size.of(n) for n in self.wiring.constants[wire].dims)
        return self.dims.get(wire)

    def ints(self, wire: str) -> list[Size | None] | None:
        """The sizes that a small integer tensor holds."""
        if wire in self.values:
            return self.values[wire]
        constant = self.wiring.ints(wire)
        return None if constant is None else [Size.of(n) for n in constant]


def input_dims(spec: TensorSpec) -> tuple[int | str, ...]:
    """An input's dims, those without a name under one of their own."""
    return tuple(
        f"{spec.name}.{axis}" if dim is None else dim for axis, dim in enumerate(spec.dims or ())
    )


def graph_sizes(wiring: Wiring, inputs: Iterable[TensorSpec]) -> GraphSizes:
    """Infer what the ops of a graph make of its inputs' dims, in the graph's order."""
    found = GraphSizes(wiring)
    stated: dict[str, tuple[Dim, ...]] = dict(wiring.stated)
    stated |= {spec.name: input_dims(spec) for spec in inputs if spec.dims is not None}
    for name, dims in stated.items():
        found.dims[name] = tuple(None if d is None else Size.of(d) for d in dims)
    for op in wiring.ops:
        _note(found, op)
        for out in op.outputs:
            if out in wiring.leaves and out in found.dims:
                found.dims.setdefault(wiring.leaves[out], found.dims[out])
    return found


def _note(found: GraphSizes, op: Op) -> None:
    out = op.output()
    if not out:
        return
    values = _values(found, op)
    if values is not None and len(values) <= _MAX_VALUES:
        found.values[out] = values
    stated = found.dims.get(out)
    if stated is None or None in stated or len(op.outputs) > 1:
        dims = _dims(found, op)
        if (
            dims is not None
            and len(dims) <= MAX_RANK
            and (stated is None or len(stated) == len(dims))
        ):
            known = stated or (None,) * len(dims)
            found.dims[out] = tuple(a or b for a, b in zip(known, dims, strict=True))


def _values(found: GraphSizes, op: Op) -> list[Size | None] | None:
    if op.kind == "Shape":
        dims = found.of(op.input(0))
        end = op.attribute("end")
        stop = None if end is None else end.i
        return None if dims is None else list(dims[op.int_attribute("start", 0) : stop])
    if op.kind not in _VALUE_OPS:
        return None
    parts = [found.ints(name) for name in op.inputs]
    if not parts or parts[0] is None:
        return None
    if op.kind in _PASSED_ON:
        return parts[0]
    if op.kind == "Concat":
        known = [part for part in parts if part is not None]
        return [v for part in known for v in part] if len(known) == len(parts) else None
    if op.kind in ("Gather", "Slice"):
        return _taken(found.wiring, op, parts[0])
    if op.kind in ("Add", "Sub", "Mul", "Div") and len(parts) == 2 and parts[1] is not None:
        return _arithmetic(op.kind, parts[0], parts[1])
    return None


def _taken(wiring: Wiring, op: Op, values: list[Size | None]) -> list[Size | None] | None:
    first = wiring.ints(op.input(1))
    if op.kind == "Gather":
        known = first is not None and all(-len(values) <= i < len(values) for i in first)
        return [values[i] for i in first] if known and first is not None else None
    last, step = wiring.ints(op.input(2)), wiring.ints(op.input(4)) or [1]
    return values[first[0] : last[0] : step[0]] if first and last and step[0] else None


def _arithmetic(
    kind: str, left: list[Size | None], right: list[Size | None]
) -> list[Size | None] | None:
    width = max(len(left), len(right))
    if not (left and right) or {len(left), len(right)} - {1, width}:
        return None
    pairs = zip(left * (width // len(left)), right * (width // len(right)), strict=True)
    found = [None if a is None or b is None else _ARITHMETIC[kind](a, b) for a, b in pairs]
    return [None if size is None or not size.is_small else size for size in found]


_ARITHMETIC: dict[str, Callable[[Size, Size], Size | None]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a + b * _MINUS_ONE,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a.over(b),
}


def _dims(found: GraphSizes, op: Op) -> Sizes | None:
    first = found.of(op.input(0))
    if op.kind == "Constant" or first is None:
        return None
    if op.kind in _SAME_SHAPE:
        return first
    if op.kind in _BROADCAST:
        return _broadcast([found.of(name) for name in op.inputs])
    rule = _DIM_RULES.get(op.kind)
    return None if rule is None else rule(found, op, first)


def _broadcast(shapes: list[Sizes | None]) -> Sizes:
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    columns = zip(*((Size.of(1),) * (rank - len(s)) + s for s in known), strict=True)
    return tuple(_widest(column) for column in columns)


def _widest(sizes: tuple[Size | None, ...]) -> Size | None:
    """A size that is not 1 is the result's, whatever the others are: they are 1 or the same."""
    wide = [size for size in sizes if size is not None and size.number != 1]
    return wide[0] if wide else None if None in sizes else Size.of(1)


def _reshape(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    target = found.ints(op.input(1))
    if target is None:
        return None
    sizes = [
        dims[i] if size is not None and size.number == 0 and i < len(dims) else size
        for i, size in enumerate(target)
    ]
    open_ones = [i for i, size in enumerate(sizes) if size is None or size.number == -1]
    if len(open_ones) == 1:
        rest = [size for i, size in enumerate(sizes) if i not in open_ones and size is not None]
        whole, taken = product(dims), product(rest)
        sizes[open_ones[0]] = None if whole is None or taken is None else whole.over(taken)
    return tuple(None if s is not None and s.number == -1 else s for s in sizes)


def product(sizes: Iterable[Size | None]) -> Size | None:
    """All sizes multiplied; None where one is not known, or the product grows too large."""
    whole: Size | None = Size.of(1)
    for size in sizes:
        if size is None or whole is None:
            return None
        whole = whole * size
        whole = whole if whole.is_small else None
    return whole


def _gather(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    indices, axis = found.of(op.input(1)), op.place(len(dims))
    return None if indices is None or axis is None else dims[:axis] + indices + dims[axis + 1 :]


def _concat(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    shapes = [found.of(name) for name in op.inputs]
    axis = op.place(len(dims))
    if axis is None:
        return None
    total: Size | None = Size.of(0)
    for shape in shapes:
        if shape is None or len(shape) != len(dims):
            return None
        total = None if total is None or shape[axis] is None else total + (shape[axis] or total)
    columns = zip(*(shape for shape in shapes if shape is not None), strict=True)
    known = [next((size for size in column if size is not None), None) for column in columns]
    known[axis] = total
    return tuple(known)


def _matmul(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    other = found.of(op.input(1))
    if other is None or len(other) < 2 or len(dims) < 2:
        return None
    return (*_broadcast([dims[:-2], other[:-2]]), dims[-2], other[-1])


def _nbits(_: GraphSizes, op: Op, dims: Sizes) -> Sizes:
    return (*dims[:-1], Size.of(op.int_attribute("N", 0)))


def _split(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    axis = op.place(len(dims))
    if axis is None:
        return None
    attribute = op.attribute("split")
    parts = list(attribute.ints) if attribute is not None else found.wiring.ints(op.input(1))
    whole = dims[axis]
    even = None if whole is None else whole.over(Size.of(len(op.outputs)))
    sizes = [even] * len(op.outputs) if parts is None else [Size.of(part) for part in parts]
    for size, out in zip(sizes, op.outputs, strict=False):
        found.dims.setdefault(out, (*dims[:axis], size, *dims[axis + 1 :]))
    return None


def _slice(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    axes = found.wiring.ints(op.input(3))
    if axes is None or not dims:
        return (None,) * len(dims)
    cut = {i % len(dims) for i in axes}
    return tuple(None if i in cut else d for i, d in enumerate(dims))


def _expand(found: GraphSizes, op: Op, dims: Sizes) -> Sizes | None:
    target = found.ints(op.input(1))
    return None if target is None else _broadcast([dims, tuple(target)])


_DIM_RULES: dict[str, Callable[[GraphSizes, Op, Sizes], Sizes | None]] = {
    "Transpose": lambda _, op, dims: transposed(op, dims),
    "Reshape": _reshape,
    "Unsqueeze": lambda found, op, dims: unsqueezed(found.wiring, op, dims, Size.of(1)),
    "Squeeze": lambda found, op, dims: squeezed(found.wiring, op, dims),
    "Gather": _gather,
    "Concat": _concat,
    "MatMul": _matmul,
    "MatMulNBits": _nbits,
    "Split": _split,
    "Slice": _slice,
    "Expand": _expand,
}
