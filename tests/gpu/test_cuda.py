"""The CUDA provider against the CPU provider: the same graph, another device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from ortkv import Generator
from ortkv.runtime import Buffer, Device

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SHIPPED = Path(__file__).resolve().parents[2] / "models" / "shakespeare-onnx"
GRAPHS = [
    *(FIXTURES / name for name in ("llama-optimum", "gpt2-optimum", "llama-genai", "gpt2-ort")),
    SHIPPED,
]
TOLERANCE = 5e-3
"""fp32 on both sides, but CUDA's matrix products may round through TF32 (10 mantissa bits):
1e-3 of logits of up to about 10, over a few layers."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in ort.get_available_providers(),
        reason="this onnxruntime has no CUDA: run tests/gpu/run.sh on a GPU machine",
    ),
]


@pytest.mark.parametrize("folder", GRAPHS, ids=lambda p: p.name)
def test_logits_of_prefill_and_32_steps_are_the_cpus(folder: Path) -> None:
    prompt = [5, 17, 42, 99, 3]
    cpu, cuda = Generator(folder), Generator(folder, provider="cuda")
    assert cuda.provider == "CUDAExecutionProvider"
    host, device = cpu.start(prompt), cuda.start(prompt)
    for _ in range(32):
        np.testing.assert_allclose(device.logits, host.logits, rtol=0, atol=TOLERANCE)
        token = [int(host.logits.argmax())]
        host.extend(token)
        device.extend(token)


@pytest.mark.parametrize("folder", GRAPHS, ids=lambda p: p.name)
def test_ragged_rows_rewind_and_fork_on_the_device(folder: Path) -> None:
    cuda = Generator(folder, provider="cuda")
    prompts = [[5, 17, 42, 99, 3], [7], [90, 14]]
    rows = cuda.generate_ids(prompts, max_new_tokens=16, eos_token_id=None)
    assert rows == [
        cuda.generate_ids([p], max_new_tokens=16, eos_token_id=None)[0] for p in prompts
    ]
    sequence = cuda.start(prompts[0])
    sequence.generate_ids(max_new_tokens=100, eos_token_id=None)
    twin = sequence.fork().rewind(5)
    np.testing.assert_allclose(twin.logits, cuda.start(prompts[0]).logits, rtol=0, atol=TOLERANCE)


def test_buffer_keeps_what_is_written_on_the_device() -> None:
    buffer = Buffer(64, Device(kind="cuda"))
    assert not buffer.read().any()
    with buffer.edit() as raw:
        raw[:] = np.arange(64, dtype=np.uint8)
    np.testing.assert_array_equal(buffer.read(), np.arange(64, dtype=np.uint8))


def test_buffer_written_whole_keeps_it_on_the_device() -> None:
    buffer = Buffer(64, Device(kind="cuda"))
    for shift in range(2):
        with buffer.overwrite() as raw:
            assert not raw.any()
            raw[:] = np.arange(64, dtype=np.uint8) + shift
        np.testing.assert_array_equal(buffer.read(), np.arange(64, dtype=np.uint8) + shift)
