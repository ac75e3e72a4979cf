"""Real exporters' graphs give transformers' own logits at every step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import ortkv
import pytest

from exports.recorded import FOLDERS, PROMPT_LEN, error, greedy, rows, start, tolerance

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@functools.cache
def generator(folder: Path) -> ortkv.Generator:
    return ortkv.Generator(folder, threads=1)


def test_there_are_entries_of_every_layer(folder):
    schema = ortkv.inspect(folder)
    assert schema.entries
    assert len({entry.layer for entry in schema.entries}) == schema.num_layers


def test_logits_at_every_step_are_the_references(folder):
    for row in rows(folder):
        assert error(generator(folder), row) < tolerance(folder)


def test_greedy_tokens_are_the_references(folder):
    for row in rows(folder):
        assert greedy(generator(folder), [row]) == [row.greedy]


def test_rows_of_different_length_together_are_each_as_alone(folder):
    both = rows(folder)
    assert greedy(generator(folder), both) == [row.greedy for row in both]


def test_a_misplaced_token_would_be_seen(folder):
    """The tolerance is far below what one wrong cache entry does to these models."""
    row = rows(folder)[0]
    sequence = start(generator(folder), row, PROMPT_LEN - 1)
    wrong = int(row.tokens[PROMPT_LEN - 1] + 1) % row.logits.shape[1]
    sequence.extend([wrong]).extend([int(row.tokens[PROMPT_LEN])])
    moved = abs(sequence.logits - row.logits[PROMPT_LEN]).max()
    assert moved > 5 * tolerance(folder) * abs(row.logits).max()


def test_verify_agrees(folder):
    report = ortkv.verify(folder)
    assert report.ok, report
