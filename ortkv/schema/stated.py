"""What the user states of a graph's cache, in ortkv.json or --kv-map: read as data, and checked.

The document has the shape of what ``ortkv inspect --json`` prints, any part of it
(docs/kv_map.md). What it states wins over what was derived.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

import numpy as np

from ortkv.errors import ConfigError
from ortkv.schema.spec import HelperKind, Role, Update
from ortkv.signature import ONNX_TYPES, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ortkv.signature import Signature, TensorSpec

STATES: tuple[Role, ...] = ("conv", "recurrent")
CROSS: tuple[Role, ...] = ("cross_key", "cross_value")
_TOP = ("format", "inputs", "outputs", "entries")
_INPUTS = ("tokens", "helpers", "values")
_ENTRY = (
    "layer", "role", "past", "present", "layout", "update", "dtype", "num_kv_heads", "head_dim",
    "evidence",
)  # fmt: skip
_LAYOUT = re.compile(r"(?:[BHSDL2X]|\([BHDL2]{2,}\))+")


@dataclass(frozen=True, kw_only=True)
class StatedEntry:
    """What is stated of one past; None where nothing is.

    where: the place in the document, for messages.   no_present: stated that it has none.
    """

    where: str
    past: str
    present: str | None = None
    no_present: bool = False
    layer: int | None = None
    role: Role | None = None
    layout: str | None = None
    update: Update | None = None
    dtype: str | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    @property
    def is_state(self) -> bool:
        """Whether it is stated to be a state of fixed size."""
        return self.role in STATES or self.update == "replace"

    @property
    def is_complete(self) -> bool:
        """Whether it says enough to need no evidence."""
        is_paired = self.present is not None or self.no_present
        return is_paired and self.role is not None and (self.layout is not None or self.is_state)


@dataclass(frozen=True, kw_only=True)
class KvMap:
    """A whole map. ``source``: the file that it is from, for messages."""

    source: str
    tokens: str | None = None
    logits: str | None = None
    helpers: Mapping[str, HelperKind] = field(default_factory=dict[str, HelperKind])
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    entries: Mapping[str, StatedEntry] = field(default_factory=dict[str, StatedEntry])
    """By the past's name."""


NOTHING = KvMap(source="")


def settle(**parts: object) -> str:
    """The end of an error's message: what to state so that it is settled."""
    line = json.dumps({"kv_map": parts}, ensure_ascii=False)
    return f"To settle it, put {line} in ortkv.json beside the model or in a file for --kv-map."


def read_map(document: object, source: str) -> KvMap:
    """A map as JSON has it, alone or under the key "kv_map".

    Raises: ConfigError naming the source and the key that is wrong.
    """
    whole = _fields(document, source, (*_TOP, "kv_map"))
    if "kv_map" in whole:
        if len(whole) > 1:
            _refuse(f"{source}: kv_map", "beside other keys", "it alone, or the map itself")
        source = f"{source}: kv_map"
        whole = _fields(whole["kv_map"], source, _TOP)
    if whole.get("format", 1) != 1:
        _refuse(f"{source}: format", whole["format"], "1")
    inputs = _fields(whole.get("inputs", {}), f"{source}: inputs", _INPUTS)
    outputs = _fields(whole.get("outputs", {}), f"{source}: outputs", ("logits",))
    values = _fields(inputs.get("values", {}), f"{source}: inputs.values", None)
    helpers = _fields(inputs.get("helpers", {}), f"{source}: inputs.helpers", None)
    return KvMap(
        source=source,
        tokens=_name(inputs, "tokens", f"{source}: inputs.tokens"),
        logits=_name(outputs, "logits", f"{source}: outputs.logits"),
        helpers=_helpers(helpers, values, source),
        values={
            name: _number(value, f"{source}: inputs.values.{name}")
            for name, value in values.items()
        },
        entries=_entries(whole.get("entries", []), source),
    )


def _helpers(helpers: dict[str, Any], values: dict[str, Any], source: str) -> dict[str, HelperKind]:
    found: dict[str, HelperKind] = dict.fromkeys(values, "stated")
    for name, value in helpers.items():
        where = f"{source}: inputs.helpers.{name}"
        kind = cast("HelperKind", _one_of(value, where, get_args(HelperKind)))
        if (kind == "stated") != (name in values):
            _refuse(where, kind, 'a kind, or "stated" together with its number in inputs.values')
        found[name] = kind
    return found


