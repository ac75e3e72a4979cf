"""Which graph a path means, and the JSON files around it."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects
from ortkv.errors import ConfigError, InvalidRequest, ModelFileError
from ortkv.folder import MAX_JSON_BYTES, ModelFolder, open_folder


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


REPOSITORY = (
    "README.md", "config.json", "pytorch_model.bin", "model.safetensors", "x.py",
    "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model_q4.onnx", "onnx/model_q4.onnx_data",
    "onnx/model_fp16.onnx", "onnx/model_fp16.onnx_data", "onnx/model_fp16.onnx_data_1",
)  # fmt: skip


class Hub:
    """The network: the one repository there is, and what was asked for."""

    def __init__(self, root: Path, files: tuple[str, ...]) -> None:
        self.root = root
        self.files = files
        self.asked: list[str] = []
        self.is_listed = True

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        self.asked.append(name)
        if name == "owner/broken--id":
            raise hub_errors.HFValidationError("Cannot have -- or .. in repo_id")
        if name != "owner/name":
            raise hub_errors.LocalEntryNotFoundError("no such repository.\nmore lines")
        self.root.mkdir(exist_ok=True)
        matching = filter_repo_objects(self.files, allow_patterns=allow_patterns)
        return str(touch(self.root, *[f for f in matching if not (self.root / f).exists()]))

    def list_repo_files(self, name: str) -> list[str]:
        if not self.is_listed:
            raise RuntimeError(f"no network for {name}")
        return list(self.files)

    @property
    def downloaded(self) -> list[str]:
        return sorted(
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file()
        )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    made = Hub(tmp_path / "downloaded", tuple(f for f in REPOSITORY if f != "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", made.list_repo_files)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def downloads(hub: Hub) -> list[str]:
    """Every repository asked for, of which only owner/name exists."""
    return hub.asked


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


@pytest.mark.parametrize(
    ("precision", "graph", "weights"),
    [
        (None, "model", ["_data"]),
        ("q4", "model_q4", ["_data"]),
        ("fp16", "model_fp16", ["_data", "_data_1"]),
    ],
)
def test_of_a_hub_repository_only_the_chosen_graph_is_downloaded(
    hub: Hub, precision: str | None, graph: str, weights: list[str]
) -> None:
    assert open_folder("owner/name", precision=precision).graph == hub.root / f"onnx/{graph}.onnx"
    assert hub.downloaded == sorted(f"onnx/{graph}.onnx{end}" for end in ["", *weights])
    assert set(hub.asked) == {"owner/name"}


def test_weights_of_a_name_of_their_own_come_along(hub: Hub) -> None:
    hub.files = ("genai_config.json", "cpu.onnx", "cpu.onnx.data", "shared.data", "other.onnx",
                 "other.onnx.data", "onnx/elsewhere.data")  # fmt: skip
    hub.root.mkdir()
    named = {"model": {"decoder": {"filename": "cpu.onnx"}}}
    (hub.root / "genai_config.json").write_text(json.dumps(named))
    assert open_folder("owner/name").graph == hub.root / "cpu.onnx"
    assert hub.downloaded == ["cpu.onnx", "cpu.onnx.data", "genai_config.json", "shared.data"]


def test_without_the_network_the_hubs_own_cache_will_do(hub: Hub) -> None:
    touch(hub.root, "onnx/model_q4.onnx")
    hub.is_listed = False
    assert open_folder("owner/name").graph == hub.root / "onnx/model_q4.onnx"


def test_a_repository_without_a_graph_is_named(hub: Hub) -> None:
    hub.files = ("README.md", "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"^owner/name has no \.onnx file"):
        open_folder("owner/name")


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


VARIANTS = ("fp16", "int8", "uint8", "quantized", "q4", "q4f16", "bnb4")


@pytest.mark.parametrize("where", ["", "onnx/"])
@pytest.mark.parametrize("base", ["model", "decoder_model_merged"])
def test_a_precision_chooses_among_a_folders_graphs(tmp_path: Path, where: str, base: str) -> None:
    """And its encoder and embeddings go along: in the same precision, else the plain ones."""
    ends = ["", *(f"_{variant}" for variant in VARIANTS)]
    touch(tmp_path, *(f"{where}{base}{end}.onnx" for end in ends))
    touch(tmp_path, *(f"{where}encoder_model{end}.onnx" for end in ("", "_q4")))
    touch(tmp_path, f"{where}embed_tokens_int8.onnx")
    for precision, end in [(None, ""), ("fp32", ""), *((v, f"_{v}") for v in VARIANTS)]:
        found = open_folder(tmp_path, precision=precision)
        assert found.graph == tmp_path / f"{where}{base}{end}.onnx"
        beside = "_q4" if precision == "q4" else ""
        assert found.encoder == tmp_path / f"{where}encoder_model{beside}.onnx"
        assert found.embedding == tmp_path / f"{where}embed_tokens_int8.onnx"
    assert open_folder(tmp_path, precision="q8").graph.stem == f"{base}_quantized"


def test_the_only_precision_needs_no_choice(tmp_path: Path) -> None:
    touch(tmp_path, "onnx/model_q4f16.onnx")
    assert open_folder(tmp_path).graph.name == "model_q4f16.onnx"


def test_several_precisions_without_a_plain_graph_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "onnx/model_q4.onnx", "onnx/model_fp16.onnx")
    with pytest.raises(ModelFileError, match=r"several precisions .* one of fp16, q4 \(precision="):
        open_folder(tmp_path)


@pytest.mark.parametrize("precision", ["int4", "Q4", "", "*"])
def test_a_precision_that_is_not_there_is_refused(tmp_path: Path, precision: str) -> None:
    touch(tmp_path, "model_fp16.onnx", "model_q4.onnx")
    with pytest.raises(ModelFileError, match=rf"in precision '{re.escape(precision)}'.*fp16, q4"):
        open_folder(tmp_path, precision=precision)


def test_a_graph_that_is_named_itself_has_no_other_precision(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "model_q4.onnx")
    with pytest.raises(InvalidRequest, match="is a graph itself"):
        open_folder(tmp_path / "model.onnx", precision="q4")


@pytest.mark.parametrize("end", ["", "_q4"])
@pytest.mark.parametrize(
    ("decoder", "prefill", "encoder"),
    [
        ("decoder_model_merged", None, "encoder_model"),
        ("decoder_with_past_model", "decoder_model", "encoder_model"),
        ("decoder_with_past", "decoder", "encoder"),
        ("decoder", None, "encoder"),
        ("my_own", None, "encoder"),
    ],
)
def test_an_encoder_is_found_beside_its_decoder(
    tmp_path: Path, decoder: str, prefill: str | None, encoder: str, end: str
) -> None:
    names = [f"{stem}{end}.onnx" for stem in (decoder, prefill, encoder) if stem is not None]
    touch(tmp_path, *names)
    expected = ModelFolder(
        root=tmp_path,
        graph=tmp_path / f"{decoder}{end}.onnx",
        prefill=None if prefill is None else tmp_path / f"{prefill}{end}.onnx",
        encoder=tmp_path / f"{encoder}{end}.onnx",
    )
    assert open_folder(tmp_path) == expected
    by_file = open_folder(expected.graph)
    assert (by_file.graph, by_file.encoder) == (expected.graph, expected.encoder)


def genai(**files: str) -> dict[str, object]:
    return {"model": {part: {"filename": name} for part, name in files.items()}}


def test_genai_config_names_the_graphs(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "text.onnx", "embed.onnx", "sub/enc.onnx", "vision.onnx")
    stated = genai(decoder="text.onnx", embedding="embed.onnx", encoder="sub/enc.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps(stated))
    found = open_folder(tmp_path)
    assert found == ModelFolder(
        root=tmp_path,
        graph=tmp_path / "text.onnx",
        encoder=tmp_path / "sub/enc.onnx",
        embedding=tmp_path / "embed.onnx",
    )


def test_a_stated_graph_has_its_precisions_too(tmp_path: Path) -> None:
    touch(tmp_path, "text.onnx", "text_q4.onnx", "enc.onnx", "enc_q4.onnx", "model_fp16.onnx")
    stated = genai(decoder="text.onnx", encoder="enc.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps(stated))
    found = open_folder(tmp_path, precision="q4")
    assert found.graph.name == "text_q4.onnx"
    assert found.encoder is not None
    assert found.encoder.name == "enc_q4.onnx"
    with pytest.raises(ModelFileError, match="one of fp32, q4"):
        open_folder(tmp_path, precision="fp16")


def test_folders_of_a_graph_each_are_one_model(tmp_path: Path) -> None:
    touch(tmp_path, "decoder/model.onnx", "encoder/model.onnx", "embedding/model.onnx")
    for stated in ({}, genai(decoder="decoder/model.onnx")):
        (tmp_path / "genai_config.json").write_text(json.dumps(stated))
        assert open_folder(tmp_path) == ModelFolder(
            root=tmp_path,
            graph=tmp_path / "decoder/model.onnx",
            encoder=tmp_path / "encoder/model.onnx",
            embedding=tmp_path / "embedding/model.onnx",
        )


def test_export_json_names_the_graphs(tmp_path: Path) -> None:
    touch(tmp_path, "a.onnx", "b.onnx", "c.onnx", "model.onnx")
    parts = {"prefill": "a.onnx", "decode": "b.onnx", "encoder": "c.onnx"}
    components = {part: {"file": file, "metadata": {}} for part, file in parts.items()}
    (tmp_path / "export.json").write_text(json.dumps({"components": components}))
    found = open_folder(tmp_path)
    assert found == ModelFolder(
        root=tmp_path,
        graph=tmp_path / "b.onnx",
        prefill=tmp_path / "a.onnx",
        encoder=tmp_path / "c.onnx",
    )
    (tmp_path / "export.json").write_text(json.dumps({"components": {"any": {"file": "c.onnx"}}}))
    assert open_folder(tmp_path) == ModelFolder(root=tmp_path, graph=tmp_path / "c.onnx")


@pytest.mark.parametrize(
    "path", ["/etc/x.onnx", "../x.onnx", "a/../../x.onnx", "C:\\x.onnx", "a\\b.onnx"]
)
def test_a_stated_path_that_leads_out_is_refused(tmp_path: Path, path: str) -> None:
    touch(tmp_path, "model.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps(genai(decoder=path)))
    with pytest.raises(ConfigError, match="expected a path within the folder"):
        open_folder(tmp_path)


def test_a_stated_graph_that_is_not_there_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps(genai(decoder="text.onnx")))
    with pytest.raises(
        ModelFileError, match=r"has no text\.onnx, which its genai_config\.json names"
    ):
        open_folder(tmp_path)


def test_a_decoder_in_stages_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.onnx", "b.onnx")
    stages = [{"embeddings": {"filename": "a.onnx"}}, {"context": {"filename": "b.onnx"}}]
    stated = {"model": {"decoder": {"pipeline": stages}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="a pipeline of 2 stages: expected one graph"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "stated",
    [{}, {"model": 5}, {"model": {"decoder": []}}, {"model": {"decoder": {"filename": 3}}}],
)
def test_json_that_names_no_graph_leaves_it_to_names(tmp_path: Path, stated: object) -> None:
    touch(tmp_path, "model.onnx", "other.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps(stated))
    (tmp_path / "export.json").write_text(json.dumps({"components": stated}))
    assert open_folder(tmp_path).graph.name == "model.onnx"


@pytest.mark.parametrize("name", ["eos_token_id", "decoder_start_token_id"])
def test_a_special_token_is_looked_for_in_every_config(tmp_path: Path, name: str) -> None:
    made = folder(tmp_path, genai_config={"model": {name: 1}})
    assert made.special_token(name) == 1
    folder(tmp_path, config={"text_config": {name: 2}})
    assert made.special_token(name) == 2
    folder(tmp_path, config={name: 0})
    assert made.special_token(name) == 0
    folder(tmp_path, generation_config={name: [4, 5]})
    assert made.special_token(name) == [4, 5]
    assert made.special_token("pad_token_id") is None


def test_a_decoders_own_length_wins_over_its_encoders(tmp_path: Path) -> None:
    made = folder(tmp_path, config={"max_target_positions": 448, "max_position_embeddings": 9})
    assert made.context_length == 448
