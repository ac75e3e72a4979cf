"""Providers, threads, telemetry and buffers, against what onnxruntime itself reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from ortkv.errors import ProviderUnavailable, UnsupportedModel
from ortkv.runtime import CPU, Buffer, available_cores, open_model

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
MODEL = FIXTURES / "llama-genai" / "model.onnx"


def test_cpu_session_runs_on_the_cpu_provider() -> None:
    opened = open_model(MODEL)
    assert opened.device == CPU
    assert opened.session.get_providers() == ["CPUExecutionProvider"]


def test_onnxruntimes_own_provider_list_goes_through() -> None:
    opened = open_model(MODEL, provider=["CPUExecutionProvider"])
    assert opened.session.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize("provider", ["rocm", "cpu:1", "cuda:x", "", ["NopeExecutionProvider"], []])
def test_a_provider_that_is_not_there_is_an_error_not_a_fallback(provider: str) -> None:
    """onnxruntime itself warns and runs on the CPU.  # hostile 35."""
    with pytest.raises(ProviderUnavailable, match="CPUExecutionProvider") as raised:
        open_model(MODEL, provider=provider)
    assert raised.value.code == "provider_unavailable"


def test_an_op_without_a_kernel_is_named(tmp_path: Path) -> None:
    """# hostile 26."""
    import onnx
    from onnx import helper

    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("NoSuchOp", ["x"], ["y"], domain="com.nowhere")],
        "g",
        [info("x", 1, [1])],
        [info("y", 1, [1])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.nowhere", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModel, match="NoSuchOp"):
        open_model(tmp_path / "model.onnx")


def test_cores_are_those_of_the_process() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= available_cores() <= cores
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from ortkv.runtime import available_cores; print(available_cores())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("user_set", "expected"), [(None, "1"), ("0", "0"), ("1", "1")], ids=["unset", "0", "1"]
)
def test_telemetry_is_off_before_onnxruntime_is_read(user_set: str | None, expected: str) -> None:
    code = (
        "import os, ortkv, onnxruntime as ort\n"
        "called = []\n"
        "ort.disable_telemetry_events = lambda: called.append(1)\n"
        "from ortkv.runtime import import_onnxruntime\n"
        "import_onnxruntime()\n"
        "print(os.environ['ORT_DISABLE_TELEMETRY'], len(called))"
    )
    env = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    if user_set is not None:
        env["ORT_DISABLE_TELEMETRY"] = user_set
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert out.stdout.split() == [expected, "0" if expected == "0" else "1"]


def test_buffer_is_zeroed_and_its_address_is_what_onnxruntime_reads() -> None:
    buffer = Buffer(8 * 4, CPU)
    assert not buffer.read().any()
    with buffer.edit() as raw:
        raw.view(np.float32)[:] = np.arange(8)
    session = ort.InferenceSession(_identity(), providers=["CPUExecutionProvider"])
    io = session.io_binding()
    io.bind_input("x", "cpu", 0, 1, (8,), buffer.address)
    io.bind_output("y", "cpu")
    session.run_with_iobinding(io)
    np.testing.assert_array_equal(io.get_outputs()[0].numpy(), np.arange(8))


def test_an_empty_buffer_has_an_address() -> None:
    assert Buffer(0, CPU).address != 0


def _identity() -> bytes:
    from onnx import helper

    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [info("x", 1, [8])],
        [info("y", 1, [8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()
