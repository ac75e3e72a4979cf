"""How far logits may be from a full run's, and how far they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.decoder import Decoder
from ortkv.proof.report import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ortkv.decoder import LoadedGraph
    from ortkv.proof.ways import Scored

    FullRun = Callable[[Sequence[int], int], NDArray[np.float32]]

RELATIVE_TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest logit, by the coarsest dtype on the way. One rounding is 6e-8, 5e-4 or 4e-3;
another order of summation costs some tens of them over a network's depth. A misplaced cache
entry moves logits by 1e-2 of the largest and more."""
QUANTIZED_TOLERANCE = 5e-2
"""Where the graph's products round their inputs. Measured on int4 weights (MatMulNBits with
accuracy_level 4; the shipped model, the Llama and Qwen3 fixtures; 3 seeds): a sound schema differs
by at most 4.5e-3 of the largest logit, one with any two entries crossed by 0.115 or more (0.077 in
the quick form). Dynamic int8, whose scale spans all rows of a run, may differ more and is then
reported."""
CUDA_TOLERANCE = 5e-3
"""onnxruntime's CUDA products of float32 go through TF32 (10 mantissa bits, 5e-4 a rounding), and
one token takes another kernel than several."""


def full_runs(graph: LoadedGraph) -> FullRun:
    """The logits [vocab_size] after some tokens, by one run over an empty cache; remembered.

    Its second argument: which of the graph's probes cross-attention looks at.
    """
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def full(tokens: Sequence[int], source: int) -> NDArray[np.float32]:
        key = (source if graph.probes else 0, *tokens)
        if key not in known:
            known[key] = Decoder(graph, graph.probe_cache(source)).prefill(tokens).copy()
        return known[key]

    return full


def compared(way: Scored, full: FullRun) -> Check:
    """A way's logits against full runs over the same tokens."""
    sources = way.sources or (0,) * len(way.prefixes)
    pairs = zip(way.prefixes, sources, strict=True)
    expected = np.array([full(prefix, source) for prefix, source in pairs])
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(way.logits, expected, strict=True)]
    return Check(
        name=way.name,
        max_abs_error=largest(way.logits, expected),
        greedy_agreement=sum(same) / len(same),
    )


def largest(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest absolute difference; infinite where one side is not a number."""
    difference = np.subtract(actual, expected, dtype=np.float64)
    found = float(np.linalg.norm(difference.reshape(-1), ord=np.inf))
    return found if math.isfinite(found) else math.inf


def tolerance_of(graph: LoadedGraph, largest_logit: float) -> float:
    """The largest error that rounding alone can explain."""
    dtypes = {entry.dtype for entry in graph.schema.entries} | {graph.schema.logits_dtype}
    relative = [RELATIVE_TOLERANCE.get(dtype, QUANTIZED_TOLERANCE) for dtype in dtypes]
    if graph.schema.quantized:
        relative.append(QUANTIZED_TOLERANCE)
    if graph.device.kind == "cuda":
        relative.append(CUDA_TOLERANCE)
    return max(relative) * float(largest_logit)
