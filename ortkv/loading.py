"""From a path to a model ready to run: files found and checked, schema derived, session made."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortkv import generation_config
from ortkv.binding import EmbeddingGraph
from ortkv.decoder import LoadedGraph, PrefillGraph
from ortkv.encoder import EncoderGraph
from ortkv.errors import ConfigError, TokenizerMissing, UnsupportedModel
from ortkv.folder import open_folder, read_json
from ortkv.proof import decide
from ortkv.runtime import open_model
from ortkv.schema import (
    alternatives,
    derive,
    derive_embedding,
    derive_encoder,
    derive_prefill,
    read_map,
    takes_source,
)
from ortkv.schema.explain import explain
from ortkv.schema.stated import NOTHING
from ortkv.sequence import LoadedModel
from ortkv.signature import read_model, signature_of
from ortkv.weights import check_external_data

if TYPE_CHECKING:
    from onnx import ModelProto

    from ortkv.folder import ModelFolder
    from ortkv.generation_config import GenerationConfig
    from ortkv.runtime import OpenModel, Provider
    from ortkv.schema import CacheSchema, HelperInput, KvMap
    from ortkv.schema.explain import Explanation
    from ortkv.signature import TensorSpec
    from ortkv.text import Text


MapSource = str | Path | dict[str, Any]
"""A map of the cache as ``kv_map`` arguments take it: a JSON file's path, or what is in one."""
_MANIFEST = "ortkv.json"


def inspect(
    path: str | Path, *, precision: str | None = None, kv_map: MapSource | None = None
) -> CacheSchema:
    """The cache schema of a folder, an .onnx file or a hub id; loads no weights, no session.

    precision, kv_map: as ``Generator``'s.
    """
    folder = open_folder(path, precision=precision)
    return _read(folder, map_of(folder, kv_map))[0]


def inspect_explained(
    path: str | Path, *, precision: str | None = None, kv_map: MapSource | None = None
) -> tuple[CacheSchema, list[Explanation]]:
    """As ``inspect``, with what in the graph shows each entry."""
    folder = open_folder(path, precision=precision)
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
    precision: str | None = None,
    kv_map: MapSource | None = None,
) -> LoadedModel:
    """A path's graph in a session, with its tokenizer and settings; arguments as Generator's."""
    return load(path, provider=provider, threads=threads, precision=precision, kv_map=kv_map).model


def load(
    path: str | Path,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    precision: str | None = None,
    kv_map: MapSource | None = None,
) -> Loaded:
    """As ``load_model``, with the files that the model is made of and the time that it took."""
    folder = open_folder(path, precision=precision)
    start = time.perf_counter()
    stated = map_of(folder, kv_map)
    schema, weights = _read(folder, stated)
    _check_sizes(schema, folder)
    opened = _Opener(provider=provider, threads=threads, weights=weights)
    model = LoadedModel(
        graph=_graph_of(folder, schema, opened, stated),
        text=_text_of(folder, schema),
        defaults=_defaults_of(folder),
        context_length=folder.context_length,
        decoder_start=_decoder_start_of(folder, schema) if takes_source(schema) else None,
    )
    seconds = time.perf_counter() - start
    return Loaded(model=model, folder=folder, weights=tuple(weights), seconds=seconds)


def _check_sizes(schema: CacheSchema, folder: ModelFolder) -> None:
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


@dataclass(frozen=True, kw_only=True)
class _Opener:
    """Opens every graph of a model alike. ``weights`` grows by their external data's files."""

    provider: Provider
    threads: int | None
    weights: list[Path]

    def session(self, path: Path) -> OpenModel:
        return open_model(path, provider=self.provider, threads=self.threads)

    def read(self, path: Path) -> ModelProto:
        """A graph beside the decoder, without its weights, whose files are checked."""
        model = read_model(path)
        self.weights.extend(check_external_data(model, path))
        return model


def _graph_of(
    folder: ModelFolder, schema: CacheSchema, opened: _Opener, stated: KvMap
) -> LoadedGraph:
    steps = opened.session(folder.graph)
    prefill = None
    if folder.prefill is not None:
        session = opened.session(folder.prefill).session
        model = opened.read(folder.prefill)
        first = derive_prefill(signature_of(model), model, schema, stated)
        prefill = PrefillGraph(session=session, schema=first)
    return _decided(
        LoadedGraph(
            session=steps.session,
            schema=schema,
            device=steps.device,
            prefill=prefill,
            embedding=_embedding_of(folder, schema, opened),
            encoder=_encoder_of(folder, schema, prefill, opened),
        )
    )


def _decided(graph: LoadedGraph) -> LoadedGraph:
    """The graph under the schema that its own runs agree with, where it leaves several."""
    schemas = alternatives(graph.schema)
    if len(schemas) == 1:
        return graph
    graphs = [replace(graph, schema=schema) for schema in schemas]
    decision = decide(graphs)
    chosen = graphs[decision.index]
    kinds = ", ".join(f"{h.name} holds {h.values}" for h in chosen.schema.helpers if _is_mask(h))
    warnings.warn(
        f"the graph's wiring leaves {len(graphs)} cache schemas; runs of it decided: {kinds} "
        f"({decision}). State it in ortkv.json to spare these runs.",
        stacklevel=2,
    )
    return chosen


def _is_mask(helper: HelperInput) -> bool:
    return helper.kind in ("mask_2d", "mask_4d")


def _embedding_of(
    folder: ModelFolder, schema: CacheSchema, opened: _Opener
) -> EmbeddingGraph | None:
    """None where the decoder takes token ids, and where there is none to be had."""
    if folder.embedding is None or not schema.embeds:
        return None
    model = opened.read(folder.embedding)
    width = next(s.dims[-1] for s in _inputs_of(folder.graph) if s.name == schema.tokens and s.dims)
    found = derive_embedding(signature_of(model), width)
    session = opened.session(folder.embedding).session
    return EmbeddingGraph(
        session=session, ids=found.ids, embeds=found.embeds, ids_dtype=found.ids_dtype
    )


def _encoder_of(
    folder: ModelFolder, schema: CacheSchema, prefill: PrefillGraph | None, opened: _Opener
) -> EncoderGraph | None:
    """None where the decoder takes no source, and where there is none to be had."""
    if folder.encoder is None or not takes_source(schema):
        return None
    model = opened.read(folder.encoder)
    first = None if prefill is None else prefill.schema
    found = derive_encoder(signature_of(model), model, schema, first)
    return EncoderGraph(session=opened.session(folder.encoder).session, schema=found)


def _inputs_of(path: Path) -> tuple[TensorSpec, ...]:
    return tuple(signature_of(read_model(path)).inputs)


def _read(folder: ModelFolder, stated: KvMap) -> tuple[CacheSchema, list[Path]]:
    """The graph's schema, and the files of its external weights."""
    model = read_model(folder.graph)
    weights = check_external_data(model, folder.graph)
    return derive(signature_of(model), model, stated), weights


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
    ends = {"eos_token_id": folder.special_token("eos_token_id")}
    return generation_config.from_file({**stated, **ends})


def _decoder_start_of(folder: ModelFolder, schema: CacheSchema) -> int | None:
    """The token a decoder starts from; transformers takes BOS where none is stated."""
    found = folder.special_token("decoder_start_token_id")
    found = folder.special_token("bos_token_id") if found is None else found
    width = schema.vocab_size
    if found is None or (type(found) is int and 0 <= found < (width or 2**31)):
        return found
    raise ConfigError(
        f"decoder_start_token_id is {found!r}: expected one token id from 0 to "
        f"{(width or 2**31) - 1}. Correct the model's JSON."
    )
