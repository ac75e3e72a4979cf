"""Graphs of every update rule through Decoder, against a numpy decoder without a cache.

Logits are compared at every step: after prefills in parts, steps, rewinds, copies, and with
rows of unequal length together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ortkv.binding import EmbeddingGraph
from ortkv.cache import Cache
from ortkv.decoder import Decoder, PrefillGraph
from ortkv.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from ortkv.feeds import Source

from binding.decoders import (
    WIDTH,
    Design,
    Layer,
    embedding_session,
    full_logits,
    loaded,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from ortkv.decoder import LoadedGraph

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 11, 24)]
OTHERS = TOKENS[::-1]


def two(**fields: Any) -> tuple[Layer, ...]:
    """Two layers of one rule, the second's key and value in layouts of their own."""
    return Layer(**fields), Layer(**fields, layouts=("(BH)DS", "BS(HD)"))


def mask(kind: str, values: str, dtype: str, width: int | None = None, name: str = "mask") -> Any:
    return (name, kind, values, dtype, width)


FULL_AND_SLIDING = Design(
    layers=(
        Layer(update="scatter", capacity=32),
        Layer(update="window", capacity=4, mask="near"),
    ),
    masks=(
        mask("mask_4d", "keep", "bool", 32),
        mask("mask_4d", "additive", "float32", 5, name="near"),
    ),
    fixed_query_len=1,
)
DESIGNS = {
    "concat": Design(layers=two()),
    "concat, additive mask": Design(layers=two(), masks=(mask("mask_4d", "additive", "float16"),)),
    "concat, sequence outermost": Design(layers=(Layer(layouts=("SBHD", "HBSD")),)),
    "delta": Design(layers=two(update="delta")),
    "delta, sequence outermost": Design(layers=(Layer(update="delta", layouts=("SBHD", "BSHD")),)),
    "delta, fixed": Design(layers=two(update="delta", capacity=30)),
    "delta, fixed, mask of fixed width": Design(
        layers=two(update="delta", capacity=30),
        masks=(mask("mask_2d", "drop", "int32", 31),),
        fixed_query_len=1,
    ),
    "delta, window": Design(layers=two(update="delta", window=4)),
    "delta, fixed window": Design(layers=two(update="delta", window=4, capacity=4)),
    "window": Design(layers=two(update="window", window=4)),
    "window, fixed": Design(layers=two(update="window", window=4, capacity=4)),
    "window, fixed, new tokens in it": Design(
        layers=two(update="window", capacity=4, sees_shifted=True),
        masks=(mask("mask_2d", "keep", "int64", 4),),
        fixed_query_len=1,
    ),
    "scatter by row": Design(layers=two(update="scatter"), row_alignment="start"),
    "scatter by row, fixed": Design(
        layers=two(update="scatter", capacity=30), row_alignment="start"
    ),
    "scatter by place": Design(layers=two(update="scatter")),
    "scatter by place, fixed": Design(
        layers=two(update="scatter", capacity=30), masks=(mask("mask_4d", "drop", "float32", 30),)
    ),
    "full and sliding": FULL_AND_SLIDING,
    "states": Design(layers=(Layer(kind="conv"), Layer(kind="recurrent"))),
    "hybrid": Design(
        layers=(Layer(kind="conv"), Layer(), Layer(kind="recurrent"), Layer(update="delta"))
    ),
    "hybrid, fixed": Design(
        layers=(Layer(kind="conv"), Layer(update="scatter", capacity=30)), row_alignment="start"
    ),
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)


def assert_scores(
    design: Design, logits: NDArray[Any], rows: Sequence[list[int]], sources: Any = None
) -> None:
    """logits: [batch, vocab], after the last token of each row."""
    states = sources or [None] * len(rows)
    wanted = [full_logits(design, row, own) for row, own in zip(rows, states, strict=True)]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def prefilled(design: Design, graph: LoadedGraph, row: list[int], **more: Any) -> Decoder:
    """A decoder that ran a row, its scores checked."""
    decoder = Decoder(graph, Cache(graph.schema, graph.device, source=more.get("source")))
    logits = decoder.prefill(row)
    assert_scores(design, logits[None], [row], more.get("states"))
    return decoder


