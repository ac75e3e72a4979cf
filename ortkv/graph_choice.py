"""Which files of a model are its graphs: by what its JSON says, else by the names in use."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ortkv.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

HUB_FOLDER = "onnx"
"""Hub repositories keep their graphs in it, beside the original checkpoint's files."""
_LAYOUTS = (
    ("model", None),
    ("decoder_model_merged", None),
    ("model_merged", None),
    ("decoder_with_past_model", "decoder_model"),
    ("decoder_with_past", "decoder"),
    ("decode", "prefill"),
)
"""Decoders by name, with the graph for first runs where one graph cannot do both."""
_ALONE = ("decoder", "decoder_model", "decode")
_ENCODERS = ("encoder_model", "encoder")
_EMBEDDINGS = ("embed_tokens", "embeddings", "embedding")
_VARIANT = re.compile(
    r"(.+)_(fp32|fp16|bf16|int8|uint8|quantized|int4|q8|q4|q4f16|q2|q2f16|q1|q1f16|bnb4)"
)
_SAME = {"fp32": "", "q8": "quantized"}
"""Precisions by transformers.js' names, and the suffixes of their files."""
_COMPONENTS = {
    "graph": ("decode", "decoder"),
    "prefill": ("prefill",),
    "encoder": ("encoder",),
    "embedding": ("embed_tokens", "embedding"),
}
"""The graphs of an export.json (transformers 5) by their components."""


@dataclass(frozen=True, kw_only=True)
class GraphFiles:
    """Paths of a model's graphs within its folder, with forward slashes."""

    graph: str
    prefill: str | None = None
    encoder: str | None = None
    embedding: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a JSON file says of where the graphs are. ``by``: its name."""

    by: str
    files: GraphFiles


def stated_graphs(read: Callable[[str], Mapping[str, Any]]) -> Stated | None:
    """What export.json or genai_config.json says; None where neither names a decoder.

    read: the object in a JSON file, empty where there is none.
    Raises: ConfigError for a path that leads out of the folder, and for a decoder in stages.
    """
    components = _object(read("export.json"), "components")
    named = {name: _text(_object(components, name), "file") for name in components}
    single = next(iter(named.values())) if len(named) == 1 else None
    found = {
        part: next((named[name] for name in names if named.get(name)), None)
        for part, names in _COMPONENTS.items()
    }
    found["graph"] = found["graph"] or single
    by = "export.json"
    if found["graph"] is None:
        by, found = "genai_config.json", _of_genai(_object(read("genai_config.json"), "model"))
    if found["graph"] is None:
        return None
    for path in found.values():
        _check_inside(path, by)
    return Stated(by=by, files=GraphFiles(**cast("dict[str, Any]", found)))


def choose_graphs(
    files: Collection[str], stated: Stated | None = None, precision: str | None = None
) -> GraphFiles:
    """The graphs among a model's files.

    precision: the suffix of the graphs' names ('q4' for model_q4.onnx); None takes the file
    without one, or the only one there is.
    Raises: ModelFileError where there is no graph, or several and no rule to choose.
    """
    graphs = {path for path in files if path.endswith(".onnx")}
    if stated is not None:
        return _as_stated(graphs, stated, precision)
    for place in ("", f"{HUB_FOLDER}/", "decoder/"):
        here = _stems_in(place, graphs)
        if here:
            return _with_companions(_by_name(here, place, precision), graphs)
    raise ModelFileError(
        "has no .onnx file, nor has an onnx/ folder in it: expected an exported model"
    )


def companions(stems: Collection[str], stem: str) -> tuple[str | None, str | None]:
    """The encoder and the embedding graph beside the graph of this stem, where there are any."""
    variants = _variants(stems)
    precision = _split(stem)[1]
    return _companion(variants, _ENCODERS, precision), _companion(variants, _EMBEDDINGS, precision)


def _as_stated(graphs: set[str], stated: Stated, precision: str | None) -> GraphFiles:
    files = stated.files
    if precision is not None:
        files = GraphFiles(
            graph=_stated_variant(files.graph, graphs, precision),
            prefill=_in_precision(files.prefill, graphs, precision),
            encoder=_in_precision(files.encoder, graphs, precision),
            embedding=_in_precision(files.embedding, graphs, precision),
        )
    missing = [f for f in (files.graph, files.prefill) if f is not None and f not in graphs]
    if missing:
        raise ModelFileError(
            f"has no {missing[0]}, which its {stated.by} names as a graph: copy the file there, or "
            f"name another in {stated.by}"
        )
    known = (path if path in graphs else None for path in (files.encoder, files.embedding))
    return _with_companions(replace(files, encoder=next(known), embedding=next(known)), graphs)


def _stated_variant(path: str, graphs: set[str], precision: str) -> str:
    """The variant of a stated graph.   Raises: ModelFileError where there is none."""
    place, stem = _place_and_stem(path)
    base = _split(stem)[0]
    found = _variants(_stems_in(place, graphs)).get(base, {})
    return f"{place}{_variant(base, found, precision)}.onnx" if found else path


def _with_companions(files: GraphFiles, graphs: set[str]) -> GraphFiles:
    """With an encoder and embeddings in folders of their own, or beside the graph."""
    place, stem = _place_and_stem(files.graph)
    beside = companions(_stems_in(place, graphs) - {stem}, stem)
    encoder, embedding = (None if name is None else f"{place}{name}.onnx" for name in beside)
    return replace(
        files,
        encoder=files.encoder or encoder or _sibling(files.graph, _ENCODERS, graphs),
        embedding=files.embedding or embedding or _sibling(files.graph, _EMBEDDINGS, graphs),
    )


def _stems_in(place: str, graphs: set[str]) -> set[str]:
    """Stems of the graphs right in a folder, '' or with its slash at the end."""
    split = [_place_and_stem(path) for path in graphs]
    return {stem for folder, stem in split if folder == place}


def _sibling(graph: str, folders: Iterable[str], graphs: set[str]) -> str | None:
    """The graph of the same name in a folder beside the decoder's (decoder/, encoder/)."""
    place, slash, name = graph.rpartition("/")
    above = place.rpartition("/")[0] + slash if "/" in place else ""
    found = [f"{above}{folder}/{name}" for folder in folders] if slash else []
    return next((path for path in found if path in graphs), None)


