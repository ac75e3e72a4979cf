"""From a path to a model ready to run: files found and checked, schema derived, session made."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortkv import generation_config
from ortkv.decoder import LoadedGraph, PrefillGraph
from ortkv.errors import TokenizerMissing, UnsupportedModel
from ortkv.folder import open_folder, read_json
from ortkv.runtime import open_model
from ortkv.schema import derive, derive_prefill, read_map
from ortkv.schema.explain import explain
from ortkv.schema.stated import NOTHING
from ortkv.sequence import LoadedModel
from ortkv.signature import read_model, signature_of
from ortkv.weights import check_external_data

if TYPE_CHECKING:
    from ortkv.folder import ModelFolder
    from ortkv.generation_config import GenerationConfig
    from ortkv.runtime import Provider
    from ortkv.schema import CacheSchema, KvMap
    from ortkv.schema.explain import Explanation
    from ortkv.text import Text


MapSource = str | Path | dict[str, Any]
"""A map of the cache as ``kv_map`` arguments take it: a JSON file's path, or what is in one."""
_MANIFEST = "ortkv.json"


def inspect(path: str | Path, *, kv_map: MapSource | None = None) -> CacheSchema:
    """The cache schema of a folder, an .onnx file or a hub id; loads no weights, no session.

    kv_map: what is stated of the cache (docs/kv_map.md); by default that in the folder's
    ortkv.json.
    """
    folder = open_folder(path)
    return _read(folder, map_of(folder, kv_map))[0]


def inspect_explained(
    path: str | Path, *, kv_map: MapSource | None = None
) -> tuple[CacheSchema, list[Explanation]]:
    """As ``inspect``, with what in the graph shows each entry."""
    folder = open_folder(path)
    schema = _read(folder, map_of(folder, kv_map))[0]
    model = read_model(folder.graph)
    return schema, explain(signature_of(model), model, schema)


def map_of(folder: ModelFolder, kv_map: MapSource | None) -> KvMap:
    """What is stated of a folder's cache: in ``kv_map``, else in the folder's ortkv.json.

    Raises: ConfigError naming the file and the key that is wrong.
    """
    if isinstance(kv_map, str | Path):
        return read_map(read_json(Path(kv_map)), str(kv_map))
    if kv_map is not None:
        return read_map(kv_map, "kv_map")
    manifest = folder.json(_MANIFEST)
    if "kv_map" not in manifest:
        return NOTHING
    return read_map(manifest["kv_map"], f"{folder.find(_MANIFEST)}: kv_map")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model as it came from disk. ``weights``: the files of its graphs' external data."""

    model: LoadedModel
    folder: ModelFolder
    weights: tuple[Path, ...]
    seconds: float


def load_model(
    path: str | Path,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    kv_map: MapSource | None = None,
) -> LoadedModel:
    """A path's graph in a session, with its tokenizer and settings; arguments as Generator's."""
    return load(path, provider=provider, threads=threads, kv_map=kv_map).model


def load(
    path: str | Path,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    kv_map: MapSource | None = None,
) -> Loaded:
    """As ``load_model``, with the files that the model is made of and the time that it took."""
    folder = open_folder(path)
    start = time.perf_counter()
    stated = map_of(folder, kv_map)
    schema, weights = _read(folder, stated)
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
        prefill_schema, more_weights = _read_prefill(folder.prefill, schema, stated)
        prefill = PrefillGraph(session=first.session, schema=prefill_schema)
        weights += more_weights
    model = LoadedModel(
        graph=LoadedGraph(
            session=opened.session, schema=schema, device=opened.device, prefill=prefill
        ),
        text=_text_of(folder, schema),
        defaults=_defaults_of(folder),
        context_length=folder.context_length,
    )
    seconds = time.perf_counter() - start
    return Loaded(model=model, folder=folder, weights=tuple(weights), seconds=seconds)


def _read(folder: ModelFolder, stated: KvMap) -> tuple[CacheSchema, list[Path]]:
    """The graph's schema, and the files of its external weights."""
    model = read_model(folder.graph)
    weights = check_external_data(model, folder.graph)
    return derive(signature_of(model), model, stated), weights


def _read_prefill(path: Path, steps: CacheSchema, stated: KvMap) -> tuple[CacheSchema, list[Path]]:
    model = read_model(path)
    weights = check_external_data(model, path)
    return derive_prefill(signature_of(model), model, steps, stated), weights


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
