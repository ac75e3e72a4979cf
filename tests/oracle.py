"""A full recompute in plain onnxruntime: every token in one run over an empty past."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@functools.cache
def _session(folder: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def full_logits(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    """[vocab_size]: the last position's logits of one of optimum's `concat` graphs."""
    session = _session(folder)
    ids = np.array([tokens], dtype=np.int64)
    positions = np.arange(len(tokens), dtype=np.int64)[None]
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    feeds = {}
    for value in session.get_inputs():
        if value.name in known:
            feeds[value.name] = known[value.name]
        else:
            _, heads, _, head_dim = value.shape
            feeds[value.name] = np.zeros((1, heads, 0, head_dim), dtype=np.float32)
    return session.run(["logits"], feeds)[0][0, -1]
