"""A load proves its cache once, keeps the proof, and believes no file that says otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import numpy as np
import onnx
import ortkv.certificate
import pytest
from onnx import helper
from ortkv import Generator
from ortkv.certificate import cache_folder, certified
from ortkv.errors import UnsupportedModel
from ortkv.loading import Loaded, load
from ortkv.proof import quick_proof

from graphs import Design, decoder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ROOT = FIXTURES.parents[1]
GRAPHS = sorted(
    path.parent.name
    for name in ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
    for path in FIXTURES.glob(f"*/{name}")
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def only_file(cache: Path) -> Path:
    (found,) = (cache / "certificates").iterdir()
    return found


def is_kept(folder: Path) -> bool:
    """Loads the folder; whether its certificate was on disk."""
    certificate = Generator(folder).certificate
    assert certificate is not None
    return certificate.from_cache


def crossed(loaded: Loaded, i: int = 0, j: int = 1) -> Loaded:
    graph = loaded.model.graph
    entries = list(graph.schema.entries)
    entries[i] = replace(entries[i], past=graph.schema.entries[j].past)
    entries[j] = replace(entries[j], past=graph.schema.entries[i].past)
    schema = replace(graph.schema, entries=tuple(entries))
    model = replace(loaded.model, graph=replace(graph, schema=schema))
    return replace(loaded, model=model)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_real_graph_is_certified_by_its_first_load_and_not_again(
    name: str, cache: Path
) -> None:
    first = Generator(FIXTURES / name)
    assert first.certificate is not None
    assert not first.certificate.from_cache
    assert {"append after a turn", "chunked prefill", "rewind", "equal rows"} <= set(
        first.certificate.errors
    )
    assert ("ragged rows" in first.certificate.errors) == first.schema.takes_ragged_rows
    assert max(first.certificate.errors.values()) <= first.certificate.tolerance
    assert first.certificate.made == datetime.now(UTC).date()
    again = Generator(FIXTURES / name).certificate
    assert again == replace(first.certificate, from_cache=True)
    assert only_file(cache).suffix == ".json"


@pytest.mark.parametrize("name", GRAPHS)
def test_crossed_entries_get_no_certificate(name: str, cache: Path) -> None:
    loaded = load(FIXTURES / name)
    for i, j in list(combinations(range(len(loaded.model.graph.schema.entries)), 2))[:3]:
        with pytest.raises(UnsupportedModel, match=r"ortkv verify .*--kv-map.*certify=False"):
            certified(crossed(loaded, i, j))
    assert not cache.exists()


def test_a_graph_whose_present_is_not_what_its_name_says_is_not_loaded(
    tmp_path: Path, cache: Path
) -> None:
    """One layer's values come out as zeros: sound to onnxruntime, fluent and wrong to users."""
    model = decoder(Design())
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["sound" if name == "present.1.value" else name for name in names]
    model.graph.node.append(helper.make_node("Sub", ["sound", "sound"], ["present.1.value"]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="off a full run's logits by"):
        Generator(tmp_path)
    assert not cache.exists()
    assert Generator(tmp_path, certify=False).certificate is None


def test_certify_false_neither_runs_nor_writes(cache: Path) -> None:
    generator = Generator(FIXTURES / "llama-genai", certify=False)
    assert generator.certificate is None
    assert not cache.exists()


def _spoil_bytes(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 40)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _change_an_error(path: Path) -> None:
    document = json.loads(path.read_text())
    document["certificate"]["checks"][0]["max_abs_error"] = 0.0
    path.write_text(json.dumps(document))


def _change_the_identity(path: Path) -> None:
    document = json.loads(path.read_text())
    document["identity"]["onnxruntime"] = "0.1"
    path.write_text(json.dumps(document))


def _other_json(path: Path) -> None:
    path.write_text("[" * 50_000)


def _too_large(path: Path) -> None:
    path.write_text(path.read_text() + " " * 2**16)


def _a_list(path: Path) -> None:
    path.write_text("[1, 2]")


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [_spoil_bytes, _truncate, _change_an_error, _change_the_identity, _other_json, _too_large,
     _a_list, _a_folder],
)  # fmt: skip
def test_a_file_that_is_damaged_or_tampered_with_is_made_anew(spoil, cache: Path) -> None:
    Generator(FIXTURES / "llama-genai")
    path = only_file(cache)
    spoil(path)
    certificate = Generator(FIXTURES / "llama-genai").certificate
    assert certificate is not None
    assert not certificate.from_cache
    assert len(certificate.checks) == 5
    if spoil is not _a_folder:
        kept = Generator(FIXTURES / "llama-genai").certificate
        assert kept is not None
        assert kept.from_cache
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_graph_schema_or_weights_file_has_another_certificate(
    tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "shakespeare-onnx", folder)
    assert not is_kept(folder)
    assert is_kept(folder)
    data = folder / "model.onnx.data"
    os.utime(data, ns=(0, data.stat().st_mtime_ns + 1))
    assert not is_kept(folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.doc_string = "another"
    onnx.save(model, folder / "model.onnx")
    assert not is_kept(folder)
    assert len(list((cache / "certificates").iterdir())) == 3
    loaded = load(folder)
    certified(loaded)
    with pytest.raises(UnsupportedModel):
        certified(crossed(loaded))


@pytest.mark.usefixtures("cache")
def test_a_moved_folder_keeps_its_certificate(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "gpt2-ort", tmp_path / "one")
    Generator(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert is_kept(tmp_path / "two")


@pytest.mark.parametrize("blocked", ["a file in its place", "no home"])
def test_a_cache_folder_that_cannot_be_written_is_no_error(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocked == "no home":
        for name in ("ORTKV_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", _no_home)
        assert cache_folder() is None
    else:
        (tmp_path / "cache").write_text("not a folder")
        monkeypatch.setenv("ORTKV_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        certificate = Generator(FIXTURES / "llama-genai").certificate
        assert certificate is not None
        assert not certificate.from_cache


def _no_home() -> Path:
    raise RuntimeError("could not determine home directory")


def test_the_folder_is_ortkvs_own_then_xdgs_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTKV_CACHE_DIR", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("ORTKV_CACHE_DIR")
    assert cache_folder() == Path("/shared/ortkv")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path("/home/somebody/.cache/ortkv")


@pytest.mark.usefixtures("cache")
def test_checks_left_for_time_are_recorded_and_made_by_later_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = load(FIXTURES / "llama-optimum").model.graph
    report = quick_proof(graph, budget_s=0.0)
    assert report.not_run == (
        "append after a turn", "chunked prefill", "rewind", "equal rows", "ragged rows"
    )  # fmt: skip
    assert report.checks == ()
    unhurried = quick_proof(graph)
    names = [check.name for check in unhurried.checks]
    rest = quick_proof(graph, passed=names[:2])
    assert [check.name for check in rest.checks] == names[2:]

    loaded = load(FIXTURES / "llama-optimum")
    monkeypatch.setattr(ortkv.certificate, "MIN_BUDGET_S", 0.0)
    first = certified(replace(loaded, seconds=0.0))
    assert first.not_run == report.not_run
    monkeypatch.setattr(ortkv.certificate, "MIN_BUDGET_S", 60.0)
    second = certified(loaded)
    assert not second.from_cache
    assert list(second.errors) == names
    assert second.not_run == ()
    assert certified(loaded).from_cache


@pytest.mark.usefixtures("cache")
def test_a_probe_is_no_longer_than_the_context() -> None:
    loaded = load(FIXTURES / "llama-optimum")
    for length, num_checks in ((4, 5), (3, 0), (5, 5)):
        report = quick_proof(loaded.model.graph, max_tokens=length)
        assert len(report.checks) == num_checks
        assert report.ok
    assert "too short" in quick_proof(loaded.model.graph, max_tokens=3).skipped[0]


@pytest.mark.usefixtures("cache")
def test_a_model_whose_logits_are_no_numbers_is_left_to_its_first_use(tmp_path: Path) -> None:
    model = decoder(Design())
    for tensor in model.graph.initializer:
        if tensor.name == "head":
            array = np.full_like(onnx.numpy_helper.to_array(tensor), np.nan)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    certificate = Generator(tmp_path).certificate
    assert certificate is not None
    assert certificate.checks == ()
    assert "not finite" in certificate.skipped[0]


def test_the_command_line_says_nothing_of_it(cache: Path) -> None:
    command = [sys.executable, "-m", "ortkv", "generate", str(ROOT / "models" / "shakespeare-onnx")]
    runs = [
        subprocess.run(
            [*command, "-p", "ROMEO:", "-n", "4"],
            capture_output=True, text=True, timeout=120, check=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [run.stderr for run in runs] == ["", ""]
    assert runs[0].stdout == runs[1].stdout
    assert only_file(cache).is_file()
