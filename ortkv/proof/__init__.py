"""Proof that a schema is right: the cached ways of computing logits against one full run.

A full run starts from an empty cache and reads nothing from it, so that it is right whatever
the schema says of the cache; every other way must agree with it.
"""

from ortkv.proof.candidates import decide
from ortkv.proof.quick import QuickReport, quick_proof
from ortkv.proof.report import Check, EntryError, VerifyReport, by_layer
from ortkv.proof.thorough import verify_graph

__all__ = [
    "Check",
    "EntryError",
    "QuickReport",
    "VerifyReport",
    "by_layer",
    "decide",
    "quick_proof",
    "verify_graph",
]
