"""Every code block of the README runs as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
LINES = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
MAKE = [line for line in LINES if line.startswith("make ")]
SHELL = [line for line in LINES if not line.startswith("make ")]


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "bash", "text"}
    assert PYTHON
    assert SHELL


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_block_runs(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("line", SHELL)
def test_shell_line_runs(line: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", line], cwd=ROOT, check=True, timeout=120, env={**os.environ, "PATH": path}
    )


@pytest.mark.parametrize("line", MAKE)
def test_make_target_exists(line: str) -> None:
    """`make test` runs this very test: here only that make knows what it would do."""
    subprocess.run(["make", "--dry-run", *line.split()[1:]], cwd=ROOT, check=True, timeout=30)
