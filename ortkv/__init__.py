"""ortkv runs any autoregressive ONNX decoder on ONNX Runtime and lets you hold its cache.

>>> import ortkv
>>> ortkv.Generator("models/shakespeare-onnx").generate("ROMEO:")  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortkv.errors import OrtkvError
    from ortkv.generation_config import GenerationConfig
    from ortkv.generator import Generator
    from ortkv.loading import inspect
    from ortkv.schema import CacheEntry, CacheSchema
    from ortkv.sequence import SequenceState
    from ortkv.verification import VerifyReport, verify

__version__ = "0.1.0"
__all__ = [
    "CacheEntry",
    "CacheSchema",
    "GenerationConfig",
    "Generator",
    "OrtkvError",
    "SequenceState",
    "VerifyReport",
    "__version__",
    "inspect",
    "verify",
]

# onnxruntime reads this when it is first imported: no telemetry unless the user set it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "CacheEntry": "ortkv.schema",
    "CacheSchema": "ortkv.schema",
    "GenerationConfig": "ortkv.generation_config",
    "Generator": "ortkv.generator",
    "OrtkvError": "ortkv.errors",
    "SequenceState": "ortkv.sequence",
    "VerifyReport": "ortkv.verification",
    "inspect": "ortkv.loading",
    "verify": "ortkv.verification",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line answers before numpy and onnxruntime are read."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
