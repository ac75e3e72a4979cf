"""Evidence from names: the conventions exporters are known to use, as a table.

One row a convention, one pattern a side. A new convention is a new row, never new code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.schema.spec import Role


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a name says of a cache tensor. ``role`` is None where one tensor holds both."""

    convention: str
    layer: int
    role: Role


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One exporter's way to name the two sides; groups ``layer`` and, unless fused, ``role``."""

    name: str
    past: re.Pattern[str]
    present: re.Pattern[str]


def _convention(name: str, past: str, present: str) -> Convention:
    return Convention(name=name, past=re.compile(past), present=re.compile(present))


CONVENTIONS = (
    _convention(
        "optimum, ONNX Runtime GenAI, mobius",
        r"past_key_values\.(?P<layer>\d+)\.(?P<role>key|value)",
        r"present(?:_key_values)?\.(?P<layer>\d+)\.(?P<role>key|value)",
    ),
    _convention(
        "ONNX Runtime tools' GPT-2, ONNX model zoo",
        r"past_?(?P<layer>\d+)",
        r"present_?(?P<layer>\d+)",
    ),
    _convention(
        "transformers 5",
        r"input\.past_key_values\.layers\.(?P<layer>\d+)\.(?P<role>key|value)s",
        r"(?:output\.)?past_key_values\.layers\.(?P<layer>\d+)\.(?P<role>key|value)s",
    ),
    _convention(
        "torch.onnx of a DynamicCache",
        r"past_key_values_(?P<role>key|value)_cache_(?P<layer>\d+)",
        r"(?:present|past)_key_values_(?P<role>key|value)_cache_(?P<layer>\d+)(?:_out)?",
    ),
    _convention(
        "torch.onnx, flattened",
        r"past_key_values_(?P<layer>\d+)_(?P<role>key|value)",
        r"present(?:_key_values)?_(?P<layer>\d+)_(?P<role>key|value)",
    ),
)
"""Source: producers' own code and graphs; docs/conventions.md lists where each was seen."""


def read_past(name: str) -> Named | None:
    """What an input's name says, or None where no convention has it."""
    return _read(name, "past")


def read_present(name: str) -> Named | None:
    """What an output's name says, or None where no convention has it."""
    return _read(name, "present")


def _read(name: str, side: str) -> Named | None:
    for convention in CONVENTIONS:
        pattern = convention.past if side == "past" else convention.present
        match = pattern.fullmatch(name)
        if match is not None:
            groups = match.groupdict()
            role: Role = "key_value"
            if "role" in groups:
                role = "key" if groups["role"] == "key" else "value"
            return Named(convention=convention.name, layer=int(groups["layer"]), role=role)
    return None
