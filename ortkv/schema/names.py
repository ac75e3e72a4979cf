"""Evidence from names: the conventions exporters are known to use, as a table.

One row a convention, one pattern a side. A new convention is a new row, never new code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortkv.schema.spec import Role


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a name says of a cache tensor: 'key_value' where one tensor holds both.

    A tensor of all layers is of layer 0.
    """

    layer: int
    role: Role


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One exporter's ways to name the two sides.

    Groups, all optional: ``layer``; ``role``, absent where one tensor holds keys and values;
    ``cross``, which matches for cross-attention.
    """

    name: str
    past: tuple[re.Pattern[str], ...]
    present: tuple[re.Pattern[str], ...]


def _convention(name: str, past: str, *presents: str) -> Convention:
    return Convention(
        name=name,
        past=(re.compile(past),),
        present=tuple(re.compile(present) for present in presents),
    )


_N = r"(?P<layer>\d{1,6})"
_KV = r"(?P<role>key|value)"
_K_V = r"(?P<role>k|v)"
_STATE = r"(?P<role>conv_state|recurrent_state|ssm_state|conv|recurrent|ssm)"
_SELF_OR_CROSS = r"(?:self|decoder|(?P<cross>cross|encoder))"

CONVENTIONS = (
    _convention(
        "optimum, ONNX Runtime GenAI, mobius",
        rf"past_key_values\.{_N}\.{_KV}",
        rf"present(?:_key_values)?\.{_N}\.{_KV}",
    ),
    _convention(
        "optimum and mobius, encoder-decoder",
        rf"past_key_values\.{_N}\.{_SELF_OR_CROSS}\.{_KV}",
        rf"present(?:_key_values)?\.{_N}\.{_SELF_OR_CROSS}\.{_KV}",
    ),
    _convention(
        "encoder-decoder, by hand",
        rf"past_key_values\.{_N}\.(?P<cross>cross)_{_KV}",
        rf"present(?:_key_values)?\.{_N}\.(?P<cross>cross)_{_KV}",
    ),
    _convention(
        "optimum's older multi-query models",
        rf"past_key_values\.{_N}\.key_value",
        rf"present(?:_key_values)?\.{_N}\.key_value",
    ),
    _convention(
        "ONNX Runtime GenAI and mobius, hybrids",
        rf"past(?:_key_values|_states)?\.{_N}\.{_STATE}",
        rf"present(?:_key_values|_states)?\.{_N}\.{_STATE}",
    ),
    _convention(
        "ONNX Runtime GenAI, LFM2",
        rf"past_(?P<role>conv|recurrent)\.{_N}",
        rf"present_(?P<role>conv|recurrent)\.{_N}",
    ),
    _convention(
        "ONNX Runtime tools' GPT-2, ONNX model zoo",
        rf"past_?{_N}",
        rf"present_?{_N}",
    ),
    _convention(
        "ONNX Runtime tools, encoder-decoder",
        rf"past_(?P<role>key|value)_{_SELF_OR_CROSS}_{_N}",
        rf"present_(?P<role>key|value)_{_SELF_OR_CROSS}_{_N}",
    ),
    _convention(
        "mobius, static cache",
        rf"{_KV}_cache\.{_N}",
        rf"updated_{_KV}_cache\.{_N}",
    ),
    _convention(
        "transformers 5",
        rf"input\.past_key_values\.layers\.{_N}\.{_KV}s",
        rf"(?:output\.)?past_key_values\.layers\.{_N}\.{_KV}s",
    ),
    _convention(
        "transformers 5, encoder-decoder",
        rf"input\.past_key_values\.(?:self|(?P<cross>cross))_attention_cache\.layers\.{_N}\.{_KV}s",
        r"(?:output\.)?past_key_values\.(?:self|(?P<cross>cross))_attention_cache\.layers\."
        rf"{_N}\.{_KV}s",
    ),
    _convention(
        "transformers 5, hybrids",
        rf"input\.(?:past_key_values|cache_params)\.layers\.{_N}\.{_STATE}s?(?:\.0)?",
        rf"(?:output\.)?(?:past_key_values|cache_params)\.layers\.{_N}\.{_STATE}s?(?:\.0)?",
    ),
    _convention(
        "torch.onnx of a DynamicCache",
        rf"past_key_values_{_KV}_cache_{_N}",
        rf"(?:present|past)_key_values_{_KV}_cache_{_N}(?:_out)?",
    ),
    _convention(
        "torch.onnx, flattened",
        rf"past_key_values_{_N}_{_KV}",
        rf"present(?:_key_values)?_{_N}_{_KV}",
    ),
    _convention(
        "Llama exports of 2023",
        rf"past_{_KV}_?{_N}",
        rf"present_?{_N}_{_KV}",
        rf"present_{_KV}_?{_N}",
        rf"out_{_KV}_?{_N}",
    ),
    _convention(
        "DirectML samples",
        rf"cache\.{_N}\.{_KV}",
        rf"cache_out\.{_N}\.{_KV}",
    ),
    _convention(
        "Qualcomm AI Hub",
        rf"past_{_KV}_{_N}_in",
        rf"past_{_KV}_{_N}_out",
    ),
    _convention(
        "mobile and NPU exporters",
        rf"(?:in_)?{_KV}(?:_states|_cache)?[._]{_N}(?:_in)?",
        rf"out_{_KV}(?:_states|_cache)?[._]{_N}",
        rf"{_KV}(?:_states|_cache)?[._]{_N}_out",
    ),
    _convention(
        "Llama 2 by Microsoft, layers stacked",
        rf"{_K_V}_cache",
        rf"{_K_V}_out",
    ),
    _convention(
        "mobile exporters, layers stacked",
        rf"past_{_K_V}",
        rf"present_{_K_V}",
    ),
    _convention(
        "Llama exports of 2023, layers stacked",
        rf"past_{_KV}_in",
        rf"past_{_KV}",
        rf"past_{_KV}_out",
    ),
    _convention(
        "one tensor for all",
        r"past_key_values|kv_cache|past",
        r"presents?|present_key_values|past_key_values_out|kv_cache_out",
    ),
    _convention(
        "Whisper in speech toolkits",
        rf"(?:in_)?n_layer_(?:self|(?P<cross>cross))_{_K_V}(?:_cache)?",
        rf"out_n_layer_(?:self|(?P<cross>cross))_{_K_V}(?:_cache)?",
    ),
    _convention(
        "recurrent models by hand",
        rf"(?:in_)?(?P<role>state)_?{_N}(?:_in)?",
        rf"out_(?P<role>state)_?{_N}",
        rf"(?P<role>state)_?{_N}_out",
    ),
)
"""Source: producers' own code and graphs; docs/conventions.md lists where each was seen."""

_ROLES: dict[str, Role] = {
    "key": "key",
    "k": "key",
    "value": "value",
    "v": "value",
    "conv": "conv",
    "conv_state": "conv",
    "recurrent": "recurrent",
    "recurrent_state": "recurrent",
    "ssm": "recurrent",
    "ssm_state": "recurrent",
    "state": "recurrent",
}
_CROSS: dict[Role, Role] = {"key": "cross_key", "value": "cross_value"}


def read_past(name: str) -> Named | None:
    """What an input's name says, or None where no convention has it."""
    return _read(name, (pattern for c in CONVENTIONS for pattern in c.past))


def read_present(name: str) -> Named | None:
    """What an output's name says, or None where no convention has it."""
    return _read(name, (pattern for c in CONVENTIONS for pattern in c.present))


def _read(name: str, patterns: Iterable[re.Pattern[str]]) -> Named | None:
    match = next((m for pattern in patterns if (m := pattern.fullmatch(name))), None)
    if match is None:
        return None
    groups = match.groupdict()
    role: Role = _ROLES[groups["role"]] if "role" in groups else "key_value"
    if groups.get("cross"):
        role = _CROSS[role]
    return Named(layer=int(groups.get("layer") or 0), role=role)
