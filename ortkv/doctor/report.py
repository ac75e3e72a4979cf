"""All checks over one model, and the ways to show what they found."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ortkv.doctor import cache, kernels, logits, rows, settings, weights
from ortkv.doctor.subject import examine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ortkv.doctor.finding import Finding
    from ortkv.doctor.subject import Subject
    from ortkv.loading import MapSource
    from ortkv.runtime import Provider

CHECKS: list[Callable[[Subject], Iterator[Finding]]] = [
    kernels.runtime_too_old,
    kernels.missing_kernels,
    kernels.half_on_cpu,
    rows.fixed_sizes,
    rows.mask_pruned,
    rows.positions_missing,
    rows.one_token_steps,
    rows.quantized_rows,
    cache.cache_copied,
    cache.cache_transposed,
    cache.cache_cast,
    cache.memory,
    cache.context_unknown,
    weights.weights_twice,
    weights.unused_data,
    logits.logits_everywhere,
    settings.tokenizer_too_wide,
    settings.end_of_sequence,
    settings.rope_ignored,
    settings.files_missing,
]
_ORDER = ("error", "warning", "note")


def diagnose(
    path: str | Path, *, provider: Provider = "cpu", kv_map: MapSource | None = None
) -> list[Finding]:
    """What will bite when the model of a folder, an .onnx file or a hub id is run; worst first.

    Loads no weights and makes no session of the model.

    Raises: ModelFileError where there is no graph that can be read at all.
    """
    subject = examine(path, provider=provider, kv_map=kv_map)
    found = [*subject.faults, *(finding for check in CHECKS for finding in check(subject))]
    return sorted(dict.fromkeys(found), key=lambda finding: _ORDER.index(finding.level))


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """What ``ortkv doctor --json`` prints (docs/doctor.schema.json)."""
    return {"format": 1, "findings": [finding.to_dict() for finding in findings]}


def print_findings(findings: Sequence[Finding]) -> None:
    """A short paragraph each on stdout, or a line that says there is nothing."""
    from rich.console import Console
    from rich.text import Text

    # Piped, a finding stays on its lines, to be found by grep.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    styles = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
    for finding in findings:
        head = Text.assemble((finding.level, styles[finding.level]), f" {finding.code}: ")
        console.print(head + Text(finding.message))
        console.print(Text(f"  do: {finding.do}\n"))
    counts = [(level, sum(f.level == level for f in findings)) for level in _ORDER]
    told = [f"{n} {level}{'s' * (n > 1)}" for level, n in counts if n]
    console.print(Text(", ".join(told) or "nothing found"))
