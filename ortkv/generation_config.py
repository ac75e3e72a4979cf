"""How to choose tokens and when to stop, under the names of transformers' GenerationConfig."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, TypeGuard, cast

from ortkv.errors import ConfigError, InvalidRequest

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
_HUGE = 10**300


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Greedy unless ``do_sample``.

    max_new_tokens: the most tokens to add; generation also ends at the context's end.
    min_new_tokens: no end-of-sequence token before this many.
    eos_token_id: tokens that end a sequence; they are part of the result's ids, not its text.
    stop_strings: text that ends generation; it is not part of the result.
    temperature > 0, top_k >= 0 (0: off), 0 < top_p <= 1, 0 <= min_p <= 1, 0 < typical_p <= 1,
    repetition_penalty > 0, no_repeat_ngram_size >= 0 (0: off).
    suppress_tokens: ids that are never chosen; begin_suppress_tokens: never as the first one.
    forced_bos_token_id: the token after the one that a sequence starts from.
    forced_decoder_ids: pairs of a place in the sequence and the token that is put there.
    seed: of the sequence's random numbers; None keeps those that it has, which are
    unpredictable at its start.

    Source of names and meanings: transformers 5, generation/configuration_utils.py.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_decoder_ids: tuple[tuple[int, int], ...] = ()
    eos_token_id: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _INTEGER_RANGES:
            _check_integer(name, getattr(self, name), low, high)
        for name, low, high, open_below in _REAL_RANGES:
            _check_real(name, getattr(self, name), low, high, open_below=open_below)
        _check_flag("do_sample", self.do_sample)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        for name in _PLURALS:
            _check_tuple(name, getattr(self, name))
        for name in ("suppress_tokens", "begin_suppress_tokens", "eos_token_id"):
            for token in getattr(self, name):
                _check_integer(name, token, 0, 2**31 - 1)
        if self.forced_bos_token_id is not None:
            _check_integer("forced_bos_token_id", self.forced_bos_token_id, 0, 2**31 - 1)
        _check_pairs("forced_decoder_ids", self.forced_decoder_ids)
        _check_stop_strings(self.stop_strings)

    def updated(self, **changes: Any) -> GenerationConfig:
        """These settings with some replaced; a single id or string stands for a list of one.

        Raises: InvalidRequest for an unknown name or a value out of range.
        """
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise InvalidRequest(
                f"unknown generation setting {', '.join(unknown)}: expected one of "
                f"{', '.join(sorted(known))}."
            )
        return replace(self, **{name: _plural(name, v) for name, v in changes.items()})

    def forced_token(self, place: int) -> int | None:
        """The token that a sequence must have at a place, counted from 0; None where it is free."""
        if place == 1 and self.forced_bos_token_id is not None:
            return int(self.forced_bos_token_id)
        return next((token for at, token in self.forced_decoder_ids if at == place), None)


_PLURALS = (
    "eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_decoder_ids",
    "stop_strings",
)
_INTEGER_RANGES = (
    ("max_new_tokens", 0, 2**31 - 1),
    ("min_new_tokens", 0, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("no_repeat_ngram_size", 0, 2**31 - 1),
)
_REAL_RANGES = (
    ("temperature", 0.0, 100.0, True),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("typical_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, 100.0, True),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_length": (None, 0),
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "guidance_scale": (None, 1, 1.0),
    "length_penalty": (None, 1, 1.0),
    "diversity_penalty": (None, 0, 0.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
    "sequence_bias": (None,),
    "bad_words_ids": (None,),
    "force_words_ids": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
}
"""Settings that change the text and that ortkv does not have, with their values that do nothing."""


def from_file(data: Mapping[str, Any]) -> GenerationConfig:
    """The settings of a model's generation_config.json.

    A setting that would change the text and that ortkv lacks gives a warning: the text will
    not be the one the model's authors had in mind.

    Raises: ConfigError where a value is out of range.
    """
    known = {field.name for field in fields(GenerationConfig)}
    taken = {k: v for k, v in data.items() if k in known and v is not None}
    if taken.get("temperature") == 0:
        # Greedy, as its authors mean it; transformers never reads it there.
        taken |= {"temperature": 1.0, "do_sample": False}
    missing = sorted(k for k, v in data.items() if k in _NEUTRAL and v not in _NEUTRAL[k])
    if missing:
        warnings.warn(
            f"generation_config.json sets {', '.join(missing)}, which ortkv does not have: the "
            "text is generated without.",
            stacklevel=2,
        )
    try:
        return GenerationConfig().updated(**taken)
    except InvalidRequest as error:
        raise ConfigError(f"generation_config.json: {error}") from error


def _plural(name: str, value: Any) -> Any:
    if name not in _PLURALS:
        return value
    if value is None:
        return ()
    if name == "forced_decoder_ids":
        return _pairs(value)
    one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)
    return (value,) if one else tuple(cast("Iterable[Any]", value))


def _pairs(value: Any) -> Any:
    """Lists of two as tuples; a place with no token (Whisper's language) is left free."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        return cast("Any", value)
    rows = [_as_tuple(row) for row in cast("Iterable[Any]", value)]
    return tuple(row for row in rows if not (_is_pair(row) and row[1] is None))


def _as_tuple(row: Any) -> Any:
    return tuple(cast("list[Any]", row)) if isinstance(row, list) else row


def _is_pair(row: object) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(row, tuple) and len(cast("tuple[Any, ...]", row)) == 2


def _check_pairs(name: str, rows: tuple[object, ...]) -> None:
    for row in rows:
        if not _is_pair(row):
            raise InvalidRequest(f"{name} has {_shown(row)}: expected pairs of place and token id.")
        for number in row:
            _check_integer(name, number, 0, 2**31 - 1)


def _check_tuple(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise InvalidRequest(
            f"{name} is {_shown(value)}: expected a tuple (updated takes a list or one value)."
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {_shown(value)}: expected True or False.")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidRequest(
            f"{name} is {_shown(value)}: expected an integer from {low} to {high}."
        )


def _check_real(name: str, value: object, low: float, high: float, *, open_below: bool) -> None:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(cast("float", value))
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
    if not low <= number <= high or (open_below and number == low):
        bound = f"above {low:g}, up to {high:g}" if open_below else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} is {_shown(value)}: expected a number {bound}.")


def _check_stop_strings(strings: tuple[object, ...]) -> None:
    if len(strings) > MAX_STOP_STRINGS or not all(
        isinstance(s, str) and 0 < len(s) <= 1024 for s in strings
    ):
        raise InvalidRequest(
            f"stop_strings: expected up to {MAX_STOP_STRINGS} strings of 1 to 1024 characters, "
            f"found {len(strings)}, of lengths "
            f"{[len(s) if isinstance(s, str) else _shown(s) for s in strings[:20]]}."
        )


def _shown(value: object) -> str:
    """A value as a message has it. Python refuses to write an integer of thousands of digits."""
    if isinstance(value, int) and abs(value) >= _HUGE:
        return "an integer of more than 300 digits"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
