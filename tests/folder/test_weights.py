"""No path in a graph leads outside its folder, and every tensor's bytes are there."""

import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from ortkv.errors import ModelFileError, OrtkvError, UnsafeModel
from ortkv.weights import check_external_data

NUM_BYTES = 64


def external(location: str, **stated: object) -> TensorProto:
    """Sixteen float32 numbers said to be in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[16])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **stated}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model_of(tensor: TensorProto, place: str = "initializer") -> onnx.ModelProto:
    """A model that holds ``tensor`` in one of the places a graph can have one."""
    graph = helper.make_graph([], "g", [], [], [tensor] if place == "initializer" else [])
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    model = helper.make_model(graph)
    if place == "constant":
        model.graph.node.append(constant)
    elif place == "subgraph":
        branch = helper.make_graph([], "b", [], [], [tensor])
        model.graph.node.append(
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        )
    elif place == "constant in a subgraph":
        body = helper.make_graph([constant], "b", [], [])
        model.graph.node.append(helper.make_node("Loop", ["", ""], ["y"], body=body))
    elif place == "function":
        opset = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("d", "f", [], ["w"], [constant], opset))
    elif place == "sparse":
        model.graph.sparse_initializer.add(values=tensor, dims=[16])
    return model


PLACES = ["initializer", "constant", "subgraph", "constant in a subgraph", "function", "sparse"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model's folder, with a secret outside it."""
    (tmp_path / "secret.bin").write_bytes(bytes(NUM_BYTES))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(NUM_BYTES))
    return folder


def check(root: Path, model: onnx.ModelProto) -> None:
    check_external_data(model, root / "model.onnx")


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_the_folder_are_accepted_wherever_the_graph_has_them(
    root: Path, place: str
) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "w.bin").write_bytes(bytes(NUM_BYTES))
    for location in ("weights.bin", "sub/w.bin", "./weights.bin"):
        check(root, model_of(external(location, offset=0, length=NUM_BYTES), place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../secret.bin", "sub/../../secret.bin", "{absolute}", ".."])
def test_a_path_that_leads_out_is_refused_wherever_the_graph_has_it(
    root: Path, place: str, location: str
) -> None:  # hostile 22
    location = location.format(absolute=root.parent / "secret.bin")
    with pytest.raises(UnsafeModel, match=r"tensor w .*outside the model's folder"):
        check(root, model_of(external(location, length=NUM_BYTES), place))


@pytest.mark.parametrize("kind", ["file", "folder", "chain"])
def test_a_link_that_leads_out_is_refused(root: Path, kind: str) -> None:  # hostile 22
    location = "link"
    if kind == "file":
        (root / "link").symlink_to("../secret.bin")
    elif kind == "folder":
        (root / "link").symlink_to("..")
        location = "link/secret.bin"
    else:
        (root / "link").symlink_to("second")
        (root / "second").symlink_to(root.parent / "secret.bin")
    with pytest.raises(UnsafeModel, match="outside the model's folder"):
        check(root, model_of(external(location, length=NUM_BYTES)))


def test_a_link_within_the_folder_is_accepted(root: Path) -> None:
    (root / "link").symlink_to("weights.bin")
    check(root, model_of(external("link", length=NUM_BYTES)))


def test_the_folder_itself_may_be_a_link(root: Path) -> None:
    other = root.parent / "other"
    other.symlink_to(root)
    check(other, model_of(external("weights.bin", length=NUM_BYTES)))


def hub_cache(tmp_path: Path, subfolder: str) -> tuple[Path, Path]:
    """models--o--n/snapshots/REV/(subfolder)/w.bin -> blobs/HASH, as huggingface_hub lays it."""
    repository = tmp_path / "hub" / "models--o--n"
    blob = repository / "blobs" / "0123abcd"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(NUM_BYTES))
    folder = repository / "snapshots" / "rev" / subfolder
    folder.mkdir(parents=True)
    (folder / "w.bin").symlink_to(os.path.relpath(blob, folder))
    return folder, blob


def test_a_hard_link_to_a_file_outside_is_refused(root: Path) -> None:  # hostile 23
    """onnxruntime loads it, and no path shows where else the file is."""
    (root / "link.bin").hardlink_to(root.parent / "secret.bin")
    with pytest.raises(UnsafeModel, match=r"link\.bin, .* tensor w, is a hard link"):
        check(root, model_of(external("link.bin", length=NUM_BYTES)))


def test_hard_links_within_the_folder_are_accepted(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "link.bin").hardlink_to(root / "weights.bin")
    check(root, model_of(external("weights.bin", length=NUM_BYTES)))


def test_a_hard_link_of_a_blob_of_the_hub_cache_is_accepted(tmp_path: Path) -> None:
    folder, blob = hub_cache(tmp_path, "")
    (tmp_path / "elsewhere").hardlink_to(blob)
    check(folder, model_of(external("w.bin", length=NUM_BYTES)))


def test_a_hard_link_in_a_hub_snapshot_itself_is_refused(tmp_path: Path) -> None:  # hostile 23
    folder, _ = hub_cache(tmp_path, "")
    (tmp_path / "secret").write_bytes(bytes(NUM_BYTES))
    (folder / "link").hardlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeModel, match="hard link"):
        check(folder, model_of(external("link", length=NUM_BYTES)))


