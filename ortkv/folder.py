"""A model folder: where its graphs are, and its JSON files, read with their bounds checked."""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ortkv.errors import ConfigError, InvalidRequest, ModelFileError
from ortkv.graph_choice import HUB_FOLDER, GraphFiles, choose_graphs, companions, stated_graphs

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_JSON_BYTES = 64 * 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TEXTS = ["*.json", "*.jinja", "*.model", "*.spm", "*.txt"]
_WEIGHTS = re.compile(r".*(\.data|\.onnx[._]data)(_\d+)?")
_CONTEXT_KEYS = (
    "max_target_positions", "max_position_embeddings", "n_positions", "max_sequence_length",
    "seq_length", "n_ctx",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model's graphs and the files around them. Files beside the graph win over the root's.

    ``prefill``: a second graph for the first run of a sequence, where one cannot do both.
    ``encoder``: makes what the decoder's cross-attention looks at. ``embedding``: makes embeddings
    of token ids, for a decoder that takes these.
    """

    root: Path
    graph: Path
    prefill: Path | None = None
    encoder: Path | None = None
    embedding: Path | None = None

    def find(self, name: str) -> Path | None:
        """The file of this name beside the graph or in the root."""
        places = (self.graph.parent / name, self.root / name)
        return next((path for path in places if path.is_file()), None)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty where there is no such file.

        Raises: ConfigError where it is not a JSON object, or larger than any config is.
        """
        path = self.find(name)
        return {} if path is None else read_json(path)

    @property
    def context_length(self) -> int | None:
        """The most tokens a sequence may have, as the config states it."""
        genai = _object_in(self.json("genai_config.json"), "model")
        config = self.json("config.json")
        config = _object_in(config, "text_config") or config
        stated = [config.get(key) for key in _CONTEXT_KEYS] + [genai.get("context_length")]
        return next((n for n in stated if type(n) is int and n > 0), None)

    def special_token(self, name: str) -> Any:
        """What the model's JSON says of a token such as eos_token_id: an id, ids, or None."""
        places = (
            self.json("generation_config.json"),
            self.json("config.json"),
            _object_in(self.json("config.json"), "text_config"),
            _object_in(self.json("genai_config.json"), "model"),
        )
        return next((data[name] for data in places if data.get(name) is not None), None)


def open_folder(path: str | Path, *, precision: str | None = None) -> ModelFolder:
    """Find the graphs of a folder, an .onnx file, or a hub repository.

    precision: of a folder that has its graphs in several, the suffix of the one to take, such as
    'q4' for model_q4.onnx; None takes the graph without a suffix, or the only one there is.
    Raises: ModelFileError where there is none, or several and no rule to choose.
    """
    if type(precision) not in (str, type(None)):
        raise InvalidRequest(f"precision is {precision!r}: expected a str such as 'q4', or None.")
    try:
        place = Path(path)
    except TypeError as error:
        raise ModelFileError(
            f"found a path of type {type(path).__name__}: expected the path of a model folder, an "
            ".onnx file, or the id of a hub repository."
        ) from error
    try:
        is_file, is_folder = place.is_file(), place.is_dir()
    except OSError as error:
        raise ModelFileError(f"{str(path)[:80]!r} is no path here: {error.strerror}.") from error
    if is_file:
        return _around(place, precision)
    if not is_folder or not str(path):
        return _from_hub(str(path), precision)
    return _in_folder(place, place, _local_graphs(place), precision)


def _around(graph: Path, precision: str | None) -> ModelFolder:
    """A graph that was named itself, and what is beside it."""
    if precision is not None:
        raise InvalidRequest(
            f"{graph} is a graph itself and precision {precision!r} chooses among those of a "
            "folder: give one of the two."
        )
    in_layout = graph.parent.name == HUB_FOLDER
    beside = [p.stem for p in graph.parent.glob("*.onnx") if p.stem != graph.stem]
    encoder, embedding = companions(beside, graph.stem)
    return ModelFolder(
        root=graph.parent.parent if in_layout else graph.parent,
        graph=graph,
        encoder=None if encoder is None else graph.parent / f"{encoder}.onnx",
        embedding=None if embedding is None else graph.parent / f"{embedding}.onnx",
    )


def _local_graphs(root: Path) -> list[str]:
    found = [*root.glob("*.onnx"), *root.glob("*/*.onnx")]
    return [path.relative_to(root).as_posix() for path in found]


def _in_folder(
    root: Path, name: str | Path, files: Collection[str], precision: str | None
) -> ModelFolder:
    """The graphs among ``files`` of a folder whose JSON lies in ``root``."""
    stated = stated_graphs(lambda file: _json_in(root, file))
    try:
        chosen = choose_graphs(files, stated, precision)
    except ModelFileError as error:
        raise ModelFileError(f"{name} {error}.") from None
    return _placed(root, chosen)


def _placed(root: Path, files: GraphFiles) -> ModelFolder:
    def at(path: str | None) -> Path | None:
        return None if path is None else root / path

    return ModelFolder(
        root=root,
        graph=root / files.graph,
        prefill=at(files.prefill),
        encoder=at(files.encoder),
        embedding=at(files.embedding),
    )


def _from_hub(name: str, precision: str | None) -> ModelFolder:
    """Download a model into the hub's own cache (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN hold).

    Of the graphs only those that are run; where the hub cannot be asked, those in the cache do.
    """
    if not _HUB_ID.fullmatch(name) or Path(name).parent.is_dir():
        raise ModelFileError(
            f"{name!r} does not exist: expected a folder with an .onnx file in it, the file "
            "itself, or the id of a hub repository (owner/name)."
        )
    hub: Any = import_module("huggingface_hub")
    root = _download(name, _HUB_TEXTS)
    try:
        files: list[str] = hub.list_repo_files(name)
    except Exception:  # noqa: BLE001 - the network's errors have no base in common
        return _in_folder(root, name, _local_graphs(root), precision)
    folder = _in_folder(root, name, files, precision)
    paths = (folder.graph, folder.prefill, folder.encoder, folder.embedding)
    wanted = [path.relative_to(root).as_posix() for path in paths if path is not None]
    wanted += _weights_of(wanted, files)
    _download(name, [*_HUB_TEXTS, *(glob.escape(path) for path in wanted)])
    return folder


def _weights_of(graphs: Collection[str], files: Collection[str]) -> list[str]:
    """Files of external data beside the graphs, less those that are another graph's by name."""
    places = {PurePosixPath(path).parent for path in graphs}
    others = [f for f in files if f.endswith(".onnx") and f not in graphs]
    found = [f for f in files if PurePosixPath(f).parent in places and _WEIGHTS.fullmatch(f)]
    return [f for f in found if not any(f.startswith(other) for other in others)]


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub.errors import HfHubHTTPError

    hub: Any = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelFileError(
            f"{name} is no folder here, and could not be had from the hub: {reason}. Check the "
            "name, the network, and HF_TOKEN for a private repository."
        ) from error


def _json_in(root: Path, name: str) -> dict[str, Any]:
    path = root / name
    return read_json(path) if path.is_file() else {}


def _object_in(data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.get(key)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.   Raises: ConfigError where there is none, or it is too large."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {size} bytes: expected at most {MAX_JSON_BYTES}.")
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): copy or export it again.") from error
    if isinstance(data, dict):
        return cast("dict[str, Any]", data)
    raise ConfigError(f"{path} holds a {type(data).__name__}: expected a JSON object.")
