"""Damage to a graph, drawn at random: each kind breaks one thing that a reader may rely on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import onnx
from onnx import AttributeProto, TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ODD_INTS = (
    -(2**63),
    -(2**31),
    -99,
    -17,
    -5,
    -4,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    17,
    99,
    2**31,
    2**62,
)
OPS = (
    "Add", "Attention", "Cast", "Concat", "Constant", "ConstantOfShape", "Conv", "CumSum", "Cos",
    "DequantizeLinear", "Div", "Einsum", "EmbedLayerNormalization", "Equal", "Expand",
    "FusedMatMul", "Gather", "GatherBlockQuantized", "GroupQueryAttention", "Identity", "If",
    "Loop", "MatMul", "MatMulNBits", "Mul", "MultiHeadAttention", "Neg", "Not", "Range",
    "ReduceSum", "Reshape", "Scan", "ScatterElements", "ScatterND", "Shape", "Slice", "Softmax",
    "Split", "Squeeze", "Sub", "TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where",
)  # fmt: skip
DOMAINS = ("", "ai.onnx", "com.microsoft", "other")


def seeded(seed: object) -> random.Random:
    """Draws that are the same each time."""
    return random.Random(str(seed))  # noqa: S311 - nothing secret


def damaged(model: onnx.ModelProto, draw: random.Random) -> tuple[onnx.ModelProto, list[str]]:
    """A copy with one to four things broken, and the kinds of damage that were done."""
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    kinds = draw.choices(KINDS, k=draw.randint(1, 4))
    for kind in kinds:
        kind(broken, draw)
    return broken, [kind.__name__ for kind in kinds]


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)


def drop_part(model: onnx.ModelProto, draw: random.Random) -> None:
    """An input, an output or an attribute of a node, or all of them."""
    node = _node(model, draw)
    field = draw.choice([node.input, node.output, node.attribute])
    if field and draw.random() < 0.7:
        del field[draw.randrange(len(field))]
    else:
        del field[:]


def permute_names(model: onnx.ModelProto, draw: random.Random) -> None:
    names = _names(model, draw)
    mixed = draw.sample(list(names), len(names))
    del names[:]
    names.extend(mixed)


def repeat_name(model: onnx.ModelProto, draw: random.Random) -> None:
    names = _names(model, draw)
    names.extend(list(names) * draw.choice([1, 3]))


def lose_name(model: onnx.ModelProto, draw: random.Random) -> None:
    names = _names(model, draw)
    if names:
        names[draw.randrange(len(names))] = draw.choice(["", "nowhere"])


def cross_wire(model: onnx.ModelProto, draw: random.Random) -> None:
    """A node takes, or makes, what another makes: cycles, and names that stand for two values."""
    source, names = _node(model, draw), _names(model, draw)
    if source.output and names:
        names[draw.randrange(len(names))] = draw.choice(list(source.output))


def change_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(model, draw)
    if not node.attribute:
        return
    attribute = draw.choice(list(node.attribute))
    attribute.i = draw.choice(ODD_INTS)
    attribute.s = draw.choice([b"", b"\xff\xfe", b"->", b"ab,bc->ac", b"a,b,c->abc", b"...a->"])
    if attribute.ints and draw.random() < 0.6:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(ODD_INTS)
    else:
        del attribute.ints[:]
        attribute.ints.extend(draw.choices(ODD_INTS, k=draw.randint(0, 6)))


def add_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    names = ["axis", "axes", "perm", "start", "end", "num_heads", "kv_num_heads", "split", "value",
             "value_int", "value_ints", "value_float", "transA", "N", "equation"]  # fmt: skip
    attribute = AttributeProto(name=draw.choice(names), i=draw.choice(ODD_INTS))
    attribute.ints.extend(draw.choices(ODD_INTS, k=draw.randint(0, 6)))
    _node(model, draw).attribute.append(attribute)


def change_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    """A weight or a constant: its dims, its dtype, its bytes or its place."""
    tensors = [t for g in graphs_of(model.graph) for t in g.initializer]
    tensors += [a.t for g in graphs_of(model.graph) for n in g.node for a in n.attribute
                if a.HasField("t")]  # fmt: skip
    if not tensors:
        return
    tensor = draw.choice(tensors)
    what = draw.randrange(4)
    if what == 0:
        del tensor.dims[:]
        tensor.dims.extend(draw.choices(ODD_INTS, k=draw.randint(0, 5)))
    elif what == 1:
        tensor.data_type = draw.choice([*range(26), 999])
    elif what == 2:
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    else:
        tensor.data_location = TensorProto.EXTERNAL


def change_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    """Sound, but out of range: axes, indices, places to cut, shapes."""
    small = [t for g in graphs_of(model.graph) for n in g.node for a in n.attribute
             if (t := a.t).data_type == TensorProto.INT64 and len(t.dims) < 2]  # fmt: skip
    small += [t for g in graphs_of(model.graph) for t in g.initializer
              if t.data_type == TensorProto.INT64 and len(t.dims) < 2]  # fmt: skip
    if small:
        size = draw.choice([0, 1, 1, 2, 4, 6])
        values = draw.choices(ODD_INTS, k=size)
        tensor = draw.choice(small)
        tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.INT64, [size], values))


def drop_value(model: onnx.ModelProto, draw: random.Random) -> None:
    """A weight, an input, an output, a node or a stated shape."""
    graph = _graph(model, draw)
    field: Any = draw.choice(
        [graph.initializer, graph.input, graph.output, graph.node, graph.value_info]
    )
    if field:
        del field[draw.randrange(len(field))]


def repeat_value(model: onnx.ModelProto, draw: random.Random) -> None:
    graph = _graph(model, draw)
    field: Any = draw.choice([graph.initializer, graph.input, graph.output, graph.node])
    if field:
        field.append(draw.choice(list(field)))


def change_dims(model: onnx.ModelProto, draw: random.Random) -> None:
    graph = _graph(model, draw)
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return
    value = draw.choice(values)
    dims: list[Any] = [d.dim_value or d.dim_param or None for d in value.type.tensor_type.shape.dim]
    what = draw.randrange(4)
    if what == 0:
        dims = dims[1:]
    elif what == 1:
        dims.insert(draw.randint(0, len(dims)), draw.choice([None, "odd", 0, 1, 3, 2**62]))
    elif dims:
        dims[draw.randrange(len(dims))] = draw.choice([None, "odd", "batch", 0, 1, 2, 3, -4, 2**62])
    dtype = value.type.tensor_type.elem_type if draw.random() < 0.8 else draw.randrange(20)
    shape = None if what == 3 and draw.random() < 0.5 else dims
    value.CopyFrom(helper.make_tensor_value_info(value.name, dtype, shape))


def rename(model: onnx.ModelProto, draw: random.Random) -> None:
    """A value of the graph takes another name, on its list alone."""
    values = [*model.graph.input, *model.graph.output]
    if values:
        names = ["past_key_values.0.key", "present.1.value", "logits", "x" * 5000, "", "a\nb",
                 f"past_key_values.{'9' * 5000}.key", draw.choice(values).name]  # fmt: skip
        draw.choice(values).name = draw.choice(names)


def change_op(model: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(model, draw)
    node.op_type, node.domain = draw.choice(OPS), draw.choice(DOMAINS)


def wrap(model: onnx.ModelProto, draw: random.Random) -> None:
    """The whole graph goes into a branch of an If, or into the body of a Loop or a Scan."""
    graph = model.graph
    if not graph.node or sum(1 for _ in graphs_of(graph)) > 6:
        return
    body = onnx.GraphProto(name="body")
    body.node.extend(graph.node)
    body.output.extend(graph.output)
    outputs = [value.name for value in graph.output]
    kind = draw.choice(["If", "If", "Loop", "Scan"])
    names = ["then_branch", "else_branch"] if kind == "If" else ["body"]
    inputs = draw.choices([value.name for value in graph.input] or ["c"], k=draw.randint(0, 2))
    node = helper.make_node(kind, inputs, outputs[: draw.randint(0, len(outputs))])
    for name in draw.sample(names, draw.randint(1, len(names))):
        node.attribute.append(helper.make_attribute(name, body))
    del graph.node[:]
    graph.node.append(node)


def _graph(model: onnx.ModelProto, draw: random.Random) -> onnx.GraphProto:
    return draw.choice(list(graphs_of(model.graph)))


def _node(model: onnx.ModelProto, draw: random.Random) -> onnx.NodeProto:
    nodes = [n for graph in graphs_of(model.graph) for n in graph.node]
    nodes += [n for function in model.functions for n in function.node]
    return draw.choice(nodes) if nodes else model.graph.node.add()


def _names(model: onnx.ModelProto, draw: random.Random) -> Any:
    node = _node(model, draw)
    return draw.choice([node.input, node.input, node.output])


KINDS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    drop_part, drop_part, permute_names, repeat_name, lose_name, cross_wire, cross_wire,
    change_attribute, change_attribute, add_attribute, change_tensor, change_constant,
    change_constant, drop_value, repeat_value, change_dims, change_dims, rename, change_op,
    change_op, wrap,
)  # fmt: skip
