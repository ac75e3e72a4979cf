"""The quick proof of a loaded model's cache: made once a graph and provider, and kept.

Certificates lie in the user's cache folder (``ORTKV_CACHE_DIR``, else ``XDG_CACHE_HOME/ortkv``,
else ``~/.cache/ortkv``) and never beside the model: an exported folder's manifest lists every
file in it, and others' folders are not ours to write into.

A certificate speaks of one identity: the graphs' bytes, the sizes and times of the external
weights, the schema, the provider, and the versions of onnxruntime and ortkv. One that cannot be
read, is damaged or says anything else is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ortkv.errors import ExecutionFailed, UnsupportedModel
from ortkv.proof import Check, quick_proof
from ortkv.runtime import import_onnxruntime

if TYPE_CHECKING:
    from ortkv.loading import Loaded
    from ortkv.proof import QuickReport

MIN_BUDGET_S = 0.3
LOAD_SHARE = 0.05
"""A certificate may take this much of the load's time, or MIN_BUDGET_S where that is more; the
check under way when the time is up is finished, and those not started are left to a later load."""
HASHED_BYTES = 32 * 2**20
"""Of a graph file. A serialized graph has its nodes before its weights: in a larger file the rest
is weights, known by size and time."""
MAX_FILE_BYTES = 2**16
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proved of a model's cache, and when.

    tolerance: no error is beyond it.   skipped: why some checks cannot be made of this graph.
    not_run: checks left for want of time.   from_cache: read from disk, nothing was run.
    """

    checks: tuple[Check, ...]
    tolerance: float
    skipped: tuple[str, ...]
    not_run: tuple[str, ...]
    made: date
    from_cache: bool

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of each check, by its name."""
        return {check.name: check.max_abs_error for check in self.checks}


def certified(loaded: Loaded) -> Certificate:
    """The model's certificate: the one kept, or a new one, kept for the next load.

    Raises: UnsupportedModel where a check is beyond tolerance or its run is refused.
    Changes: a file in the user's cache folder; that it cannot be written is no error.
    """
    identity = _identity(loaded)
    path = _path_of(identity)
    kept = _read(path, identity)
    if kept is not None and not kept.not_run:
        return kept
    report = _proved(loaded, kept)
    if kept is not None and not report.checks:
        return kept
    earlier = () if kept is None else kept.checks
    certificate = Certificate(
        checks=(*earlier, *report.checks),
        tolerance=report.tolerance,
        skipped=report.skipped,
        not_run=report.not_run,
        made=datetime.now(UTC).date(),
        from_cache=False,
    )
    _write(path, identity, certificate)
    return certificate


def cache_folder() -> Path | None:
    """Where ortkv keeps what it can make again; None where the user has no home."""
    own, shared = os.environ.get("ORTKV_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if shared and Path(shared).is_absolute():  # relative ones are to be ignored, says XDG
        return Path(shared) / "ortkv"
    try:
        return Path.home() / ".cache" / "ortkv"
    except RuntimeError:
        return None


def _proved(loaded: Loaded, kept: Certificate | None) -> QuickReport:
    graph, name = loaded.model.graph, loaded.folder.graph
    advice = (
        f"Run `ortkv verify {name}` for the numbers of each layer; state the cache in ortkv.json "
        "or with --kv-map, or export the model again. certify=False loads it all the same."
    )
    try:
        report = quick_proof(
            graph,
            budget_s=max(MIN_BUDGET_S, LOAD_SHARE * loaded.seconds),
            max_tokens=loaded.model.context_length,
            passed=() if kept is None else tuple(kept.errors),
        )
    except (ExecutionFailed, UnsupportedModel) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise UnsupportedModel(
            f"{name}: a check of its cache failed: {reason}. {advice}"
        ) from error
    if not report.ok:
        worst = max(report.checks, key=lambda check: check.max_abs_error)
        raise UnsupportedModel(
            f"{name}: the cache is not understood: {worst.name} is off a full run's logits by "
            f"{worst.max_abs_error:.2e}, expected at most {report.tolerance:.2e}. {advice}"
        )
    return report


def _identity(loaded: Loaded) -> dict[str, Any]:
    """All that a certificate depends on, as JSON."""
    graph = loaded.model.graph
    folder = loaded.folder
    files = [path for path in (folder.graph, folder.prefill, folder.embedding) if path is not None]
    schemas = [graph.schema, *([graph.prefill.schema] if graph.prefill else [])]
    return {
        "graphs": [_hash_of(path) for path in files],
        "weights": sorted(_stated(path) for path in loaded.weights),
        "schema": hashlib.sha256(repr(schemas).encode()).hexdigest(),
        "providers": [*graph.session.get_providers(), f"{graph.device.kind}:{graph.device.index}"],
        "onnxruntime": import_onnxruntime().__version__,
        "ortkv": _own_version(),
        "machine": platform.machine(),
    }


def _own_version() -> str:
    try:
        return version("ortkv")
    except PackageNotFoundError:  # a source tree on the path, never installed
        return "not installed"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HASHED_BYTES)).hexdigest()
    size = path.stat().st_size
    return digest if size <= HASHED_BYTES else f"{digest} {_stated(path)}"


def _stated(path: Path) -> str:
    status = path.stat()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _path_of(identity: dict[str, Any]) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "certificates" / f"{_digest(identity)}.json"


def _read(path: Path | None, identity: dict[str, Any]) -> Certificate | None:
    """The certificate in a file, or None where there is none that can be believed."""
    try:
        if path is None or path.stat().st_size > MAX_FILE_BYTES:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        stated, digest = document["certificate"], document["sha256"]
        if document["format"] != FORMAT or document["identity"] != identity:
            return None
        if digest != _digest([identity, stated]):
            return None
        return _parsed(cast("dict[str, Any]", stated))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _parsed(stated: dict[str, Any]) -> Certificate | None:
    certificate = Certificate(
        checks=tuple(Check(**check) for check in stated["checks"]),
        tolerance=float(stated["tolerance"]),
        skipped=tuple(stated["skipped"]),
        not_run=tuple(stated["not_run"]),
        made=date.fromisoformat(stated["made"]),
        from_cache=True,
    )
    within = all(error <= certificate.tolerance for error in certificate.errors.values())
    return certificate if within and math.isfinite(certificate.tolerance) else None


def _write(path: Path | None, identity: dict[str, Any], certificate: Certificate) -> None:
    """Put the file in place whole, or not at all."""
    if path is None:
        return
    stated = asdict(replace(certificate, from_cache=True)) | {"made": certificate.made.isoformat()}
    del stated["from_cache"]
    stated = json.loads(json.dumps(stated))  # as a reader sees it: its digest is of that
    document = {
        "format": FORMAT,
        "identity": identity,
        "certificate": stated,
        "sha256": _digest([identity, stated]),
    }
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(json.dumps(document, indent=1))
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