@designs
@pytest.mark.parametrize("ends", [[1], [6], [3, 4, 9, 11]])
def test_parts_and_steps_score_as_a_full_run(design: Design, ends: list[int]) -> None:
    decoder = Decoder(loaded(design))
    for start, end in zip([0, *ends], ends, strict=False):
        assert_scores(design, decoder.prefill(TOKENS[start:end])[None], [TOKENS[:end]])
    for end in range(ends[-1], len(TOKENS)):
        assert_scores(design, decoder.step([TOKENS[end]]), [TOKENS[: end + 1]])


@designs
@pytest.mark.parametrize("count", [3, 9])
def test_after_a_truncation_it_goes_on_from_what_is_left(design: Design, count: int) -> None:
    decoder = prefilled(design, loaded(design), TOKENS[:count])
    for length in (2, 0):
        kept = decoder.cache.truncate(length)
        slides = any(layer.reach < count for layer in design.layers)
        has_states = any(layer.kind != "attention" for layer in design.layers)
        assert kept == (0 if has_states or slides else length)
        row = TOKENS[:kept]
        for token in OTHERS[:7]:
            row.append(token)
            assert_scores(design, decoder.step([token]), [row])


@designs
def test_copies_go_their_own_way(design: Design) -> None:
    decoder = prefilled(design, loaded(design), TOKENS[:7])
    twin = decoder.fork()
    row, other = TOKENS[:7], TOKENS[:7]
    for token in range(8):
        row, other = [*row, token], [*other, 10 - token]
        assert_scores(design, decoder.step([token]), [row])
        assert_scores(design, twin.step([10 - token]), [other])


@designs
def test_rows_of_unequal_length_score_as_each_alone(design: Design) -> None:
    graph = loaded(design)
    rows = [TOKENS[:9], OTHERS[:2], TOKENS[3:8]]
    alone = [prefilled(design, graph, row) for row in rows]
    together = Decoder(graph, Cache.joined([decoder.cache for decoder in alone]))
    for token in OTHERS[:4]:
        rows = [[*row, (token + i) % 11] for i, row in enumerate(rows)]
        assert_scores(design, together.step([row[-1] for row in rows]), rows)
    together.cache.keep([2, 1])
    rows = [rows[2], rows[1]]
    for token in TOKENS[:4]:
        rows = [[*row, (token + i) % 11] for i, row in enumerate(rows)]
        assert_scores(design, together.step([row[-1] for row in rows]), rows)


@designs
def test_a_run_that_fails_leaves_the_cache_as_it_was(design: Design) -> None:
    """A token id outside the table fails inside the graph, after everything was bound."""
    decoder = prefilled(design, loaded(design), TOKENS[:7])
    with pytest.raises(Exception, match="onnxruntime failed in a run"):
        decoder.step([999])
    assert_scores(design, decoder.step([TOKENS[7]]), [TOKENS[:8]])
    assert_scores(design, decoder.step([TOKENS[8]]), [TOKENS[:9]])


