"""Encoder-decoders of real exporters against transformers: logits at every step, greedy tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ortkv
import pytest
from ortkv.cache import Cache
from ortkv.decoder import Decoder
from ortkv.errors import InvalidRequest, TokenizerMissing, UnsupportedModel
from ortkv.feeds import Source
from ortkv.loading import load_model
from ortkv.proof import verify_graph
from ortkv.sequence import start_sequence

from encoder_decoder.references import (
    EXPORTS,
    FIXTURES,
    OF_FEATURES,
    OF_TOKENS,
    TOLERANCE,
    WITHOUT_START,
    generator,
    rows,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from ortkv.runtime import IoBinding, Session

every_export = pytest.mark.parametrize("name", EXPORTS)


def assert_close(found: object, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=TOLERANCE)


@every_export
def test_logits_of_every_step_are_transformers_own(name: str) -> None:
    for row in rows(name):
        sequence = generator(name).start(row.tokens[:3], source=row.source)
        found = [sequence.logits]
        found += [sequence.extend([token]).logits for token in row.tokens[3:]]
        assert_close(found, row.logits[2:])
        assert sequence.tokens == row.tokens


@every_export
def test_greedy_tokens_are_transformers_own(name: str) -> None:
    """Two sources at once, of unequal length where they are tokens; the start is no new token."""
    both = rows(name)
    if name in WITHOUT_START:
        with pytest.raises(InvalidRequest, match="has no decoder_start_token_id"):
            generator(name).start(both[0].source)
        started = [generator(name).start(row.tokens[:1], source=row.source) for row in both]
        found = [s.generate_ids(max_new_tokens=16, eos_token_id=()) for s in started]
    else:
        sources = [row.source for row in both]
        found = generator(name).generate_ids(sources, max_new_tokens=16, eos_token_id=())
    assert found == [row.greedy for row in both]


@every_export
def test_a_prompt_alone_is_the_source(name: str) -> None:
    if name in WITHOUT_START:
        pytest.skip("its JSON does not say where the decoder starts")
    row = rows(name)[0]
    sequence = generator(name).start(row.source)
    assert sequence.tokens == row.tokens[:1]
    assert_close(sequence.logits, row.logits[0])


@every_export
def test_a_sequence_goes_back_and_parts_without_losing_its_source(name: str) -> None:
    row, other = rows(name)
    sequence = generator(name).start(row.tokens[:9], source=row.source)
    twin = sequence.fork()
    twin.rewind(0)
    assert_close(twin.extend(other.tokens[:1]).logits, row.logits[0])
    assert_close(twin.extend(row.tokens[1:6]).logits, row.logits[5])
    assert_close(sequence.logits, row.logits[8])
    sequence.generate_ids(max_new_tokens=4, eos_token_id=())
    assert_close(sequence.rewind(4).logits, row.logits[3])
    assert_close(sequence.become(row.tokens[:12]).logits, row.logits[11])
    sequence.release()
    assert_close(sequence.logits, row.logits[11])


def test_what_one_sequence_looks_at_is_nothing_to_another() -> None:
    row, other = rows("t5-optimum")
    wrong = generator("t5-optimum").start(row.tokens[:5], source=other.source)
    assert np.abs(wrong.logits - row.logits[4]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", OF_TOKENS)
def test_rows_of_unequal_sources_share_a_run(name: str) -> None:
    """Padded and masked they are exact; where the padding were seen, they would not be."""
    model = load_model(FIXTURES / name, threads=1)
    assert model.graph.schema.takes_ragged_sources
    both = rows(name)
    alone = [Decoder(model.graph, model.graph.new_cache(model.encoded(r.source))) for r in both]
    for decoder, row in zip(alone, both, strict=True):
        decoder.prefill(row.tokens[:5])
    batch = Decoder(model.graph, Cache.joined([decoder.cache for decoder in alone]))
    for place in range(5, 12):
        logits = batch.step([row.tokens[place] for row in both])
        assert_close(logits, np.array([row.logits[place] for row in both]))
    source = batch.cache.source
    assert source is not None
    assert source.lengths == [len(row.source) for row in both]
    batch.cache.source = Source(source.states, [max(source.lengths)] * 2)
    seen = batch.step([row.tokens[12] for row in both])
    assert np.abs(seen - [row.logits[12] for row in both]).max() > 100 * TOLERANCE


class CountingSession:
    """onnxruntime's own session, with a count of its runs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.num_runs = 0

    def io_binding(self) -> IoBinding:
        return self._session.io_binding()

    def get_providers(self) -> list[str]:
        return self._session.get_providers()

    def run_with_iobinding(self, iobinding: IoBinding) -> None:
        self.num_runs += 1
        self._session.run_with_iobinding(iobinding)