def _entries(value: object, source: str) -> dict[str, StatedEntry]:
    if not isinstance(value, list):
        _refuse(f"{source}: entries", value, "a list of objects")
    found: dict[str, StatedEntry] = {}
    for i, item in enumerate(cast("list[object]", value)):
        entry = _entry(item, f"{source}: entries[{i}]")
        if entry.past in found:
            _refuse(f"{entry.where}.past", entry.past, "one entry a past")
        found[entry.past] = entry
    return found


def _entry(value: object, where: str) -> StatedEntry:
    given = _fields(value, where, _ENTRY)
    past = _name(given, "past", f"{where}.past")
    if past is None:
        _refuse(f"{where}.past", given.get("past"), "the name of an input")
    entry = StatedEntry(
        where=where,
        past=past,
        present=_name(given, "present", f"{where}.present", nullable=True),
        no_present="present" in given and given["present"] is None,
        layer=_integer(given, "layer", where, least=0),
        role=_choice(given, "role", where, get_args(Role)),
        layout=_name(given, "layout", f"{where}.layout"),
        update=_choice(given, "update", where, get_args(Update)),
        dtype=_choice(given, "dtype", where, tuple(ONNX_TYPES)),
        num_kv_heads=_integer(given, "num_kv_heads", where, least=1),
        head_dim=_integer(given, "head_dim", where, least=1),
    )
    _check_entry(entry)
    return entry


def _check_entry(entry: StatedEntry) -> None:
    """What it states fits together."""
    if entry.role in STATES and entry.update not in (None, "replace"):
        _refuse(f"{entry.where}.update", entry.update, f'"replace" for a {entry.role} state')
    if entry.update == "replace" and entry.role not in (None, *STATES):
        _refuse(f"{entry.where}.role", entry.role, f"{' or '.join(STATES)} where update is replace")
    if entry.role in CROSS and entry.update not in (None, "constant"):
        _refuse(f"{entry.where}.update", entry.update, f'"constant" for a {entry.role}')
    if entry.no_present and "constant" not in (
        entry.update, "constant" if entry.role in CROSS else None,
    ):  # fmt: skip
        _refuse(f"{entry.where}.present", None, 'an output, or null where update is "constant"')
    if entry.layout is not None and not _is_layout(entry.layout, is_state=entry.is_state):
        letters = "B, then an X for every other axis"
        if not entry.is_state:
            letters = (
                "B, S and D once, H, L and 2 at most once, S an axis of its own, those that share "
                "an axis in parentheses"
            )
        _refuse(f"{entry.where}.layout", entry.layout, letters)


def _is_layout(layout: str, *, is_state: bool) -> bool:
    if is_state:
        return re.fullmatch(r"BX+", layout) is not None
    letters = layout.replace("(", "").replace(")", "")
    return (
        _LAYOUT.fullmatch(layout) is not None
        and all(letters.count(letter) == 1 for letter in "BSD")
        and all(letters.count(letter) <= 1 for letter in "HL2")
        and "X" not in letters
    )


def groups(layout: str) -> list[str]:
    """The letters of each axis: ['BH', 'S', 'D'] of '(BH)SD'."""
    return [merged or one for merged, one in re.findall(r"\((.*?)\)|(.)", layout)]


