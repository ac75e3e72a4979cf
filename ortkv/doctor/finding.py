"""One finding: what was found, what it costs, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ortkv.errors import OrtkvError

Level = Literal["error", "warning", "note"]
"""error: the model fails or answers wrongly; warning: it costs; note: good to know."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``code`` is stable; ``message`` says what was found and its cost; ``do`` what to do."""

    code: str
    level: Level
    message: str
    do: str

    def to_dict(self) -> dict[str, str]:
        """One of the findings that ``ortkv doctor --json`` prints (docs/doctor.schema.json)."""
        return {"code": self.code, "level": self.level, "message": self.message, "do": self.do}


def finding_of(error: OrtkvError, *, level: Level = "error") -> Finding:
    """An error that loading would raise: its last sentence, or clause, says what to do."""
    told, _, do = str(error).rpartition(". ")
    if not told:
        told, _, do = str(error).rpartition(": ")
    if not do.startswith("pip "):
        do = do[:1].upper() + do[1:]
    return Finding(code=error.code, level=level, message=f"{told or error}.", do=do)


def size(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