def test_a_source_is_encoded_once_a_sequence() -> None:
    model = load_model(FIXTURES / "bart-optimum", threads=1)
    encoder = model.require_encoder()
    counting = CountingSession(encoder.session)
    graph = replace(model.graph, encoder=replace(encoder, session=counting))
    row = rows("bart-optimum")[0]
    sequence = start_sequence(replace(model, graph=graph), row.source)
    sequence.generate_ids(max_new_tokens=4, eos_token_id=())
    sequence.fork().rewind(0).extend([3, 4])
    sequence.release()
    assert sequence.rewind(1).logits.shape == (64,)
    assert counting.num_runs == 1


@every_export
def test_verify_proves_it_and_rejects_crossed_entries(name: str) -> None:
    graph = load_model(FIXTURES / name, threads=1).graph
    report = verify_graph(graph)
    assert report.ok
    assert {"prefill and steps", "chunked prefill", "rewind", "equal rows"} <= {
        check.name for check in report.checks
    }
    entries = graph.schema.entries
    for role in {entry.role for entry in entries}:
        one, other = (i for i, entry in enumerate(entries) if entry.role == role)
        crossed = list(entries)
        crossed[one] = replace(entries[one], past=entries[other].past)
        crossed[other] = replace(entries[other], past=entries[one].past)
        schema = replace(graph.schema, entries=tuple(crossed))
        assert not verify_graph(replace(graph, schema=schema)).ok, role


def test_a_load_is_certified_with_sources_of_its_own() -> None:
    certificate = generator("marian-optimum").certificate
    assert certificate is not None
    assert {*certificate.errors, *certificate.not_run} >= {"rewind", "equal rows"}


@pytest.mark.parametrize("name", ["t5-optimum", "t5-two-files", "whisper-optimum"])
def test_without_its_encoder_a_decoder_is_proved_but_not_run(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    (folder / "encoder_model.onnx").unlink()
    assert ortkv.inspect(folder) == generator(name).schema
    assert ortkv.verify(folder, threads=1).ok
    with pytest.raises(
        UnsupportedModel, match=r"takes encoder_\w+, .*expected encoder_model\.onnx"
    ):
        ortkv.Generator(folder)


def test_a_decoder_alone_takes_no_source() -> None:
    model = load_model(FIXTURES / "llama-optimum", threads=1)
    with pytest.raises(InvalidRequest, match="a source for a decoder that looks at no encoder"):
        start_sequence(model, [1, 2], [3, 4])


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("t5-optimum", [], "at least one token id"),
        ("t5-optimum", [1, 64], r"ids \[64\] in the source"),
        ("t5-optimum", [1, -1], r"ids \[-1\] in the source"),
        ("t5-optimum", [1, 2.5], "expected integers"),
        ("t5-optimum", np.zeros((8, 16), np.float32), "expected text or at least one token id"),
        ("t5-optimum", 7, "expected a str, or a list of token ids"),
        ("whisper-optimum", [1, 2, 3], "expected features"),
        ("whisper-optimum", "text", "expected features"),
        ("whisper-optimum", [[1.0], [1.0, 2.0]], "expected features"),
        ("whisper-optimum", np.zeros((8, 15), np.float32), r"shape \(1, 8, 15\): expected"),
        ("whisper-optimum", np.zeros((2, 8, 16), np.float32), "features of one row"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(name: str, source: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        generator(name).start(source)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(TokenizerMissing):
        generator("t5-optimum").generate("text")


@pytest.mark.parametrize("name", OF_FEATURES)
def test_features_may_have_an_axis_of_one_row(name: str) -> None:
    row = rows(name)[1]
    sequence = generator(name).start(row.tokens[:4], source=row.source[None])
    assert_close(sequence.logits, row.logits[3])
