"""What a proof found, as data, and by layer as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way to compute logits, against full runs.

    max_abs_error: of any logit at any step.   greedy_agreement: share of equal argmax.
    """

    name: str
    max_abs_error: float
    greedy_agreement: float


@dataclass(frozen=True, kw_only=True)
class EntryError:
    """The largest difference of an entry's cached tokens, stepped against computed at once."""

    layer: int
    role: str
    past: str | None
    max_abs_error: float


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was compared and how it came out; ``ok`` where every check is within tolerance."""

    ok: bool
    max_abs_error: float
    tolerance: float
    greedy_agreement: float
    checks: tuple[Check, ...]
    entries: tuple[EntryError, ...]
    skipped: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document ``ortkv verify --json`` prints."""
        return {"format": 1, **asdict(self)}


def by_layer(report: VerifyReport) -> str:
    """A line a layer: the largest difference of each of its entries.

    The first layer that differs is where to look: its entries' errors reach all layers after it.
    """
    layers: dict[int, list[EntryError]] = {}
    for entry in report.entries:
        layers.setdefault(entry.layer, []).append(entry)
    lines = ["cached tokens, stepped against at once; the first layer that differs is the cause:"]
    for layer, entries in sorted(layers.items()):
        parts = [f"{e.role} {e.max_abs_error:.2e} ({e.past or 'no past'})" for e in entries]
        lines.append(f"  layer {layer}: {', '.join(parts)}")
    return "\n".join(lines)
