"""How much memory this process could still take."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """The system's free and reclaimable memory, within the cgroup's limit; None if not told."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    left = _left_in(cgroup)
    system = 1024 * int(found[1])
    return system if left is None else min(system, left)


def _left_in(cgroup: Path) -> int | None:
    try:
        most = (cgroup / "memory.max").read_text().strip()
        taken = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(0, int(most) - taken)
