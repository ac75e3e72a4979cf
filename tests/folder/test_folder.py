"""Which graph a path means, and the JSON files around it."""

import json
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors
from ortkv.errors import ConfigError, ModelFileError
from ortkv.folder import MAX_JSON_BYTES, ModelFolder, open_folder


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The network: every repository asked for, of which only owner/name exists."""
    asked: list[str] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.onnx" in allow_patterns
        assert not any(
            pattern.endswith((".bin", ".safetensors", ".py")) for pattern in allow_patterns
        )
        if name == "owner/broken--id":
            raise hub_errors.HFValidationError("Cannot have -- or .. in repo_id")
        if name != "owner/name":
            raise hub_errors.LocalEntryNotFoundError("no such repository.\nmore lines")
        return str(touch(tmp_path / "downloaded", "model.onnx"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize(
    ("files", "graph"),
    [
        (["one.onnx"], "one.onnx"),
        (["model.onnx", "model_q4.onnx", "embed.onnx"], "model.onnx"),
        (["decoder_model.onnx", "decoder_model_merged.onnx"], "decoder_model_merged.onnx"),
        (["onnx/model.onnx", "onnx/model_fp16.onnx", "config.json"], "onnx/model.onnx"),
        (["onnx/decoder_model_merged.onnx", "onnx/a.onnx"], "onnx/decoder_model_merged.onnx"),
        (["x.onnx", "onnx/model.onnx"], "x.onnx"),
        (["model.onnx", "model.onnx_data", "model.onnx.data"], "model.onnx"),
    ],
)
def test_a_folder_has_one_graph_to_run(tmp_path: Path, files: list[str], graph: str) -> None:
    touch(tmp_path, *files)
    for path in (tmp_path, str(tmp_path)):
        assert open_folder(path) == ModelFolder(root=tmp_path, graph=tmp_path / graph)


def test_a_graph_may_be_named_itself(tmp_path: Path) -> None:
    touch(tmp_path, "a.onnx", "b.onnx")
    assert open_folder(tmp_path / "b.onnx") == ModelFolder(root=tmp_path, graph=tmp_path / "b.onnx")


@pytest.mark.parametrize("where", ["", "onnx/"])
def test_several_graphs_without_a_rule_are_listed(tmp_path: Path, where: str) -> None:
    touch(tmp_path, f"{where}b.onnx", f"{where}a.onnx")
    with pytest.raises(ModelFileError, match=r"several graphs \(a\.onnx, b\.onnx\)"):
        open_folder(tmp_path)


def test_a_folder_without_a_graph_says_so(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "sub/model.onnx", "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"has no \.onnx file"):
        open_folder(tmp_path)


def test_a_hub_id_is_downloaded(tmp_path: Path, downloads: list[str]) -> None:
    assert open_folder("owner/name").graph == tmp_path / "downloaded" / "model.onnx"
    assert downloads == ["owner/name"]


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, downloads: list[str]) -> None:
    touch(tmp_path, "owner/name/model.onnx")
    assert open_folder("owner/name").root == Path("owner/name")
    assert downloads == []


@pytest.mark.parametrize(
    "path",
    ["models/typo", "./a/b", "/no/such", "a/b/c", "a", "a b/c", "../x/y", "~/x", "a/", "a\\b",
     "owner/na\0me", "-x/y", "owner/-x", "http://h/x"],
)  # fmt: skip
def test_a_mistyped_path_does_not_try_the_network(
    tmp_path: Path, downloads: list[str], path: str
) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelFileError, match=r"does not exist: expected a folder"):
        open_folder(path)
    assert downloads == []


@pytest.mark.parametrize("name", ["nobody/nothing", "owner/broken--id"])
def test_a_hub_id_that_is_not_there_gives_one_line(name: str, downloads: list[str]) -> None:
    with pytest.raises(ModelFileError, match="could not be had from the hub") as caught:
        open_folder(name)
    assert downloads == [name]
    assert "\n" not in str(caught.value)


def folder(root: Path, **files: object) -> ModelFolder:
    for name, data in files.items():
        text = data if isinstance(data, bytes) else json.dumps(data).encode()
        (root / f"{name}.json").write_bytes(text)
    return ModelFolder(root=root, graph=root / "model.onnx")


MALFORMED = [
    b"", b"{", b"[1, 2]", b'"text"', b"null", b"3", b"\xff\xfe{}", b"{'a': 1}", b'{"a": 1} {}',
    b"[" * 200_000, b'{"a":' * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_json_that_is_no_object_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    # hostile 31
    with pytest.raises(ConfigError, match=r"config\.json"):
        folder(tmp_path, config=content).json("config.json")


def test_json_larger_than_any_config_is_refused_unread(tmp_path: Path) -> None:  # hostile 31
    """A sparse file: were it read, it would not even be UTF-8 text of an object."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ConfigError, match=rf"{MAX_JSON_BYTES + 1} bytes: expected at most"):
        folder(tmp_path).json("config.json")


def test_a_missing_json_is_empty_and_one_beside_the_graph_wins(tmp_path: Path) -> None:
    touch(tmp_path, "onnx/model.onnx")
    (tmp_path / "config.json").write_text('{"from": "root"}')
    opened = open_folder(tmp_path)
    assert opened.json("generation_config.json") == {}
    assert opened.json("config.json") == {"from": "root"}
    (tmp_path / "onnx" / "config.json").write_text('{"from": "onnx"}')
    assert opened.json("config.json") == {"from": "onnx"}


@pytest.mark.parametrize(
    ("config", "genai", "length"),
    [
        ({"max_position_embeddings": 128}, None, 128),
        ({"n_positions": 1024, "n_ctx": 512}, None, 1024),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 9}, None, 64),
        ({}, {"model": {"context_length": 4096}}, 4096),
        ({"max_position_embeddings": 77}, {"model": {"context_length": 4096}}, 77),
        (None, {"model": {"context_length": 32}}, 32),
        (None, None, None),
        ({"max_position_embeddings": None, "seq_length": 33}, None, 33),
        ({"max_position_embeddings": -1}, None, None),
        ({"max_position_embeddings": 0}, None, None),
        ({"max_position_embeddings": "4096"}, None, None),
        ({"max_position_embeddings": True}, None, None),
        ({"max_position_embeddings": 1e4}, None, None),
        ({"max_position_embeddings": 8, "text_config": None}, None, 8),
        ({"max_position_embeddings": 8, "text_config": [1]}, {"model": 5}, 8),
        ({}, {"model": None}, None),
        ({}, {"search": {"max_length": 5}}, None),
    ],
)
def test_the_context_length_is_what_the_config_states(
    tmp_path: Path, config: object, genai: object, length: int | None
) -> None:  # hostile 31
    """What is no positive integer is not taken for one."""
    files = {"config": config, "genai_config": genai}
    made = folder(tmp_path, **{name: data for name, data in files.items() if data is not None})
    assert made.context_length == length


@pytest.mark.parametrize(
    ("step", "prefill"),
    [("decoder_with_past_model.onnx", "decoder_model.onnx"), ("decode.onnx", "prefill.onnx")],
)
def test_a_pair_of_graphs_is_taken_together(tmp_path: Path, step: str, prefill: str) -> None:
    for name in (step, prefill):
        (tmp_path / name).write_bytes(b"graph")
    folder = open_folder(tmp_path)
    assert (folder.graph.name, folder.prefill and folder.prefill.name) == (step, prefill)
    (tmp_path / "decoder_model_merged.onnx").write_bytes(b"graph")
    merged = open_folder(tmp_path)
    assert (merged.graph.name, merged.prefill) == ("decoder_model_merged.onnx", None)
