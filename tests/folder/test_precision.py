"""One of a folder's precisions, from Python and from the command line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import ortkv
import pytest
from ortkv.errors import InvalidRequest, ModelFileError

from graphs import Design, decoder, full_logits

DESIGNS = {"q4": Design(num_layers=2), "fp16": Design(num_layers=3)}
TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs whose layers differ, so that each is known by its answer."""
    root = tmp_path_factory.mktemp("model")
    (root / "onnx").mkdir()
    for precision, design in DESIGNS.items():
        onnx.save(decoder(design), root / "onnx" / f"model_{precision}.onnx")
    return root


@pytest.mark.parametrize("precision", DESIGNS)
def test_the_graph_of_that_precision_is_run(folder: Path, precision: str) -> None:
    expected = full_logits(DESIGNS[precision], TOKENS)[-1]
    found = ortkv.Generator(folder, precision=precision, threads=1).start(TOKENS).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    num_layers = DESIGNS[precision].num_layers
    assert ortkv.inspect(folder, precision=precision).num_layers == num_layers
    assert len(ortkv.verify(folder, precision=precision).entries) == 2 * num_layers


def test_the_choice_is_asked_for(folder: Path) -> None:
    for use in (ortkv.Generator, ortkv.inspect, ortkv.verify):
        with pytest.raises(ModelFileError, match="choose one of fp16, q4"):
            use(folder)
    with pytest.raises(InvalidRequest, match="expected a str such as 'q4'"):
        ortkv.Generator(folder, precision=4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_command_line_takes_it(folder: Path, command: str) -> None:
    ortkv_command = [sys.executable, "-m", "ortkv", command, str(folder)]
    asked = subprocess.run(
        [*ortkv_command, "--precision", "q4"], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    plain = subprocess.run(ortkv_command, capture_output=True, text=True, check=False)
    assert plain.returncode == 1
    assert "choose one of fp16, q4" in plain.stderr


def test_text_is_generated_in_it(tmp_path: Path) -> None:
    model = Path(__file__).resolve().parents[2] / "models" / "shakespeare-onnx"
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    for suffix in ("q4", "fp16"):
        shutil.copy(copy / "model.onnx", copy / f"model_{suffix}.onnx")
    (copy / "model.onnx").unlink()
    command = [sys.executable, "-m", "ortkv", "generate", str(copy), "-p", "ROMEO:", "-n", "3"]
    asked = subprocess.run(
        [*command, "--precision", "q4"], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
