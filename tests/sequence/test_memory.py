"""Memory that runs out in the middle of a change, in a process whose address space is limited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITED = f"""
import resource
from contextlib import contextmanager
from pathlib import Path
import numpy as np
from ortkv import Generator
from ortkv.cache import Cache
from ortkv.errors import OutOfMemory

@contextmanager
def no_more_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

def runs_out(change):
    with no_more_memory():
        try:
            change()
        except (OutOfMemory, MemoryError) as error:  # numpy's own where a cache gathers rows
            print("out of memory:", error)
            return
    raise SystemExit("the change found memory enough")

fixtures, shipped = {str(ROOT / "tests" / "fixtures")!r}, {str(ROOT / "models")!r}
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="/proc tells how much memory is in use"
)


def run_limited(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "out of memory:" in result.stdout


def test_an_extension_that_finds_no_memory_leaves_the_sequence_as_it_was() -> None:
    """# hostile 66."""
    run_limited("""
generator = Generator(shipped + "/shakespeare-onnx", threads=1)
tokens = list(range(20, 60))
sequence = generator.start(tokens)
for change in (lambda: sequence.extend([7] * 400), lambda: sequence.become(tokens[:9] + [7] * 400)):
    runs_out(change)
    assert sequence.tokens == tokens
sequence.extend([9])
expected = generator.start([*tokens, 9]).logits
np.testing.assert_allclose(sequence.logits, expected, rtol=0, atol=1e-3)
""")


@pytest.mark.parametrize("graph", ["llama-optimum", "llama-genai"])
def test_a_cache_that_finds_no_memory_midway_holds_no_tokens(graph: str) -> None:
    """Of its buffers some have changed by then and some have not.  # hostile 66."""
    run_limited(f"""
sequence = Generator(fixtures + "/{graph}", threads=1).start(list(range(1, 60)))
wide = Cache.joined([sequence.cache] * 6000)  # tensors too large for malloc to keep at hand
runs_out(lambda: wide.keep(range(5500)))
assert wide.past_len == 0
assert sequence.past_len == 59
""")
