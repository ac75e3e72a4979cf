"""A model folder: where its graph is, and its JSON files, read with their bounds checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ortkv.errors import ConfigError, ModelFileError

MAX_JSON_BYTES = 64 * 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.onnx", "*.onnx_data*", "*.onnx.data"]
_HUB_FOLDER = "onnx"
"""Hub repositories keep their graphs in it, beside the original checkpoint's files."""
_PREFERRED = ("model.onnx", "decoder_model_merged.onnx", "model_merged.onnx")
_PAIRS = (
    ("decoder_with_past_model.onnx", "decoder_model.onnx"),
    ("decode.onnx", "prefill.onnx"),
)
"""Graphs for the steps and for the first run: optimum's two files, transformers 5's two."""
_CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """One graph and the files around it. Files beside the graph win over the root's."""

    root: Path
    graph: Path
    prefill: Path | None = None
    """A second graph for the first run of a sequence, where one graph cannot do both."""

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


def open_folder(path: str | Path) -> ModelFolder:
    """Find the graph of a folder, an .onnx file, or a hub repository.

    Raises: ModelFileError where there is none, or several and no rule to choose.
    """
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
        in_layout = place.parent.name == _HUB_FOLDER
        return ModelFolder(root=place.parent.parent if in_layout else place.parent, graph=place)
    if not is_folder or not str(path):
        place = _from_hub(str(path))
    return _choose_graph(place)


def _choose_graph(root: Path) -> ModelFolder:
    for folder in (root, root / _HUB_FOLDER):
        graphs = sorted(folder.glob("*.onnx"))
        preferred = [folder / name for name in _PREFERRED if folder / name in graphs]
        if preferred or len(graphs) == 1:
            return ModelFolder(root=root, graph=(preferred or graphs)[0])
        for step, prefill in _PAIRS:
            if folder / step in graphs and folder / prefill in graphs:
                return ModelFolder(root=root, graph=folder / step, prefill=folder / prefill)
        if graphs:
            raise ModelFileError(
                f"{folder} has several graphs ({', '.join(g.name for g in graphs)}) and none is "
                "called model.onnx: name the file itself."
            )
    raise ModelFileError(
        f"{root} has no .onnx file, nor has an onnx/ folder in it: expected an exported model."
    )


def _from_hub(name: str) -> Path:
    """Download a repository into the hub's own cache (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN hold)."""
    if not _HUB_ID.fullmatch(name) or Path(name).parent.is_dir():
        raise ModelFileError(
            f"{name!r} does not exist: expected a folder with an .onnx file in it, the file "
            "itself, or the id of a hub repository (owner/name)."
        )
    from huggingface_hub.errors import HfHubHTTPError

    hub: Any = import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelFileError(
            f"{name} is no folder here, and could not be had from the hub: {reason}. Check the "
            "name, the network, and HF_TOKEN for a private repository."
        ) from error


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
