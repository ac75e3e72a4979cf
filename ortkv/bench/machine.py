"""What a figure was measured on: versions, processor, cores, memory taken."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from ortkv import __version__
from ortkv.runtime import available_cores, import_onnxruntime


def environment() -> dict[str, Any]:
    """Versions, processor and cores, for the head of a result."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ortkv": __version__,
        "onnxruntime": import_onnxruntime().__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": available_cores(),
    }


def peak_rss_bytes() -> int | None:
    """The most resident memory this process ever had; None where the system does not say."""
    if sys.platform == "win32":
        return None
    resource: Any = import_module("resource")
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def physical_memory_bytes() -> int | None:
    """The memory of the machine; None where the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
