"""Files that are no sound ONNX model: each gets a named error, none a traceback of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from ortkv.errors import ModelFileError, OrtkvError, UnsupportedModel
from ortkv.signature import MAX_PROTOBUF_BYTES, read_model, signature_of

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
GRAPHS = sorted(FIXTURES.glob("*/*model*.onnx"))


def graph_of(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    """x -> y, with further inputs."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("x", 1, ["n"]), *inputs], [info("y", 1, ["n"])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def read(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "model.onnx")
    return read_model(folder / "model.onnx")


def is_read_or_refused(data: bytes, file: Path) -> bool:
    """Anything but an error of ortkv's own fails the test. Returns: whether it was read."""
    file.write_bytes(data)
    try:
        signature_of(read_model(file))
    except OrtkvError:
        return False
    return True


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda p: p.parent.name)
def test_a_truncated_graph_is_refused_or_read(graph: Path, tmp_path: Path) -> None:
    """# hostile 25."""
    data = graph.read_bytes()
    cuts = [len(data) * i // 100 for i in range(100)]
    read = [is_read_or_refused(data[:cut], tmp_path / "model.onnx") for cut in cuts]
    assert not any(read[:50]), "the inputs and outputs are in a graph's last bytes"
    assert is_read_or_refused(data, tmp_path / "model.onnx")


@pytest.mark.parametrize("graph", GRAPHS[:4], ids=lambda p: p.parent.name)
def test_random_damage_is_refused_or_read(graph: Path, tmp_path: Path) -> None:
    """Single bytes, in the graph's text for the most part: names that are no UTF-8 among them.

    # hostile 25.
    """
    data = graph.read_bytes()
    rng = np.random.default_rng(7)
    read = []
    for _ in range(150):
        damaged = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 5)):
            damaged[at] = rng.choice([0, 0x80, 0xFF, int(rng.integers(256))])
        read.append(is_read_or_refused(bytes(damaged), tmp_path / "model.onnx"))
    assert any(read)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """protobuf gives bytes where a string is no UTF-8, and no error."""
    for word in (b"Identity", b"xname"):
        node = helper.make_node("Identity", ["xname"], ["y"])
        model = graph_of(helper.make_tensor_value_info("xname", 1, ["n"]))
        del model.graph.node[:]
        model.graph.node.append(node)
        data = model.SerializeToString().replace(word, b"\xff" * len(word))
        (tmp_path / "model.onnx").write_bytes(data)
        with pytest.raises(ModelFileError, match="not an ONNX model"):
            signature_of(read_model(tmp_path / "model.onnx"))


def test_a_file_too_large_for_a_protobuf_is_refused_unread(tmp_path: Path) -> None:
    """Sparse: no bytes are written.  # hostile 25."""
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(MAX_PROTOBUF_BYTES + 1)
    with pytest.raises(ModelFileError, match="2147483648 bytes: expected at most"):
        read_model(tmp_path / "model.onnx")


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent.onnx"):
        with pytest.raises(ModelFileError, match=place.name):
            read_model(place)


@pytest.mark.parametrize("kind", ["sequence", "optional", "sparse_tensor", "map", "none"])
def test_an_input_that_is_no_tensor_is_refused(tmp_path: Path, kind: str) -> None:
    """# hostile 28."""
    tensor = helper.make_tensor_type_proto(1, ["n"])
    value = onnx.ValueInfoProto(name="past")
    if kind == "sequence":
        value.type.CopyFrom(helper.make_sequence_type_proto(tensor))
    elif kind == "optional":
        value.type.CopyFrom(helper.make_optional_type_proto(tensor))
    elif kind == "sparse_tensor":
        value.type.CopyFrom(helper.make_sparse_tensor_type_proto(1, ["n"]))
    elif kind == "map":
        value.type.CopyFrom(helper.make_map_type_proto(TensorProto.INT64, tensor))
    found = "has no type" if kind == "none" else f"is a {kind}:"
    with pytest.raises(UnsupportedModel, match=f"input 'past' {found}"):
        signature_of(read(graph_of(value), tmp_path))


@pytest.mark.parametrize("place", ["input", "output", "node", "node and input", "weight"])
def test_a_name_that_stands_for_two_values_is_refused(tmp_path: Path, place: str) -> None:
    """# hostile 27."""
    model = graph_of()
    if place in ("input", "output"):
        values = getattr(model.graph, place)
        values.append(values[0])
    elif place == "node":
        model.graph.node.append(model.graph.node[0])
    elif place == "node and input":
        model.graph.node.append(helper.make_node("Identity", ["y"], ["x"]))
    else:
        model.graph.initializer.append(helper.make_tensor("y", 1, [1], [0.0]))
    with pytest.raises(UnsupportedModel, match=r"the name '[xy]' stands for two values"):
        read(model, tmp_path)


def test_outputs_left_out_and_weights_listed_as_inputs_are_no_clash(tmp_path: Path) -> None:
    model = graph_of(helper.make_tensor_value_info("w", 1, [1]))
    model.graph.initializer.append(helper.make_tensor("w", 1, [1], [0.0]))
    for name in ("a", "b"):
        model.graph.node.append(helper.make_node("Dropout", ["w"], [name, ""]))
    signature = signature_of(read(model, tmp_path))
    assert [spec.name for spec in signature.inputs] == ["x"]


def test_sizes_are_fixed_named_or_unknown(tmp_path: Path) -> None:
    model = graph_of(helper.make_tensor_value_info("a", 7, [2, "s", None, -1, 0]))
    spec = signature_of(read(model, tmp_path)).inputs[1]
    assert spec.dims == (2, "s", None, None, 0)
