"""Encoders that give keys and values, and graphs that make embeddings, against numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import ortkv
import pytest
from onnx import TensorProto, helper, numpy_helper
from ortkv.errors import InvalidRequest, UnsupportedModel

from graph_design import ENCODER_LEN, encoder_states
from graphs import Design, decoder, embedding_model, full_logits, weights

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = list(range(ENCODER_LEN))
"""Ids whose embeddings are what ``graph_design.encoder_states`` has an encoder make."""
TOKENS = [3, 1, 4, 1, 5, 9, 2]


def name(side: str, layer: int, role: str) -> str:
    """optimum's names."""
    part = "encoder" if role.startswith("cross") else "decoder"
    side = "past_key_values" if side == "past" else "present"
    return f"{side}.{layer}.{part}.{role.removeprefix('cross_')}"


def encoder(design: Design, *, gives_cross: bool) -> onnx.ModelProto:
    """Embeds its ids; and where it ``gives_cross``, makes the decoder's keys and values of that."""
    arrays = {"table": encoder_states(design)}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])]
    made = ["last_hidden_state"]
    arrays["heads"] = np.array([0, 0, design.num_kv_heads or design.num_heads, design.head_dim])
    for layer in range(design.num_layers if gives_cross else 0):
        for role, part in (("cross_key", "cwk"), ("cross_value", "cwv")):
            output = name("present", layer, role)
            arrays[output + ".w"] = weights(design)[f"{part}_{layer}"]
            nodes += [
                helper.make_node("MatMul", [made[0], output + ".w"], [output + ".x"]),
                helper.make_node("Reshape", [output + ".x", "heads"], [output + ".h"]),
                helper.make_node("Transpose", [output + ".h"], [output], perm=[0, 2, 1, 3]),
            ]
            made.append(output)
    outputs = made[1:] if gives_cross else made
    kinds = {1: TensorProto.INT64, 2: TensorProto.FLOAT}
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("input_ids", kinds[1], ["batch", "source_len"])],
        [
            helper.make_tensor_value_info(o, kinds[2], [None] * (4 if gives_cross else 3))
            for o in outputs
        ],
        [numpy_helper.from_array(array, key) for key, array in arrays.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


DESIGNS = {
    "given": (Design(cross="given", name=name), True),
    "given, masked": (Design(cross="given", name=name, extras=("encoder_mask",)), True),
    "passed on": (Design(cross="passed", name=name), True),
    "in every run": (Design(cross="hidden", name=name), False),
    "in the first run": (Design(cross="first", merged=True, name=name), False),
}


@pytest.mark.parametrize("case", DESIGNS)
def test_logits_are_numpys_wherever_the_keys_are_made(case: str, tmp_path: Path) -> None:
    design, gives_cross = DESIGNS[case]
    onnx.save(decoder(design), tmp_path / "decoder_model_merged.onnx")
    onnx.save(encoder(design, gives_cross=gives_cross), tmp_path / "encoder_model.onnx")
    generator = ortkv.Generator(tmp_path, threads=1)
    sequence = generator.start(TOKENS[:2], source=SOURCE)
    found = [sequence.logits]
    found += [sequence.extend([token]).logits for token in TOKENS[2:]]
    expected = full_logits(design, TOKENS)
    np.testing.assert_allclose(found, expected[1:], rtol=0, atol=1e-4)
    sequence.release()
    np.testing.assert_allclose(sequence.logits, expected[-1], rtol=0, atol=1e-4)
    twins = [sequence.fork().rewind(3), sequence.fork().rewind(3)]
    np.testing.assert_allclose([t.logits for t in twins], expected[[2, 2]], rtol=0, atol=1e-4)
    assert ortkv.verify(tmp_path, threads=1).ok


def test_an_encoder_of_another_model_is_refused(tmp_path: Path) -> None:
    onnx.save(decoder(Design(cross="given", name=name)), tmp_path / "decoder_model_merged.onnx")
    onnx.save(encoder(Design(), gives_cross=False), tmp_path / "encoder_model.onnx")
    with pytest.raises(UnsupportedModel, match=r"keys or values that the decoder reads from past"):
        ortkv.Generator(tmp_path)


@pytest.mark.parametrize("file", ["embed_tokens", "embeddings", "embedding"])
def test_embeddings_are_made_by_the_graph_beside(file: str, tmp_path: Path) -> None:
    design = Design(extras=("inputs_embeds",))
    onnx.save(decoder(design), tmp_path / "decoder_model_merged.onnx")
    onnx.save(embedding_model(design), tmp_path / f"{file}.onnx")
    sequence = ortkv.Generator(tmp_path, threads=1).start(TOKENS[:4])
    found = [sequence.logits] + [sequence.extend([token]).logits for token in TOKENS[4:]]
    np.testing.assert_allclose(found, full_logits(design, TOKENS)[3:], rtol=0, atol=1e-4)
    assert ortkv.verify(tmp_path, threads=1).ok
    with pytest.raises(InvalidRequest, match="no encoder's output"):
        ortkv.Generator(tmp_path).start([1], source=[2])


def test_a_decoder_of_embeddings_alone_says_what_is_missing(tmp_path: Path) -> None:
    onnx.save(decoder(Design(extras=("inputs_embeds",))), tmp_path / "decoder_model_merged.onnx")
    with pytest.raises(UnsupportedModel, match="no graph that makes them of token ids"):
        ortkv.Generator(tmp_path)
