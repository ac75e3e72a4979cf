"""Real exporters' graphs give transformers' own logits at every step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import ortkv
import pytest

from exports.recorded import (
    FOLDERS,
    PROMPT_LEN,
    REFUSED,
    error,
    greedy,
    rows,
    start,
    tolerance,
)

if TYPE_CHECKING:
    from pathlib import Path

RUN = [folder for folder in FOLDERS if folder.name not in REFUSED]
each = pytest.mark.parametrize("folder", RUN, ids=lambda folder: folder.name)


@functools.cache
def generator(folder: Path) -> ortkv.Generator:
    return ortkv.Generator(folder, threads=1)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_there_are_entries_of_every_layer(folder):
    schema = ortkv.inspect(folder)
    assert schema.entries
    assert len({entry.layer for entry in schema.entries}) == schema.num_layers


@each
def test_logits_at_every_step_are_the_references(folder):
    for row in rows(folder):
        assert error(generator(folder), row) < tolerance(folder)


@each
def test_greedy_tokens_are_the_references(folder):
    for row in rows(folder):
        assert greedy(generator(folder), [row], folder) == [row.greedy]


@each
def test_rows_of_different_length_together_are_each_as_alone(folder):
    both = rows(folder)
    assert greedy(generator(folder), both, folder) == [row.greedy for row in both]


@each
def test_a_misplaced_token_would_be_seen(folder):
    """The tolerance is far below what one wrong cache entry does to these models."""
    row = rows(folder)[0]
    sequence = start(generator(folder), row, PROMPT_LEN - 1)
    wrong = int(row.tokens[PROMPT_LEN - 1] + 1) % row.logits.shape[1]
    sequence.extend([wrong]).extend([int(row.tokens[PROMPT_LEN])])
    moved = abs(sequence.logits - row.logits[PROMPT_LEN]).max()
    assert moved > 5 * tolerance(folder) * abs(row.logits).max()


@each
def test_verify_agrees(folder):
    graph = generator(folder)._model.graph
    if graph.schema.fixed_query_len == 1 and graph.prefill is None:
        with pytest.raises(ortkv.OrtkvError, match="no full run to compare"):
            ortkv.verify(folder)
        return
    report = ortkv.verify(folder)
    assert report.ok, report


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_run_is_refused_in_words(name):
    folder = next(folder for folder in FOLDERS if folder.name == name)
    with pytest.raises(ortkv.OrtkvError, match=REFUSED[name]):
        ortkv.Generator(folder)
