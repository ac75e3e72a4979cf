"""Where the wiring leaves two schemas, the graph's own runs decide, and it is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from ortkv import Generator, OrtkvError
from ortkv.schema import alternatives, derive
from ortkv.signature import signature_of

from graph_design import Design
from graph_reference import full_logits
from graphs import decoder

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [3, 1, 4, 1, 5, 9]


def through_xor(mask: str, *, flips: bool) -> onnx.ModelProto:
    """A boolean mask behind an op that ortkv does not follow; it may turn the marks around."""
    design = Design(mask=mask, positions="learned")
    model = decoder(design)
    for node in model.graph.node:
        node.input[:] = ["hidden_mask" if n == "attention_mask" else n for n in node.input]
    model.graph.initializer.append(helper.make_tensor("flip", TensorProto.BOOL, [], [flips]))
    model.graph.node.insert(0, helper.make_node("Xor", ["attention_mask", "flip"], ["hidden_mask"]))
    return model


@pytest.mark.parametrize(
    ("mask", "flips", "values"),
    [("4d_keep", False, "keep"), ("4d_keep", True, "drop"),
     ("4d_drop", False, "drop"), ("4d_drop", True, "keep")],
)  # fmt: skip
def test_runs_decide_what_a_mask_holds(mask: str, flips: bool, values: str, tmp_path: Path) -> None:
    model = through_xor(mask, flips=flips)
    assert len(alternatives(derive(signature_of(model), model))) == 2
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.warns(UserWarning, match=f"attention_mask holds {values}"):
        generator = Generator(tmp_path / "model.onnx")
    sequence = generator.start(TOKENS[:3])
    scored = [sequence.logits, *(sequence.extend([t]).logits for t in TOKENS[3:])]
    expected = full_logits(Design(mask=mask, positions="learned"), TOKENS)[2:]
    np.testing.assert_allclose(scored, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


def test_a_graph_that_agrees_with_neither_is_refused(tmp_path: Path) -> None:
    """Positions that count from the end of the cache: no mask makes steps equal a full run."""
    model = through_xor("4d_keep", flips=False)
    (present,) = (v.name for v in model.graph.output if v.name == "present.0.key")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["sound" if name == present else name for name in names]
    model.graph.node.append(helper.make_node("Sub", ["sound", "sound"], [present]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(OrtkvError, match="running them does not tell"):
        Generator(tmp_path / "model.onnx")
