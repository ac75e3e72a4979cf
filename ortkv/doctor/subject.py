"""What the checks look at: a model's folder, graph and settings, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ortkv.doctor.finding import Finding, finding_of
from ortkv.doctor.memory import available_bytes
from ortkv.errors import OrtkvError, TokenizerMissing
from ortkv.folder import open_folder
from ortkv.loading import map_of
from ortkv.runtime import kernels, provider_names
from ortkv.schema import NOTHING, derive, derive_prefill
from ortkv.schema.wiring import wire
from ortkv.signature import read_model, signature_of
from ortkv.weights import check_external_data

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import onnx

    from ortkv.folder import ModelFolder
    from ortkv.loading import MapSource
    from ortkv.runtime import Kernel, Provider
    from ortkv.schema import CacheSchema
    from ortkv.schema.wiring import Wiring
    from ortkv.signature import Signature
    from ortkv.text import Text

_Result = TypeVar("_Result")
_JSON_FILES = (
    "config.json",
    "export.json",
    "generation_config.json",
    "genai_config.json",
    "ortkv.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as its files tell it. What could not be read is None, and in ``faults``.

    ``weights_at_hand``: all external data lies in the folder, so that it may be opened.
    ``providers``: those a session would use, the one asked for first.
    ``kernels``: of the installed providers, None where onnxruntime is missing or is silent.
    """

    folder: ModelFolder
    model: onnx.ModelProto
    wiring: Wiring
    signature: Signature
    schema: CacheSchema | None
    prefill: onnx.ModelProto | None
    prefill_schema: CacheSchema | None
    weights_at_hand: bool
    json: dict[str, dict[str, Any]]
    context_length: int | None
    text: Text | None
    providers: tuple[str, ...]
    kernels: tuple[Kernel, ...] | None
    memory_bytes: int | None
    faults: tuple[Finding, ...]

    @property
    def models(self) -> list[onnx.ModelProto]:
        """The graph, and the one for first runs where there is one."""
        return [self.model] if self.prefill is None else [self.model, self.prefill]

    @property
    def config(self) -> dict[str, Any]:
        """config.json, or the part of it that is about text."""
        config = self.json["config.json"]
        return part(config, "text_config") or config


def part(data: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; empty where there is none, or something else."""
    found: Any = data.get(key)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


class _Faults:
    """Errors met while reading, as findings."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def attempt(self, act: Callable[[], _Result]) -> _Result | None:
        """The act's result; None where it raises. Token ids do without a tokenizer."""
        try:
            return act()
        except OrtkvError as error:
            level = "warning" if isinstance(error, TokenizerMissing) else "error"
            finding = finding_of(error, level=level)
            if finding not in self.found:
                self.found.append(finding)
            return None


def examine(
    path: str | Path, *, provider: Provider = "cpu", kv_map: MapSource | None = None
) -> Subject:
    """Read a model without its weights and without a session.

    Raises: ModelFileError where there is no graph that can be read at all.
    """
    from ortkv.text import load_text

    folder = open_folder(path)
    model = read_model(folder.graph)
    prefill = None if folder.prefill is None else read_model(folder.prefill)
    faults = _Faults()
    at_hand = [faults.attempt(lambda: _check(model, folder.graph))]
    signature = signature_of(model)
    stated = faults.attempt(lambda: map_of(folder, kv_map)) or NOTHING
    schema = faults.attempt(lambda: derive(signature, model, stated))
    prefill_schema = None
    if prefill is not None and folder.prefill is not None:
        graph = folder.prefill
        at_hand.append(faults.attempt(lambda: _check(prefill, graph)))
        if schema is not None:
            prefill_schema = faults.attempt(
                lambda: derive_prefill(signature_of(prefill), prefill, schema, stated)
            )
    json = {name: faults.attempt(lambda n=name: folder.json(n)) or {} for name in _JSON_FILES}
    installed = _installed(provider, faults)
    return Subject(
        folder=folder,
        model=model,
        wiring=wire(model),
        signature=signature,
        schema=schema,
        prefill=prefill,
        prefill_schema=prefill_schema,
        weights_at_hand=all(at_hand),
        json=json,
        context_length=faults.attempt(lambda: folder.context_length),
        text=faults.attempt(lambda: load_text(folder)),
        providers=installed[0],
        kernels=installed[1],
        memory_bytes=available_bytes(),
        faults=tuple(faults.found),
    )


def _check(model: onnx.ModelProto, graph: Path) -> bool:
    check_external_data(model, graph)
    return True


def _installed(
    provider: Provider, faults: _Faults
) -> tuple[tuple[str, ...], tuple[Kernel, ...] | None]:
    """The providers asked for, and the kernels there are; judged by name where not installed."""
    names = faults.attempt(lambda: provider_names(provider))
    if names is None:
        cuda = str(provider).lower().startswith("cuda") or "CUDA" in str(provider)
        asked = ("CUDAExecutionProvider",) if cuda else ()
        names = (*asked, "CPUExecutionProvider")
    return names, faults.attempt(kernels)
