"""`ortkv doctor` as a user meets it: exit codes, a paragraph a finding, JSON by its schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ortkv.doctor import kernels as kernel_checks
from ortkv.runtime import kernels

ROOT = Path(__file__).resolve().parents[2]
CLEAN = ROOT / "models" / "shakespeare-onnx"
FIXTURES = ROOT / "tests" / "fixtures"
SCHEMA = json.loads((ROOT / "docs" / "doctor.schema.json").read_text())


def doctor(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from ortkv.cli import main; main()", "doctor", *map(str, args)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def checked(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    document = json.loads(result.stdout)
    jsonschema.validate(document, SCHEMA)
    assert result.stderr == ""
    return document["findings"]


def spoiled(tmp_path: Path) -> Path:
    """The shipped model, and a setting that cannot be."""
    folder = tmp_path / "model"
    shutil.copytree(CLEAN, folder)
    (folder / "generation_config.json").write_text('{"temperature": -1, "eos_token_id": 0}')
    return folder


def test_a_clean_model_exits_0() -> None:
    result = doctor(CLEAN, "--json")
    assert result.returncode == 0
    assert {finding["level"] for finding in checked(result)} <= {"note"}


def test_a_warning_exits_0_and_an_error_1(tmp_path: Path) -> None:
    warned = doctor(FIXTURES / "llama-optimum", "--json")
    assert warned.returncode == 0
    assert {f["level"] for f in checked(warned)} == {"warning", "note"}
    failed = doctor(spoiled(tmp_path), "--json")
    assert failed.returncode == 1
    assert checked(failed)[0]["code"] == "config_error"  # the worst comes first


def test_each_finding_is_told_with_what_to_do(tmp_path: Path) -> None:
    folder = spoiled(tmp_path)
    result = doctor(folder)
    assert result.returncode == 1
    assert result.stderr == ""
    for finding in checked(doctor(folder, "--json")):
        line = f"{finding['level']} {finding['code']}: {finding['message']}\n  do: {finding['do']}"
        assert line in result.stdout
    assert "1 error" in result.stdout.splitlines()[-1]


def test_a_path_that_holds_no_graph_is_one_line(tmp_path: Path) -> None:
    result = doctor(tmp_path, "--json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_schema_refuses_what_is_no_finding() -> None:
    wrong = {"format": 1, "findings": [{"code": "x", "level": "fatal", "message": "m", "do": "d"}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_the_page_lists_every_code() -> None:
    sources = (ROOT / "ortkv" / "doctor").glob("*.py")
    codes = {c for s in sources for c in re.findall(r'code="(\w+)"', s.read_text())}
    page = (ROOT / "docs" / "doctor.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert len(codes) > 20
    assert codes <= listed


def test_the_documented_kernels_are_those_of_installed_providers() -> None:
    installed = kernels()
    if installed is None:
        pytest.skip("this onnxruntime does not list its kernels")
    names = {"float32": "tensor(float)", "float16": "tensor(float16)"}
    names["bfloat16"] = "tensor(bfloat16)"
    for provider, ops in kernel_checks.DOCUMENTED.items():
        if not any(kernel.provider == provider for kernel in installed):
            continue
        for op, dtypes in ops.items():
            own = [k for k in installed if (k.provider, k.op) == (provider, op)]
            takes = {t for k in own for t in k.types.get("T", ())}
            assert takes & set(names.values()) == {names[d] for d in dtypes}, op
