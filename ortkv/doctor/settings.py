"""Checks of the files around a graph: tokenizer, template, and the configs' claims."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from ortkv import generation_config
from ortkv.doctor.finding import Finding, finding_of
from ortkv.doctor.subject import part
from ortkv.errors import OrtkvError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortkv.doctor.subject import Subject

_ROPE_PARAMETERS_SINCE = 5
"""Source: transformers 5 writes rope_theta and rope_scaling as ``rope_parameters``."""
_HUGE = 10**300
_OLD_DEFAULTS: tuple[float, str] = (10000.0, "default")
"""What transformers 4 takes where config.json states no rope_theta and no rope_scaling."""


def tokenizer_too_wide(subject: Subject) -> Iterator[Finding]:
    """The tokenizer has ids that the logits have no column for."""
    vocab_size = _vocab_size(subject)
    if subject.text is None or vocab_size is None or subject.text.num_tokens <= vocab_size:
        return
    yield Finding(
        code="tokenizer_too_wide",
        level="error",
        message=f"the tokenizer has ids up to {subject.text.num_tokens - 1}, the logits only "
        f"{vocab_size} columns: ortkv does not load it, as ids beyond have no embedding.",
        do="Copy the tokenizer of the model that was exported, without tokens added since.",
    )


def end_of_sequence(subject: Subject) -> Iterator[Finding]:
    """Which token ends a text; settings that ortkv lacks, or that are out of range."""
    stated = subject.json["generation_config.json"]
    if stated.get("eos_token_id") is None:
        # As loading has it.
        stated = {**stated, "eos_token_id": subject.json["config.json"].get("eos_token_id")}
    try:
        with warnings.catch_warnings(record=True) as ignored:
            warnings.simplefilter("always")
            ends = generation_config.from_file(stated).eos_token_id
    except OrtkvError as error:
        yield finding_of(error)
        return
    for warning in ignored:
        yield Finding(
            code="setting_ignored",
            level="warning",
            message=str(warning.message),
            do="Take it out of generation_config.json, once the text without it is good enough.",
        )
    yield from _ends(subject, ends)


def _ends(subject: Subject, ends: tuple[int, ...]) -> Iterator[Finding]:
    vocab_size = _vocab_size(subject)
    beyond = [i for i in ends if vocab_size is not None and i >= vocab_size]
    if not ends:
        yield Finding(
            code="eos_missing",
            level="warning",
            message="neither generation_config.json nor config.json states eos_token_id: every "
            "text runs on to max_new_tokens.",
            do="Set eos_token_id in generation_config.json to the id of the token that ends a "
            "text (or a turn).",
        )
    if beyond:
        yield Finding(
            code="eos_out_of_vocab",
            level="error",
            message=f"eos_token_id {beyond} is outside the vocabulary of {vocab_size}: it is never "
            "chosen, and no text ends by it.",
            do="Copy generation_config.json and config.json of the model that was exported.",
        )
    pad: Any = subject.json["generation_config.json"].get("pad_token_id")
    pad = subject.config.get("pad_token_id") if pad is None else pad
    if type(pad) is int and pad in ends:
        yield Finding(
            code="pad_is_eos",
            level="note",
            message=f"pad_token_id is eos_token_id ({pad}). ortkv tells padding by each row's "
            "length, so that its results are right.",
            do="Nothing here; with runtimes that derive the mask from pad ids, pass a mask.",
        )


def files_missing(subject: Subject) -> Iterator[Finding]:
    """Files that a model does without, but not as its authors meant it."""
    if subject.folder.find("generation_config.json") is None:
        yield Finding(
            code="generation_config_missing",
            level="note",
            message="there is no generation_config.json: ortkv decodes greedily, and ends at "
            "config.json's eos_token_id.",
            do="Copy it from the original model, where that has one.",
        )
    in_config = subject.json["tokenizer_config.json"].get("chat_template")
    has_template = in_config is not None or subject.folder.find("chat_template.jinja") is not None
    if subject.text is not None and not has_template:
        yield Finding(
            code="chat_template_missing",
            level="note",
            message="there is no chat template: `ortkv chat` refuses the model.",
            do="Copy chat_template.jinja (or tokenizer_config.json) from the original model, if it "
            "is one to talk with; a base model has none.",
        )


def rope_ignored(subject: Subject) -> Iterator[Finding]:
    """A transformers before 5 exported what a transformers from 5 on saved."""
    wanted = part(subject.config, "rope_parameters")
    exporter = _exporter(subject)
    if not wanted or exporter is None or exporter >= _ROPE_PARAMETERS_SINCE:
        return
    asked = _rope(wanted, wanted)
    read = _rope(subject.config, part(subject.config, "rope_scaling"))
    if asked != read:
        yield Finding(
            code="rope_ignored",
            level="error",
            message=f"config.json has rope_parameters (theta {asked[0]:g}, {asked[1]}), which "
            f"transformers {exporter} does not know: the graph was made with theta {read[0]:g}, "
            f"{read[1]}. Its text is not the model's, from the first tokens on.",
            do="Export again with transformers 5 or newer; or state rope_theta and rope_scaling in "
            "the checkpoint's config.json, then export again.",
        )


def _rope(angles: dict[str, Any], scaling: dict[str, Any]) -> tuple[float, str]:
    theta: Any = angles.get("rope_theta", _OLD_DEFAULTS[0])
    kind: Any = scaling.get("rope_type", scaling.get("type", _OLD_DEFAULTS[1]))
    # A float even where a file states an integer that none can hold.
    known = isinstance(theta, int | float) and abs(theta) < _HUGE
    return (float(theta) if known else _OLD_DEFAULTS[0], str(kind))


def _exporter(subject: Subject) -> int | None:
    """The major version of the transformers that made the graph, as far as files tell."""
    parts = part(subject.json["export.json"], "components")
    told = [part(subject.json["ortkv.json"], "versions")]
    told += [part(part(part(parts, name), "metadata"), "packages") for name in parts]
    versions: list[Any] = [found.get("transformers") for found in told]
    versions.append(subject.json["config.json"].get("transformers_version"))
    for version in versions:
        major = re.match(r"\d+", version) if isinstance(version, str) else None
        if major is not None:
            return int(major[0])
    return None


def _vocab_size(subject: Subject) -> int | None:
    if subject.schema is not None and subject.schema.vocab_size is not None:
        return subject.schema.vocab_size
    stated: Any = subject.config.get("vocab_size")
    return stated if type(stated) is int else None