@designs
def test_an_interrupt_between_two_slots_costs_the_cache_but_never_its_truth(
    design: Design, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = prefilled(design, loaded(design), TOKENS[:7])
    last = decoder.cache.slots[-1]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.step([TOKENS[7]])
    assert decoder.cache.lengths == [0]
    for end in range(6):
        assert_scores(design, decoder.step([TOKENS[end]]), [TOKENS[: end + 1]])


@pytest.mark.parametrize("name", ["delta, fixed", "scatter by row, fixed", "hybrid, fixed"])
def test_a_fixed_buffer_takes_no_more_than_fits(name: str) -> None:
    design = DESIGNS[name]
    decoder = prefilled(design, loaded(design), TOKENS)
    row = list(TOKENS)
    for token in OTHERS[:6]:
        row.append(token)
        assert_scores(design, decoder.step([token]), [row])
    with pytest.raises(ContextLengthExceeded, match="30 cached and 1 new tokens do not fit"):
        decoder.step([1])
    assert decoder.cache.lengths == [30]


STATES = np.random.default_rng(2).normal(0.0, 1.0, (3, 5, WIDTH)).astype(np.float32)
SOURCE_LENS = [5, 2, 4]
CROSS = Design(layers=(Layer(), Layer(kind="cross"), Layer(update="delta")))


def source_of(row: int) -> tuple[Source, list[NDArray[Any]]]:
    own = STATES[row, : SOURCE_LENS[row]]
    return Source(own[None], [len(own)]), [own]


def cross_keys(row: int, role: str) -> NDArray[np.float32]:
    """What an encoder's graph would give out for the design's second layer."""
    own = STATES[row, : SOURCE_LENS[row]] @ weights(CROSS)[f"{role[6]}1"]
    return own.reshape(1, -1, 2, 4).transpose(0, 2, 1, 3)


def cross_graph(kind: str) -> LoadedGraph:
    if kind == "if":
        return loaded(CROSS)
    steps = loaded(replace(CROSS, cross="read"))
    if kind == "read":
        return steps
    first = loaded(replace(CROSS, cross="first"))
    return replace(steps, prefill=PrefillGraph(session=first.session, schema=first.schema))


def cross_decoder(graph: LoadedGraph, kind: str, row: int) -> Decoder:
    source, _ = source_of(row)
    cache = Cache(graph.schema, graph.device, source=source)
    if kind == "read":
        for entry in graph.schema.entries:
            if entry.update == "constant":
                cache.load(entry, cross_keys(row, entry.role))
    return Decoder(graph, cache)


kinds = pytest.mark.parametrize("kind", ["if", "first", "read"])


@kinds
@pytest.mark.parametrize("again", [0, 3])
def test_cross_attention_computes_its_keys_once(kind: str, again: int) -> None:
    """The source's states are taken away after the first run: nothing may need them again."""
    graph = cross_graph(kind)
    _, states = source_of(0)
    decoder = cross_decoder(graph, kind, 0)
    assert_scores(CROSS, decoder.prefill(TOKENS[:4])[None], [TOKENS[:4]], states)
    assert decoder.cache.source is not None
    decoder.cache.source.states[...] = STATES[0]
    for end in range(4, 9):
        assert_scores(CROSS, decoder.step([TOKENS[end]]), [TOKENS[: end + 1]], states)
    assert decoder.cache.truncate(again) == again
    row = TOKENS[:again]
    for token in OTHERS[:5]:
        row.append(token)
        assert_scores(CROSS, decoder.step([token]), [row], states)


@kinds
def test_rows_with_sources_of_unequal_length_score_as_each_alone(kind: str) -> None:
    graph = cross_graph(kind)
    rows = [TOKENS[:6], OTHERS[:3], TOKENS[3:8]]
    own = [source_of(i)[1][0] for i in range(3)]
    alone = [cross_decoder(graph, kind, i) for i in range(3)]
    for decoder, row in zip(alone, rows, strict=True):
        decoder.prefill(row)
    together = Decoder(graph, Cache.joined([decoder.cache for decoder in alone]))
    for token in OTHERS[:3]:
        rows = [[*row, (token + i) % 11] for i, row in enumerate(rows)]
        assert_scores(CROSS, together.step([row[-1] for row in rows]), rows, own)
    together.cache.keep([2, 1])
    rows, own = [rows[2], rows[1]], [own[2], own[1]]
    for token in TOKENS[:3]:
        rows = [[*row, (token + i) % 11] for i, row in enumerate(rows)]
        assert_scores(CROSS, together.step([row[-1] for row in rows]), rows, own)


def test_a_batch_may_start_together_over_one_source() -> None:
    graph = cross_graph("if")
    padded = STATES.copy()
    for row, length in enumerate(SOURCE_LENS):
        padded[row, length:] = 0
    cache = Cache(graph.schema, graph.device, batch=3, source=Source(padded, SOURCE_LENS))
    decoder = Decoder(graph, cache)
    rows: list[list[int]] = [[], [], []]
    for token in TOKENS[:5]:
        rows = [[*row, (token + i) % 11] for i, row in enumerate(rows)]
        scores = decoder.step([row[-1] for row in rows])
        assert_scores(CROSS, scores, rows, [source_of(i)[1][0] for i in range(3)])
    keys = next(entry for entry in graph.schema.entries if entry.role == "cross_key")
    np.testing.assert_allclose(cache.tensor(keys, 1), cross_keys(1, keys.role)[0], atol=1e-5)


def test_keys_that_are_only_read_must_have_been_loaded() -> None:
    graph = cross_graph("read")
    cache = Cache(graph.schema, graph.device, source=source_of(0)[0])
    keys = next(entry for entry in graph.schema.entries if entry.role == "cross_key")
    with pytest.raises(InvalidRequest, match="loaded into the cache"):
        Decoder(graph, cache).prefill(TOKENS[:3])
    with pytest.raises(InvalidRequest, match=r"expected \(1, 2, 5, 4\)"):
        cache.load(keys, cross_keys(1, keys.role))


def test_rows_that_have_run_and_rows_that_have_not_do_not_join() -> None:
    graph = cross_graph("if")
    ran, idle = cross_decoder(graph, "if", 0), cross_decoder(graph, "if", 1)
    ran.prefill(TOKENS[:2])
    with pytest.raises(InvalidRequest, match="caches that all had their first run"):
        Cache.joined([ran.cache, idle.cache])
    bare = Cache(graph.schema, graph.device)
    with pytest.raises(InvalidRequest, match="1 of 2 caches have a source"):
        Cache.joined([ran.cache, bare])


def test_an_encoder_decoder_needs_a_source() -> None:
    with pytest.raises(InvalidRequest, match="Run the model's encoder first"):
        Decoder(cross_graph("if")).prefill([1])


def test_embeddings_are_made_of_ids_by_the_graph_beside() -> None:
    design = Design(layers=two(), embeds=True)
    session = embedding_session(design)
    graph = loaded(
        design,
        embedding=EmbeddingGraph(session=session, ids="ids", embeds="embeds", ids_dtype="int32"),
    )
    decoder = prefilled(design, graph, TOKENS[:5])
    assert_scores(design, decoder.step([3]), [[*TOKENS[:5], 3]])
    with pytest.raises(UnsupportedModel, match="takes embeddings"):
        Decoder(replace(graph, embedding=None))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_sixteen_bits(dtype: str) -> None:
    """onnxruntime gives no numpy array of bfloat16."""
    design = Design(layers=two(), logits_dtype=dtype)
    decoder = Decoder(loaded(design))
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 9)):
        logits = decoder.prefill(TOKENS[start:end])
        assert logits.dtype == np.float32
        wanted = full_logits(design, TOKENS[:end])
        np.testing.assert_allclose(logits, wanted, rtol=2**-7, atol=1e-4)


def test_bfloat16_logits_of_unknown_width_are_refused() -> None:
    graph = loaded(Design(layers=two(), logits_dtype="bfloat16"))
    schema = replace(graph.schema, logits_dims=("b", "q", "v"))
    with pytest.raises(UnsupportedModel, match="bfloat16 of a width"):
        Decoder(replace(graph, schema=schema))


def test_a_bfloat16_mask_reaches_the_graph() -> None:
    """onnxruntime takes no numpy array of it either."""
    design = Design(layers=two(), masks=(mask("mask_4d", "additive", "bfloat16"),))
    decoder = prefilled(design, loaded(design), TOKENS[:5])
    assert_scores(design, decoder.step([3]), [[*TOKENS[:5], 3]])
