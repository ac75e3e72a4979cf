"""The exports with a reference.npz beside them, and what transformers computed of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import ortkv
    from numpy.typing import NDArray

FIXTURES = Path(__file__).parents[1] / "fixtures"
EARLIER = {path.stem: path for path in Path(__file__).parent.glob("*.npz")}
"""By checkpoint, the references of exports that have none beside them."""
PROMPT_LEN = 7
NUM_GREEDY = 16
TOLERANCE = 1e-4
"""Of the largest logit: onnxruntime and torch add in other orders, and fuse."""
INEXACT = {"gemma2-genai": 2e-3, "gemma3-mobius": 1e-3}
"""Exports whose arithmetic is not transformers' even in one full run (README.md says how)."""


STARTED_BY_HAND = {"bart-mobius", "t5-mobius", "whisper-mobius"}
"""Exports whose JSON has no decoder_start_token_id: their rows begin with the reference's own."""
REFUSED = {"qwen3_s-tf5-static-fused": "takes exactly 2 rows a run"}
"""Exports that resolve, and that ortkv does not run."""


def reference(folder: Path) -> Path:
    """Where transformers' answers for an export are."""
    beside = folder / "reference.npz"
    return beside if beside.exists() else EARLIER[folder.name.partition("-")[0]]


def _is_export(folder: Path) -> bool:
    has_reference = (folder / "reference.npz").exists() or folder.name.partition("-")[0] in EARLIER
    return has_reference and any(folder.rglob("*.onnx"))


FOLDERS = sorted(folder for folder in FIXTURES.iterdir() if _is_export(folder))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a reference: see tests/fixtures/references.py.

    source: [m] token ids or [mel_bins, frames] features; None for a decoder alone.
    """

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    greedy: list[int]
    source: NDArray[Any] | None

    @property
    def prompt(self) -> Any:
        """What `generate_ids` takes of this row: tokens, or the encoder's side."""
        return self.tokens.tolist() if self.source is None else as_source(self.source)


def as_source(source: NDArray[Any]) -> Any:
    """Token ids as a list, features as the array they are."""
    return source.tolist() if source.ndim == 1 else source


def rows(folder: Path) -> list[Row]:
    """All rows of a folder's reference."""
    with np.load(reference(folder)) as arrays:
        count = sum(key.startswith("tokens") for key in arrays)
        return [
            Row(
                tokens=arrays[f"tokens_{i}"],
                logits=arrays[f"logits_{i}"],
                greedy=arrays[f"greedy_{i}"].tolist(),
                source=arrays.get(f"source_{i}"),
            )
            for i in range(count)
        ]


def tolerance(folder: Path) -> float:
    """The largest difference allowed, as a share of the largest logit."""
    return INEXACT.get(folder.name, TOLERANCE)


def start(generator: ortkv.Generator, row: Row, length: int) -> ortkv.SequenceState:
    """A sequence after prefill of a row's first tokens."""
    tokens = row.tokens[:length].tolist()
    if row.source is None:
        return generator.start(tokens)
    begin: Any = generator.start
    return begin(tokens, source=as_source(row.source))


def stepped_logits(generator: ortkv.Generator, row: Row) -> NDArray[np.float32]:
    """[n - PROMPT_LEN + 1, vocab_size]: after prefill of a prefix, then after each token."""
    sequence = start(generator, row, PROMPT_LEN)
    scores = [sequence.logits]
    for token in row.tokens[PROMPT_LEN:].tolist():
        sequence.extend([token])
        scores.append(sequence.logits)
    return np.stack(scores)


def error(generator: ortkv.Generator, row: Row) -> float:
    """The largest difference of a row's logits at any step, as a share of its largest logit."""
    want = row.logits[PROMPT_LEN - 1 :]
    got = stepped_logits(generator, row)
    return float(np.abs(got - want).max() / np.abs(want).max())


def greedy(generator: ortkv.Generator, some: list[Row], folder: Path) -> list[list[int]]:
    """New tokens of rows run together; one by one where they are started by hand."""
    settings: dict[str, Any] = {"max_new_tokens": NUM_GREEDY, "do_sample": False}
    if folder.name in STARTED_BY_HAND:
        return [start(generator, row, 1).generate_ids(**settings) for row in some]
    prompts = [row.prompt for row in some]
    return generator.generate_ids(prompts, **settings)
