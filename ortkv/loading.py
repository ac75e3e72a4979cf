"""From a path to a model ready to run: files found and checked, schema derived, session made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv import generation_config
from ortkv.decoder import LoadedGraph, PrefillGraph
from ortkv.errors import TokenizerMissing, UnsupportedModel
from ortkv.folder import open_folder
from ortkv.runtime import open_model
from ortkv.schema import derive, derive_prefill
from ortkv.sequence import LoadedModel
from ortkv.signature import read_model, signature_of
from ortkv.weights import check_external_data

if TYPE_CHECKING:
    from pathlib import Path

    from ortkv.folder import ModelFolder
    from ortkv.generation_config import GenerationConfig
    from ortkv.runtime import Provider
    from ortkv.schema import CacheSchema
    from ortkv.text import Text


def inspect(path: str | Path) -> CacheSchema:
    """The cache schema of a folder, an .onnx file or a hub id; loads no weights, no session."""
    return _schema_of(open_folder(path))


def load_model(
    path: str | Path, *, provider: Provider = "cpu", threads: int | None = None
) -> LoadedModel:
    """A path's graph in a session, with its tokenizer and settings; arguments as Generator's."""
    folder = open_folder(path)
    schema = _schema_of(folder)
    if schema.fixed_batch not in (None, 1):
        raise UnsupportedModel(
            f"{folder.graph} takes exactly {schema.fixed_batch} rows a run: expected a "
            "batch axis of 1 or a symbolic one. Export it with a dynamic batch."
        )
    if schema.fixed_query_len not in (None, 1):
        raise UnsupportedModel(
            f"{folder.graph} takes exactly {schema.fixed_query_len} new tokens a run: expected one "
            "or any number. Export it with a dynamic sequence axis."
        )
    opened = open_model(folder.graph, provider=provider, threads=threads)
    prefill = None
    if folder.prefill is not None:
        first = open_model(folder.prefill, provider=provider, threads=threads)
        prefill = PrefillGraph(
            session=first.session, schema=_prefill_schema_of(folder.prefill, schema)
        )
    return LoadedModel(
        graph=LoadedGraph(
            session=opened.session, schema=schema, device=opened.device, prefill=prefill
        ),
        text=_text_of(folder, schema),
        defaults=_defaults_of(folder),
        context_length=folder.context_length,
    )


def _schema_of(folder: ModelFolder) -> CacheSchema:
    model = read_model(folder.graph)
    check_external_data(model, folder.graph)
    return derive(signature_of(model), model)


def _prefill_schema_of(path: Path, steps: CacheSchema) -> CacheSchema:
    model = read_model(path)
    check_external_data(model, path)
    return derive_prefill(signature_of(model), model, steps)


def _text_of(folder: ModelFolder, schema: CacheSchema) -> Text | TokenizerMissing:
    """The folder's text side, or why there is none; token ids do without."""
    from ortkv.text import load_text

    try:
        text = load_text(folder)
    except TokenizerMissing as reason:
        return reason
    if schema.vocab_size is not None and text.num_tokens > schema.vocab_size:
        raise UnsupportedModel(
            f"{folder.root}: the tokenizer has ids up to {text.num_tokens - 1}, the logits only "
            f"{schema.vocab_size} columns: this tokenizer belongs to another model."
        )
    return text


def _defaults_of(folder: ModelFolder) -> GenerationConfig:
    stated = folder.json("generation_config.json")
    if stated.get("eos_token_id") is None:
        stated = {**stated, "eos_token_id": folder.json("config.json").get("eos_token_id")}
    return generation_config.from_file(stated)