@pytest.mark.parametrize("place", ["graph", "subgraph", "function"])
def test_a_compiled_graph_for_a_provider_to_load_is_refused(
    root: Path, place: str
) -> None:  # hostile 36
    model = model_of(external("weights.bin"))
    node = helper.make_node(
        "EPContext", [], ["y"], name="c", domain="com.microsoft", ep_cache_context="../x.bin"
    )
    if place == "graph":
        model.graph.node.append(node)
    elif place == "subgraph":
        body = helper.make_graph([node], "b", [], [])
        model.graph.node.append(helper.make_node("Loop", ["", ""], ["y"], body=body))
    else:
        opset = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("d", "f", [], ["y"], [node], opset))
    with pytest.raises(UnsafeModel, match="'c' is an EPContext"):
        check(root, model)


def test_a_location_that_onnxruntime_takes_for_memory_is_refused(root: Path) -> None:
    """The offset would be an address to read at."""
    place = root / "*" / "_ORT_MEM_ADDR_"
    place.mkdir(parents=True)
    (place / "*").write_bytes(bytes(NUM_BYTES))
    with pytest.raises(UnsafeModel):
        check(root, model_of(external("*/_ORT_MEM_ADDR_/*", offset=0, length=NUM_BYTES)))


@pytest.mark.parametrize("subfolder", ["", "onnx"])
def test_the_hub_caches_links_into_its_own_blobs_are_accepted(
    tmp_path: Path, subfolder: str
) -> None:
    folder, _ = hub_cache(tmp_path, subfolder)
    check(folder, model_of(external("w.bin", length=NUM_BYTES)))


@pytest.mark.parametrize("target", ["models--o--n/secret", "models--x--y/blobs/0", "../secret"])
def test_a_link_from_the_hub_cache_to_elsewhere_is_refused(
    tmp_path: Path, target: str
) -> None:  # hostile 22
    """Another repository's blobs are as foreign as any file."""
    folder, _ = hub_cache(tmp_path, "")
    secret = tmp_path / "hub" / target
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes(bytes(NUM_BYTES))
    (folder / "link").symlink_to(secret)
    with pytest.raises(UnsafeModel):
        check(folder, model_of(external("link", length=NUM_BYTES)))


@pytest.mark.parametrize("location", ["absent.bin", "", "sub"])
def test_weights_that_are_missing_are_named(root: Path, location: str) -> None:  # hostile 24
    (root / "sub").mkdir()
    with pytest.raises(ModelFileError, match="is missing, and holds the weights of tensor w"):
        check(root, model_of(external(location, length=NUM_BYTES)))


@pytest.mark.parametrize(
    "stated",
    [
        {"offset": 4, "length": NUM_BYTES},
        {"offset": NUM_BYTES + 1},
        {"offset": 4},
        {"offset": 2**62},
    ],
)
def test_a_file_that_ends_before_the_tensor_is_named(root: Path, stated: dict) -> None:
    """Without a stated length, the tensor's own size says where it ends."""  # hostile 24
    with pytest.raises(ModelFileError, match=r"weights\.bin has 64 bytes, but tensor w"):
        check(root, model_of(external("weights.bin", **stated)))


@pytest.mark.parametrize("length", [NUM_BYTES + 1, NUM_BYTES - 4, 4, 2**62])
def test_a_length_that_is_not_the_tensors_is_refused(root: Path, length: int) -> None:
    """onnxruntime refuses it too, in words of its own."""  # hostile 24
    with pytest.raises(ModelFileError, match=rf"tensor w, .*has length {length}, .* 64 bytes"):
        check(root, model_of(external("weights.bin", length=length)))


@pytest.mark.parametrize(
    "stated",
    [{"offset": -1}, {"length": -64}, {"offset": -64, "length": 64}, {"offset": "x"},
     {"length": "1e3"}, {"length": ""}, {"offset": "²"}],
)  # fmt: skip
def test_an_extent_that_is_no_natural_number_is_refused(root: Path, stated: dict) -> None:
    """onnx's own reader raises a bare ValueError there."""  # hostile 24
    with pytest.raises(ModelFileError, match=r"model\.onnx: tensor w, .*'weights\.bin'"):
        check(root, model_of(external("weights.bin", **stated)))


def test_an_extent_stated_twice_is_refused(root: Path) -> None:
    tensor = external("weights.bin", offset=0)
    tensor.external_data.add(key="location", value="weights.bin")
    with pytest.raises(ModelFileError, match=r"tensor w, .*twice"):
        check(root, model_of(tensor))


def test_negative_dims_are_refused(root: Path) -> None:
    tensor = external("weights.bin")
    tensor.dims[:] = [-4, 4]
    with pytest.raises(ModelFileError, match=r"tensor w has dims \[-4, 4\]"):
        check(root, model_of(tensor))


def test_a_later_tensor_of_a_file_is_checked_too(root: Path) -> None:
    model = model_of(external("weights.bin", offset=0, length=64))
    model.graph.initializer.append(external("weights.bin", offset=32, length=64))
    model.graph.initializer[1].name = "second"
    with pytest.raises(OrtkvError, match="tensor second"):
        check(root, model)


def test_weights_in_the_graph_itself_need_no_file(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    check_external_data(model_of(tensor), tmp_path / "absent" / "model.onnx")
