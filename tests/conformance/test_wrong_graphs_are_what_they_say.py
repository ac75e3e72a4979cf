"""Each of ``graphs_wrong`` in plain onnxruntime: sound when fed as its docstring says, and wrong
when fed as the usual graph it looks like.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from graph_design import LOGITS, MASK, Design
from graph_reference import reference
from graphs import full_logits
from graphs_wrong import WIDE, WRONG

TOKENS = [3, 1, 4, 1, 5]
ROTARY = Design(positions="rotary")


def session_of(which: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    model = WRONG[which]().SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session: Any, tokens: list[int], done: int = 0, **given: Any) -> dict[str, Any]:
    """Outputs by name for one row; empty pasts, ones and positions where not ``given``."""
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if value.name in given:
            feeds[value.name] = given[value.name]
        elif value.name == "input_ids":
            feeds[value.name] = np.array([tokens])
        elif value.name == MASK:
            dtype = np.float32 if "float" in value.type else np.int64
            feeds[value.name] = np.full((1, done + len(tokens)), dtype == np.int64, dtype)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(done, done + len(tokens))[None]
        else:
            heads, head_dim = value.shape[1], value.shape[3]
            feeds[value.name] = np.zeros((1, heads, 0, head_dim), np.float32)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def pasts_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("present", "past_key_values"): a for name, a in found.items()}


def assert_close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(("which", "design"), [("A3a", WIDE), ("A3b", ROTARY)])
def test_zeros_in_the_mask_mask_nothing(which: str, design: Design) -> None:
    session = session_of(which)
    first = run(session, TOKENS[:3])
    assert_close(first[LOGITS][0], full_logits(design, TOKENS[:3]))
    padded = {MASK: np.array([[0, 0, 1, 1]])}
    step = run(session, TOKENS[3:4], 3, **pasts_of(first), **padded)
    assert_close(step[LOGITS][0], full_logits(design, TOKENS[:4])[3:])


def test_an_additive_mask_masks_by_large_numbers_alone() -> None:  # A3c
    session = session_of("A3c")
    alone = full_logits(ROTARY, TOKENS[2:])
    positions = np.array([[0, 0, 0, 1, 2]])
    added = np.array([[-1e9, -1e9, 0, 0, 0]], np.float32)
    right = run(session, TOKENS, attention_mask=added, position_ids=positions)
    assert_close(right[LOGITS][0, 2:], alone)
    usual = (added == 0).astype(np.float32)
    wrong = run(session, TOKENS, attention_mask=usual, position_ids=positions)
    assert np.abs(wrong[LOGITS][0, 2:] - alone).max() > 1e-2


def test_a_past_without_room_loses_the_new_token() -> None:  # A3d
    session = session_of("A3d")
    cache, design = reference(Design(), TOKENS)[1], Design()
    names = {f"past_key_values.{layer}.{role}": cache[layer, role][None, :, :4].astype(np.float32)
             for layer in range(2) for role in ("key", "value")}  # fmt: skip
    length = np.array(4, np.int32)
    room = {name: np.pad(a, [(0, 0), (0, 0), (0, 3), (0, 0)]) for name, a in names.items()}
    right = run(session, TOKENS[4:], 4, past_sequence_length=length, **room)
    assert_close(right[LOGITS][0], full_logits(design, TOKENS)[4:])
    assert right["present.0.key"].shape == room["past_key_values.0.key"].shape
    with pytest.raises(Exception, match=r"past_sequence_length|max_sequence_length"):
        run(session, TOKENS[4:], 4, past_sequence_length=length, **names)


def test_copies_hold_what_the_presents_hold() -> None:  # A3e
    found = run(session_of("A3e"), TOKENS)
    assert_close(found[LOGITS][0], full_logits(WIDE, TOKENS))
    for name in [name for name in found if name.startswith("copy_of_")]:
        np.testing.assert_array_equal(found[name], found[name.removeprefix("copy_of_")])
    assert len(found) == 9


def test_new_tokens_come_first() -> None:  # A4
    session = session_of("A4")
    first = run(session, TOKENS[:3])
    step = run(session, TOKENS[3:], 3, **pasts_of(first))
    assert_close(step[LOGITS][0], full_logits(ROTARY, TOKENS)[3:])
    keys = reference(ROTARY, TOKENS)[1][0, "key"][None]
    assert_close(step["present.0.key"], keys[:, :, [3, 4, 0, 1, 2]])


def test_presents_have_another_order_of_axes() -> None:  # A5
    session = session_of("A5")
    first = run(session, TOKENS[:3])
    turned = {name: a.swapaxes(1, 2) for name, a in pasts_of(first).items() if a.ndim == 4}
    step = run(session, TOKENS[3:], 3, **turned)
    assert_close(step[LOGITS][0], full_logits(Design(), TOKENS)[3:])
    assert first["present.0.key"].shape == (1, 3, 2, 4)


def test_hidden_states_are_what_the_head_takes() -> None:  # A8
    found = run(session_of("A8"), TOKENS)
    assert LOGITS not in found
    head = onnx.numpy_helper.to_array(next(
        one for one in WRONG["A3b"]().graph.initializer if one.name == "head"
    ))  # fmt: skip
    assert_close(found["last_hidden_state"][0] @ head, full_logits(Design(), TOKENS))
