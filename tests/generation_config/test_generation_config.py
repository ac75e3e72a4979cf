"""The settings' ranges, their defaults, and what a generation_config.json may say."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from ortkv.errors import ConfigError, InvalidRequest
from ortkv.generation_config import MAX_SEED, GenerationConfig, from_file
from transformers import GenerationConfig as HFConfig

DEFAULTS = GenerationConfig()
INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size", "seed")
REALS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")

REFUSED: list[tuple[str, Any]] = [
    *((name, value) for name in INTEGERS for value in (-1, 1.5, 2.0, True, "3", 2**64, 10**5000)),
    *((name, math.nan) for name in INTEGERS + REALS),
    *((name, value) for name in REALS for value in (-0.1, math.inf, -math.inf, True, "0.5", [1.0])),
    *((name, value) for name in REALS for value in (1e308, 10**400, -(10**400), None)),
    *((name, 0.0) for name in ("temperature", "top_p", "typical_p", "repetition_penalty")),
    *((name, 1.0001) for name in ("top_p", "min_p", "typical_p")),
    *(("do_sample", value) for value in (0, 1, "true", None)),
    *((name, [v]) for name in ("eos_token_id", "suppress_tokens") for v in (-1, 1.0, True, 2**31)),
    *((name, v) for name in ("eos_token_id", "suppress_tokens") for v in (1.5, "2", {"a": 1})),
    *(("stop_strings", value) for value in ("", [""], [5], 5, b"end", "x" * 1025, ["a"] * 17)),
]  # hostile 40, 41, 42


@pytest.mark.parametrize(
    ("name", "value"), REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)]
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    """The message names the setting and the range, and stays short whatever the value."""
    with pytest.raises(InvalidRequest, match=rf"^{name}.*expected") as caught:
        DEFAULTS.updated(**{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**31 - 1),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("seed", None),
        ("top_k", 0),
        ("top_k", 10**9),
        ("temperature", 1e-300),
        ("temperature", 100),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1.0),
        ("typical_p", 1.0),
        ("repetition_penalty", 100.0),
        ("eos_token_id", (0, 2**31 - 1)),
        ("stop_strings", ("x" * 1024,) * 16),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_kept(name: str, value: Any) -> None:
    assert getattr(DEFAULTS.updated(**{name: value}), name) == value


def test_numpy_integers_count_as_integers() -> None:
    config = DEFAULTS.updated(top_k=np.int64(7), eos_token_id=np.array([1, 2]))
    assert config == DEFAULTS.updated(top_k=7, eos_token_id=[1, 2])


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens, temprature: expected.*max_new_tokens"):
        DEFAULTS.updated(temprature=0.5, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("eos_token_id", 2, (2,)),
        ("eos_token_id", [2, 3], (2, 3)),
        ("eos_token_id", None, ()),
        ("suppress_tokens", range(3), (0, 1, 2)),
        ("stop_strings", "end", ("end",)),
        ("stop_strings", ["a", "b"], ("a", "b")),
    ],
)
def test_one_id_or_string_stands_for_a_list(name: str, given: Any, kept: tuple) -> None:
    assert getattr(DEFAULTS.updated(**{name: given}), name) == kept


@pytest.mark.parametrize("changes", [{"stop_strings": "end"}, {"eos_token_id": 2}])
def test_the_constructor_takes_no_bare_string_or_id_for_a_tuple(changes: Any) -> None:
    """'end' was three stop strings of one letter each, and 2 a bare TypeError."""
    with pytest.raises(InvalidRequest, match="expected a tuple"):
        GenerationConfig(**changes)


def test_updated_leaves_the_original_as_it_was() -> None:
    changed = DEFAULTS.updated(top_k=3)
    assert (changed.top_k, DEFAULTS.top_k) == (3, 50)
    assert changed.updated(top_k=50) == DEFAULTS


def test_defaults_are_those_of_transformers() -> None:
    """Where names coincide; max_new_tokens has a value here, and length 20 in transformers."""
    theirs = HFConfig()._get_default_generation_params()
    shared = set(theirs) & set(vars(DEFAULTS)) - {"max_new_tokens"}
    assert {"do_sample", "temperature", "top_k", "top_p", "typical_p"} <= shared
    assert {name: getattr(DEFAULTS, name) or None for name in shared} == {
        name: theirs[name] or None for name in shared
    }
    unset = set(vars(DEFAULTS)) - set(theirs) - {"max_new_tokens", "seed"}
    unset -= {"forced_decoder_ids"}  # transformers 5 reads it from Whisper's files alone
    assert {name: getattr(HFConfig(), name) for name in unset} == dict.fromkeys(unset)
    assert {name for name in unset if getattr(DEFAULTS, name)} == set()


def test_a_file_of_a_real_model_is_taken() -> None:
    """Llama 3's own file; what ortkv does not have there changes no text."""
    config = from_file(
        {
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": None,
            "transformers_version": "5.0.0",
            "_from_model_config": True,
            "num_beams": 1,
            "cache_implementation": "static",
        }
    )
    assert config == GenerationConfig(
        do_sample=True, eos_token_id=(128001, 128008, 128009), temperature=0.6, top_p=0.9
    )


@pytest.mark.parametrize(
    "stated",
    [{"num_beams": 4}, {"penalty_alpha": 0.6}, {"bad_words_ids": [[1]]}, {"forced_eos_token_id": 2},
     {"epsilon_cutoff": 0.1}, {"guidance_scale": 1.5}, {"min_length": 5}],
)  # fmt: skip
def test_a_setting_that_ortkv_lacks_and_that_changes_the_text_warns(stated: dict) -> None:
    with pytest.warns(UserWarning, match=f"sets {next(iter(stated))}, which ortkv does not have"):
        assert from_file({**stated, "top_k": 7}) == GenerationConfig(top_k=7)


def test_no_default_of_transformers_warns() -> None:
    """A file written by save_pretrained states many settings at the value that does nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_file(HFConfig().to_dict())
        from_file(HFConfig._get_default_generation_params())


@pytest.mark.parametrize(
    "stated",
    [{"temperature": -1}, {"top_p": 7}, {"eos_token_id": "</s>"}, {"eos_token_id": 1.5},
     {"do_sample": "yes"}, {"top_k": math.nan}, {"stop_strings": [None]}],
)  # fmt: skip
def test_a_file_out_of_range_is_a_config_error(stated: dict) -> None:  # hostile 31
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(stated))}"):
        from_file(stated)


def test_a_numpy_number_is_a_number() -> None:
    import numpy as np

    assert GenerationConfig().updated(temperature=np.float32(0.5)).temperature == 0.5