def check_names(stated: KvMap, signature: Signature) -> None:
    """Whatever is stated is of this graph.   Raises: ConfigError naming the key."""
    inputs = {spec.name: spec for spec in signature.inputs}
    outputs = {spec.name: spec for spec in signature.outputs}
    _known(stated.tokens, f"{stated.source}: inputs.tokens", inputs)
    _known(stated.logits, f"{stated.source}: outputs.logits", outputs)
    for name in stated.helpers:
        key = "values" if name in stated.values else "helpers"
        _known(name, f"{stated.source}: inputs.{key}.{name}", inputs)
        if name in stated.values:
            _check_value(stated, inputs[name])
    taken = {stated.tokens: "inputs.tokens"} | dict.fromkeys(stated.helpers, "inputs.helpers")
    presents: dict[str | None, str] = {stated.logits: "outputs.logits"}
    for entry in stated.entries.values():
        _known(entry.past, f"{entry.where}.past", inputs)
        _known(entry.present, f"{entry.where}.present", outputs)
        if entry.past in taken:
            _refuse(f"{entry.where}.past", entry.past, f"another input: it is {taken[entry.past]}")
        if entry.present is not None and entry.present in presents:
            other = presents[entry.present]
            _refuse(f"{entry.where}.present", entry.present, f"another output: it is {other}")
        presents[entry.present] = f"that of {entry.past}"
        _check_against(entry, inputs[entry.past])
    if stated.tokens in stated.helpers:
        _refuse(f"{stated.source}: inputs.helpers", stated.tokens, "an input that is not tokens")


def _check_against(entry: StatedEntry, past: TensorSpec) -> None:
    if entry.dtype not in (None, past.dtype):
        _refuse(f"{entry.where}.dtype", entry.dtype, f"{past.dtype}, as the graph has it")
    if entry.layout is not None and len(groups(entry.layout)) != past.rank:
        expected = f"a letter, or letters in parentheses, for each axis of {past}"
        _refuse(f"{entry.where}.layout", entry.layout, expected)


def _check_value(stated: KvMap, spec: TensorSpec) -> None:
    """The number is one that the input's dtype can hold."""
    value, where = stated.values[spec.name], f"{stated.source}: inputs.values.{spec.name}"
    if spec.dtype not in ONNX_TYPES or spec.dims is None:
        _refuse(where, value, f"an input of numbers with a known rank, which {spec} is not")
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind == "b":
        is_held = value in (0, 1)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        is_held = value.is_integer() and limits.min <= value <= limits.max
    else:
        with np.errstate(over="ignore"):
            is_held = math.isfinite(float(np.asarray(value).astype(dtype)))
    if not is_held:
        _refuse(where, value, f"a number that {spec.dtype} can hold")


def _known(name: str | None, where: str, specs: Mapping[str, TensorSpec]) -> None:
    if name is not None and name not in specs:
        shown = ", ".join(list(specs)[:8]) + (", ..." if len(specs) > 8 else "")
        _refuse(where, name, f"one of the graph's: {shown}")


def _fields(value: object, where: str, allowed: Collection[str] | None) -> dict[str, Any]:
    """An object's fields; ``allowed`` None where its keys are names of tensors."""
    if not isinstance(value, dict):
        _refuse(where, value, "a JSON object")
    fields = cast("dict[object, object]", value)
    for key in fields:
        if not isinstance(key, str) or (allowed is not None and key not in allowed):
            keys = "names of tensors" if allowed is None else f"keys of {', '.join(allowed)}"
            raise ConfigError(f"{where} has the unknown key {key!r}: expected {keys}.")
    return cast("dict[str, Any]", value)


def _name(given: dict[str, Any], key: str, where: str, *, nullable: bool = False) -> str | None:
    if key not in given or (nullable and given[key] is None):
        return None
    if not isinstance(given[key], str) or not given[key]:
        _refuse(where, given[key], "a string")
    return given[key]


def _choice(given: dict[str, Any], key: str, where: str, allowed: Collection[str]) -> Any:
    return _one_of(given[key], f"{where}.{key}", allowed) if key in given else None


def _one_of(value: object, where: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        _refuse(where, value, f"one of {', '.join(allowed)}")
    return value


def _integer(given: dict[str, Any], key: str, where: str, *, least: int) -> int | None:
    """null, as ``inspect`` prints it for a state, states nothing."""
    value = given.get(key)
    if value is not None and (type(value) is not int or value < least):
        _refuse(f"{where}.{key}", value, f"an integer, {least} or more")
    return value


def _number(value: object, where: str) -> float:
    if type(value) not in (int, float):
        _refuse(where, value, "a number")
    try:
        number = float(cast("float", value))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(where, value, "a finite number")
    return number


def _refuse(where: str, found: object, expected: str) -> NoReturn:
    shown = json.dumps(found, default=repr)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ConfigError(f"{where} is {shown}: expected {expected}.")
