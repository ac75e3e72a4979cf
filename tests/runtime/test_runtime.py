"""Providers, threads, telemetry and buffers, against what onnxruntime itself reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from ortkv.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelFileError,
    OutOfMemory,
    ProviderUnavailable,
    UnsupportedModel,
)
from ortkv.runtime import CPU, Buffer, _provider_at_fault, available_cores, open_model, run

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


@pytest.mark.parametrize("wrong", [None, 3, ("CPUExecutionProvider",), ("a", 1), ["a", {}]])
def test_a_list_of_providers_with_something_else_in_it_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="in the list of providers"):
        open_model(MODEL, provider=[wrong])  # pyright: ignore[reportArgumentType]


NO_CUDA_HERE = pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(),
    reason="this onnxruntime has CUDA; tests/gpu covers it",
)


@pytest.fixture
def listed_but_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's build lists CUDA and cannot start it, as on a machine without a GPU.

    Only the list is changed: onnxruntime itself refuses the provider, with a warning.
    """
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: providers)


@NO_CUDA_HERE
@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.usefixtures("listed_but_dead")
def test_auto_takes_the_cpu_where_cuda_does_not_start_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """# hostile 35."""
    with pytest.warns(UserWarning, match="takes the CPU: .*CUDAExecutionProvider"):
        opened = open_model(MODEL, provider="auto")
    assert opened.session.get_providers() == ["CPUExecutionProvider"]
    assert opened.device == CPU
    assert capsys.readouterr() == ("", "")


@NO_CUDA_HERE
@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.usefixtures("listed_but_dead")
@pytest.mark.parametrize(
    "provider", ["cuda", "CUDAExecutionProvider", ["CUDAExecutionProvider", "CPUExecutionProvider"]]
)
def test_cuda_asked_for_by_name_is_never_the_cpu(provider: str) -> None:
    """# hostile 35."""
    with pytest.raises(ProviderUnavailable, match="could not start it"):
        open_model(MODEL, provider=provider)


STATE = ort.capi.onnxruntime_pybind11_state  # pyright: ignore[reportAttributeAccessIssue]
CUDA_LIST = [("CUDAExecutionProvider", {"device_id": "9"}), "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("error", "providers", "at_fault"),
    [
        (RuntimeError("CUDA failure 101: invalid device ordinal"), CUDA_LIST, True),
        (STATE.EPFail("no device"), CUDA_LIST, True),
        (STATE.Fail("CUDA failure 100: no CUDA-capable device is detected"), CUDA_LIST, True),
        (STATE.Fail("Type Error: Type of input x"), CUDA_LIST, False),
        (RuntimeError("any"), ["CPUExecutionProvider"], False),
    ],
)
def test_a_failure_to_start_a_provider_is_told_from_a_graphs(
    error: Exception, providers: list, at_fault: bool
) -> None:
    """onnxruntime's own classes and words; a machine with CUDA would be needed to bring them about.

    # hostile 35.
    """
    expected = "CUDAExecutionProvider" if at_fault else None
    assert _provider_at_fault(error, providers) == expected


def graph_of(*nodes: onnx.NodeProto, opset: int = 21, ir_version: int = 10) -> onnx.ModelProto:
    """int64 x [?] -> y of any type."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes), "g", [info("x", 7, [None])], [onnx.ValueInfoProto(name="y")]
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.nowhere", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


IDENTITY = helper.make_node("Identity", ["x"], ["y"])


@pytest.mark.parametrize("domain", ["", "com.nowhere"])
def test_an_op_without_a_kernel_is_named(tmp_path: Path, domain: str) -> None:
    """# hostile 26."""
    model = graph_of(helper.make_node("NoSuchOp", ["x"], ["y"], domain=domain))
    with pytest.raises(UnsupportedModel, match="NoSuchOp"):
        open_model(saved(model, tmp_path))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"opset": 99}, r"needs opset 99, this onnxruntime \(.*\) has \d+"),
        ({"ir_version": 99}, r"needs IR version 99, this onnxruntime \(.*\) has \d+"),
    ],
)
def test_a_graph_newer_than_onnxruntime_is_refused_with_both_numbers(
    tmp_path: Path, stated: dict, message: str
) -> None:
    """# hostile 26."""
    with pytest.raises(UnsupportedModel, match=message):
        open_model(saved(graph_of(IDENTITY, **stated), tmp_path))


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    """# hostile 25."""
    (tmp_path / "model.onnx").write_bytes(b"hello, world")
    for name in ("model.onnx", "absent.onnx"):
        with pytest.raises(ModelFileError, match=name):
            open_model(tmp_path / name)


@pytest.mark.parametrize(
    ("sizes", "error"), [([2**42], OutOfMemory), ([2**62, 2**62], ExecutionFailed)]
)
def test_a_run_that_asks_for_too_much_memory_is_out_of_memory(
    tmp_path: Path, sizes: list[int], error: type[Exception]
) -> None:
    """16 TiB are more than there is; 2^124 bytes are no number of bytes at all.  # hostile 66."""
    opened = open_model(
        saved(graph_of(helper.make_node("ConstantOfShape", ["x"], ["y"])), tmp_path)
    )
    io = opened.session.io_binding()
    io.bind_cpu_input("x", np.array(sizes))
    io.bind_output("y")
    with pytest.raises(error):
        run(opened.session, io)


@pytest.mark.parametrize("num_bytes", [2**60, 2**63, 2**70])
def test_a_buffer_larger_than_memory_is_out_of_memory(num_bytes: int) -> None:
    """# hostile 66."""
    with pytest.raises(OutOfMemory, match="MiB for the cache could not be allocated on cpu"):
        Buffer(num_bytes, CPU)


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


def test_a_buffer_written_whole_holds_what_was_written() -> None:
    buffer = Buffer(8, CPU)
    with buffer.overwrite() as raw:
        raw[:] = np.arange(8)
    np.testing.assert_array_equal(buffer.read(), np.arange(8))


def test_an_empty_buffer_has_an_address() -> None:
    assert Buffer(0, CPU).address != 0


def _identity() -> bytes:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [info("x", 1, [8])],
        [info("y", 1, [8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()
