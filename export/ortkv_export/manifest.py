"""``ortkv.json``: what an exported folder is, where it came from, and what was checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import ortkv

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE_NAME = "ortkv.json"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a folder came from.

    producer: the exporter; versions: package -> version; source: the checkpoint's name;
    source_sha256: of its weights; precision: of the graph's weights, such as fp32.
    passes: rewrites after the export, in order.   parity: figure -> value, against the source.
    """

    producer: str
    versions: Mapping[str, str]
    source: str
    source_sha256: str
    precision: str
    parity: Mapping[str, float | int | bool]
    passes: tuple[str, ...] = field(default=())


def write_manifest(folder: Path, provenance: Provenance) -> Path:
    """Write ``ortkv.json`` over all files now in ``folder``; the old one stays until it is whole.

    Returns: its path.
    """
    document: dict[str, Any] = {
        "format": 1,
        "ortkv": ortkv.__version__,
        **asdict(provenance),
        "schema": ortkv.inspect(folder).to_dict(),
        "files": {
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != FILE_NAME
        },
    }
    target = folder / FILE_NAME
    partial = target.with_suffix(".json.partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def sha256_of(path: Path) -> str:
    """The hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
