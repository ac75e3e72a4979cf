"""What cross-attention looks at in a proof: a source that is nobody's, of a fixed seed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.encoder import Encoded
from ortkv.errors import UnsupportedModel
from ortkv.feeds import Source
from ortkv.schema import loaded_entries, takes_source
from ortkv.signature import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ortkv.decoder import LoadedGraph
    from ortkv.schema import CacheSchema

SOURCE_LENGTHS = (7, 4, 9)
"""Of the rows of a batch: unequal, so that padding would be seen."""


def with_probes(graph: LoadedGraph, seed: int) -> LoadedGraph:
    """The graph with random encoder states for its proof; itself where it takes none.

    Random ones do as well as an encoder's: every way must make the same of them.
    Raises: UnsupportedModel where the graph leaves their width open.
    """
    if graph.probes or not takes_source(graph.schema):
        return graph
    random = np.random.default_rng(seed)
    fixed = _source_len(graph)
    lengths = SOURCE_LENGTHS if fixed is None else (fixed,) * len(SOURCE_LENGTHS)
    return replace(graph, probes=tuple(_probe(graph, length, random) for length in lengths))


def _probe(graph: LoadedGraph, length: int, random: np.random.Generator) -> Encoded:
    first = None if graph.prefill is None else graph.prefill.schema
    cross: dict[str, NDArray[Any]] = {
        entry.past: random.normal(size=entry.shape(batch=1, length=length)).astype(
            numpy_dtype(entry.dtype)
        )
        for entry in loaded_entries(graph.schema, first)
        if entry.past is not None
    }
    states = random.normal(size=(1, length, _width(graph))).astype(np.float32)
    return Encoded(source=Source(states, [length]), cross=cross)


def _schemas(graph: LoadedGraph) -> list[CacheSchema]:
    return [graph.schema, *([] if graph.prefill is None else [graph.prefill.schema])]


def _source_len(graph: LoadedGraph) -> int | None:
    """The source's length where the graph fixes it."""
    entries = [e.capacity for e in graph.schema.entries if e.update == "constant"]
    helpers = [h for schema in _schemas(graph) for h in schema.helpers]
    masks = [h.dims[-1] for h in helpers if h.kind == "encoder_mask"]
    states = [h.dims[1] for h in helpers if h.kind == "encoder_states"]
    return next((n for n in (*entries, *masks, *states) if isinstance(n, int)), None)


def _width(graph: LoadedGraph) -> int:
    """The hidden size of the encoder's states; 0 where the graph takes none."""
    helpers = [h for schema in _schemas(graph) for h in schema.helpers]
    wanted = [h for h in helpers if h.kind == "encoder_states"]
    widths = [h.dims[-1] for h in wanted if isinstance(h.dims[-1], int)]
    if wanted and not widths:
        raise UnsupportedModel(
            f"{wanted[0].name} has dims {list(wanted[0].dims)}: expected a fixed hidden size, to "
            "make states of for a proof. Export the model with one, or load it with certify=False."
        )
    return widths[0] if widths else 0
