"""Looking at a model of 10 GB takes no memory worth naming: weights are not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.large_model import inspected, save

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 500 * 10**6


def test_inspect_reads_no_weights(tmp_path: Path) -> None:
    """The weights are a hole in a file. Time is in docs/results, not here."""
    _, num_bytes = save(tmp_path, 80)
    assert num_bytes > 10 * 10**9
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert used < 10 * 10**6, "the test means to take no disk"
    run = inspected(tmp_path)
    assert run.num_entries == 160
    assert run.peak_bytes < MOST_BYTES
