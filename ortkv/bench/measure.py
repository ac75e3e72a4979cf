"""Time one model: prefill, first token, decode steps, and Python's own share of a step."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ortkv.bench.machine import environment, peak_rss_bytes, physical_memory_bytes
from ortkv.errors import InvalidRequest
from ortkv.generation_config import GenerationConfig
from ortkv.loading import load_model
from ortkv.sequence import decode, start_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ortkv.loading import MapSource
    from ortkv.runtime import IoBinding, Provider, Session
    from ortkv.sequence import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is measured: ``batch`` prompts of random ids, prefilled and lengthened greedily."""

    prompt_len: int = 128
    new_tokens: int = 64
    batch: int = 1
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians over the repeats. Times in the units their names end in."""

    provider: str
    threads: int | None
    batch: int
    prompt_len: int
    new_tokens: int
    repeats: int
    load_s: float
    time_to_first_token_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_step_ms: float
    decode_step_p90_ms: float
    python_step_us: float
    cache_bytes_per_token: int
    peak_rss_bytes: int | None


class _TimedSession:
    """A session that adds up the time spent inside onnxruntime."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.inside_s = 0.0

    def io_binding(self) -> IoBinding:
        return self._session.io_binding()

    def get_providers(self) -> list[str]:
        return self._session.get_providers()

    def run_with_iobinding(self, iobinding: IoBinding) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(iobinding)
        self.inside_s += time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One repeat: seconds to the first token, seconds of each later step, and inside ORT."""

    first_s: float
    steps_s: list[float]
    steps_inside_s: list[float]


def bench(
    path: str | Path,
    *,
    providers: Sequence[Provider] = ("cpu",),
    threads: int | None = None,
    kv_map: MapSource | None = None,
    workload: Workload,
) -> dict[str, Any]:
    """Measure a model on each provider. Returns: the document ``ortkv bench --json`` prints."""
    results = [_measure(path, provider, threads, kv_map, workload) for provider in providers]
    return {
        "format": 1,
        "model": str(path),
        "environment": environment(),
        "results": [asdict(result) for result in results],
    }


def _measure(
    path: str | Path,
    provider: Provider,
    threads: int | None,
    kv_map: MapSource | None,
    workload: Workload,
) -> Result:
    start = time.perf_counter()
    model = load_model(path, provider=provider, threads=threads, kv_map=kv_map)
    load_s = time.perf_counter() - start
    _check(workload, model)
    timed = _TimedSession(model.graph.session)
    model = replace(model, graph=replace(model.graph, session=timed))
    prompts = _prompts(workload, model.graph.schema.vocab_size or 256)
    passes = [_run(model, timed, prompts, workload) for _ in range(workload.repeats + 1)][1:]
    return _summary(model, passes, workload, provider=provider, threads=threads, load_s=load_s)


def _check(workload: Workload, model: LoadedModel) -> None:
    limit = model.context_length
    needed = workload.prompt_len + workload.new_tokens
    if workload.prompt_len < 1 or workload.new_tokens < 2 or workload.batch < 1:
        raise InvalidRequest(
            f"prompt_len {workload.prompt_len}, new_tokens {workload.new_tokens}, batch "
            f"{workload.batch}: expected at least 1, 2 and 1."
        )
    num_bytes = 2 * workload.batch * needed * model.graph.schema.bytes_per_token
    memory = physical_memory_bytes()
    if memory is not None and num_bytes > memory:
        raise InvalidRequest(
            f"a batch of {workload.batch} needs {num_bytes / 2**30:.1f} GiB of cache: expected at "
            f"most this machine's {memory / 2**30:.1f} GiB. Take a smaller batch."
        )
    if workload.repeats < 1 or (limit is not None and needed > limit):
        raise InvalidRequest(
            f"{workload.repeats} repeats of {needed} tokens: expected at least 1 repeat, and no "
            f"more tokens than the model's context of {limit}."
        )


def _prompts(workload: Workload, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(workload.seed)
    ids = random.integers(0, vocab_size, (workload.batch, workload.prompt_len))
    return [[int(token) for token in row] for row in ids]


def _run(
    model: LoadedModel, timed: _TimedSession, prompts: list[list[int]], workload: Workload
) -> _Pass:
    """One prefill and its decode steps. A step is from one row-0 token to the next."""
    config = GenerationConfig(max_new_tokens=workload.new_tokens)
    start = time.perf_counter()
    sequences = [start_sequence(model, prompt) for prompt in prompts]
    times: list[float] = []
    inside: list[float] = []
    for emitted in decode(sequences, config, text=False):
        if emitted.row == 0:
            times.append(time.perf_counter())
            inside.append(timed.inside_s)
    return _Pass(
        first_s=times[0] - start,
        steps_s=np.diff(times).tolist(),
        steps_inside_s=np.diff(inside).tolist(),
    )


def _summary(
    model: LoadedModel,
    passes: list[_Pass],
    workload: Workload,
    *,
    provider: Provider,
    threads: int | None,
    load_s: float,
) -> Result:
    first_s = float(np.median([p.first_s for p in passes]))
    steps_s = np.array([p.steps_s for p in passes])
    inside_s = np.array([p.steps_inside_s for p in passes])
    step_s = float(np.median(steps_s))
    return Result(
        provider=str(provider),
        threads=threads,
        batch=workload.batch,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        repeats=workload.repeats,
        load_s=load_s,
        time_to_first_token_ms=1e3 * first_s,
        prefill_tokens_per_s=workload.batch * workload.prompt_len / first_s,
        decode_tokens_per_s=workload.batch / step_s,
        decode_step_ms=1e3 * step_s,
        decode_step_p90_ms=1e3 * float(np.percentile(steps_s, 90)),
        python_step_us=1e6 * float(np.median(steps_s - inside_s)),
        cache_bytes_per_token=model.graph.schema.bytes_per_token,
        peak_rss_bytes=peak_rss_bytes(),
    )