def _in_precision(path: str | None, graphs: set[str], precision: str) -> str | None:
    """The variant of a path, or the path itself where it has none."""
    if path is None:
        return None
    place, stem = _place_and_stem(path)
    suffix = _SAME.get(precision, precision)
    variant = f"{place}{_split(stem)[0]}{'_' if suffix else ''}{suffix}.onnx"
    return variant if variant in graphs else path


def _by_name(stems: set[str], place: str, precision: str | None) -> GraphFiles:
    variants = _variants(stems)
    base, first_base = _decoder(stems, variants, place)
    stem = _variant(base, variants[base], precision)
    prefill = None
    if first_base is not None:
        first = variants[first_base]
        suffix = _split(stem)[1]
        prefill = first[suffix] if suffix in first else _variant(first_base, first, precision)
    first_graph = None if prefill is None else f"{place}{prefill}.onnx"
    return GraphFiles(graph=f"{place}{stem}.onnx", prefill=first_graph)


def _decoder(
    stems: set[str], variants: Mapping[str, Mapping[str, str]], place: str
) -> tuple[str, str | None]:
    """The decoder's name without its precision, and that of its graph for first runs."""
    for base, first in _LAYOUTS:
        if base in variants and (first is None or first in variants):
            return base, first
    beside = {*_ENCODERS, *_EMBEDDINGS}
    others = [base for base in variants if base not in beside] or list(variants)
    alone = next((base for base in _ALONE if base in others), None)
    if alone is None and len(others) > 1:
        names = ", ".join(f"{stem}.onnx" for stem in sorted(stems))
        raise ModelFileError(
            f"has several graphs ({names}) {f'in {place} ' if place else ''}and none is called "
            "model.onnx: name the file itself"
        )
    return alone or others[0], None


def _variants(stems: Iterable[str]) -> dict[str, dict[str, str]]:
    """Stems by name without precision, then by precision ('' for a name without one)."""
    found: dict[str, dict[str, str]] = {}
    for stem in sorted(stems):
        base, precision = _split(stem)
        found.setdefault(base, {})[precision] = stem
    return found


def _split(stem: str) -> tuple[str, str]:
    match = _VARIANT.fullmatch(stem)
    return (match[1], match[2]) if match else (stem, "")


def _variant(base: str, found: Mapping[str, str], precision: str | None) -> str:
    wanted = "" if precision is None else precision
    for suffix in (wanted, _SAME.get(wanted, wanted)):
        if suffix in found:
            return found[suffix]
    if precision is None and len(found) == 1:
        return next(iter(found.values()))
    choices = ", ".join(suffix or "fp32" for suffix in found)
    if precision is None:
        raise ModelFileError(
            f"has {base} in several precisions and none without a suffix: choose one of {choices} "
            "(precision=, or --precision)"
        )
    raise ModelFileError(
        f"has no {base} in precision {precision!r}: choose one of {choices} (precision=, or "
        "--precision)"
    )


def _companion(
    variants: Mapping[str, Mapping[str, str]], bases: Iterable[str], precision: str
) -> str | None:
    none: Mapping[str, str] = {}
    found = next((variants[base] for base in bases if base in variants), none)
    only = next(iter(found.values())) if len(found) == 1 else None
    return found.get(precision) or found.get("") or only


def _of_genai(model: Mapping[str, Any]) -> dict[str, str | None]:
    decoder = _object(model, "decoder")
    stages = decoder.get("pipeline")
    if _text(decoder, "filename") is None and isinstance(stages, list) and stages:
        raise ConfigError(
            "genai_config.json: the decoder is a pipeline of "
            f"{len(cast('list[Any]', stages))} stages: expected one graph, as model.decoder."
            "filename. Name the .onnx file itself, or export the model as one graph."
        )
    return {
        "graph": _text(decoder, "filename"),
        "prefill": None,
        "encoder": _text(_object(model, "encoder"), "filename"),
        "embedding": _text(_object(model, "embedding"), "filename"),
    }


def _place_and_stem(path: str) -> tuple[str, str]:
    place, slash, name = path.rpartition("/")
    return place + slash, name.removesuffix(".onnx")


def _check_inside(path: str | None, by: str) -> None:
    parts = PurePosixPath(path or "")
    if parts.is_absolute() or ".." in parts.parts or "\\" in (path or "") or ":" in (path or ""):
        raise ConfigError(f"{by} names the graph {path!r}: expected a path within the folder.")


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _text(data: Mapping[str, Any], key: str) -> str | None:
    found = data.get(key)
    return found if isinstance(found, str) and found else None
