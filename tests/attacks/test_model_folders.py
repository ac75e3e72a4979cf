"""Folders from a stranger: each is refused in one sentence, or run as it should, and the next
one is none the worse for it.

Rows 22 to 26, 33, 35 and 36 have their tests where the checks are (tests/folder, tests/signature,
tests/runtime, tests/text). Row 37, a kernel that crashes, is not tested: no graph crashes
onnxruntime reliably, and the process that dies is the caller's own until there is a server.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import ortkv
import pytest
from onnx import TensorProto, helper
from ortkv.errors import ConfigError, OrtkvError, UnsupportedModel
from typer.testing import CliRunner

from graphs import LOGITS, Design, decoder, optimum_name

if TYPE_CHECKING:
    from collections.abc import Callable

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "shakespeare-onnx"
PROMPT, NUM_NEW = [3, 1, 4, 1, 5], 6
INFO = helper.make_tensor_value_info
MOST_CHARACTERS = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    return place


def save(model: onnx.ModelProto, folder: Path) -> Path:
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def continued(folder: Path) -> list[int]:
    return ortkv.Generator(folder).generate_ids([PROMPT], max_new_tokens=NUM_NEW)[0]


def refused(folder: Path, kind: type[OrtkvError], code: str, *, by_inspect: bool = True) -> str:
    """The sentence that every door gives; then an ordinary model loads and runs."""
    doors: list[Callable[[Path], Any]] = [ortkv.Generator]
    doors += [ortkv.inspect] if by_inspect else []
    said = set[str]()
    for door in doors:
        with pytest.raises(kind) as caught:
            door(folder)
        assert type(caught.value) is kind
        assert caught.value.code == code
        said.add(str(caught.value))
    (message,) = said
    assert len(message) < MOST_CHARACTERS
    assert "\n" not in message
    _same_on_the_command_line(folder, message, by_inspect=by_inspect)
    healthy = folder.parent / "healthy"
    healthy.mkdir()
    assert len(continued(save(decoder(Design()), healthy))) == NUM_NEW
    return message


def _same_on_the_command_line(folder: Path, message: str, *, by_inspect: bool) -> None:
    from ortkv.cli import app

    command = ["inspect", str(folder)] if by_inspect else ["generate", str(folder), "-p", "x"]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {' '.join(message.split())}\n"


def without(values: Any, *names: str) -> None:
    kept = [value for value in values if value.name not in names]
    del values[:]
    values.extend(kept)


def no_cache() -> onnx.ModelProto:
    model = decoder(Design(num_layers=1))
    for role in ("key", "value"):
        past = optimum_name("past", 0, role)
        without(model.graph.input, past)
        without(model.graph.output, optimum_name("present", 0, role))
        model.graph.initializer.append(helper.make_tensor(past, 1, [1, 2, 0, 4], []))
    return model


def input_twice() -> onnx.ModelProto:
    model = decoder(Design())
    model.graph.input.append(model.graph.input[-1])
    return model


def output_twice() -> onnx.ModelProto:
    model = decoder(Design())
    model.graph.output.append(model.graph.output[-1])
    return model


def ambiguous() -> onnx.ModelProto:
    """A second past is joined into the cache of another."""
    model = decoder(Design())
    past = optimum_name("past", 0, "key")
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(next(v for v in model.graph.input if v.name == past))
    copy.name = "past_key_values.2.key"
    model.graph.input.append(copy)
    concat = next(n for n in model.graph.node if n.op_type == "Concat" and past in n.input)
    concat.input.insert(0, copy.name)
    return model


def half_matched() -> onnx.ModelProto:
    """Of one layer, the value's past goes in and nothing is done with it."""
    model = decoder(Design())
    past = INFO("past_key_values.2.value", TensorProto.FLOAT, ["batch", 2, "past_len", 4])
    model.graph.input.append(past)
    model.graph.node.append(helper.make_node("ReduceMax", [past.name], ["unread"]))
    return model


def past_without_present() -> onnx.ModelProto:
    model = decoder(Design())
    without(model.graph.output, optimum_name("present", 1, "value"))
    return model


def present_without_past() -> onnx.ModelProto:
    model = decoder(Design())
    extra = INFO("present.2.key", TensorProto.FLOAT, ["batch", 2, "kv", 4])
    model.graph.output.append(extra)
    model.graph.node.append(helper.make_node("Neg", ["present.0.key"], ["present.2.key"]))
    return model


def fewer_values_than_keys() -> onnx.ModelProto:
    model = decoder(Design(num_layers=30))
    past = optimum_name("past", 17, "value")
    without(model.graph.input, past)
    without(model.graph.output, optimum_name("present", 17, "value"))
    model.graph.initializer.append(helper.make_tensor(past, 1, [1, 2, 0, 4], []))
    return model


def restated(side: str, dtype: int, dims: list[Any] | None, **design: Any) -> onnx.ModelProto:
    """The key of layer 0, stated otherwise on one side or on both."""
    model = decoder(Design(**design))
    graph = model.graph
    for one, values in (("past", graph.input), ("present", graph.output)):
        if side in (one, "both"):
            name = optimum_name(one, 0, "key")
            without(values, name)
            values.append(INFO(name, dtype, dims))
    return model


def unknown_head_dim() -> onnx.ModelProto:
    """Neither the dims state it, nor does the graph: new keys come out of an op of its own."""
    model = restated("both", 1, ["batch", "heads", "past_len", "depth"])
    past = optimum_name("past", 0, "key")
    concat = next(n for n in model.graph.node if n.op_type == "Concat" and past in n.input)
    node = helper.make_node("Opaque", [concat.input[1]], ["new_keys"], domain="other")
    concat.input[1] = "new_keys"
    model.graph.node.append(node)
    return model


def no_logits() -> onnx.ModelProto:
    model = decoder(Design())
    without(model.graph.output, LOGITS)
    return model


def logits_as(dtype: int) -> onnx.ModelProto:
    model = decoder(Design())
    head = next(n for n in model.graph.node if LOGITS in n.output)
    head.output[0] = "scores"
    model.graph.node.append(helper.make_node("Cast", ["scores"], [LOGITS], to=dtype))
    next(v for v in model.graph.output if v.name == LOGITS).type.tensor_type.elem_type = dtype
    return model


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    # hostile 27
    "no-cache": (no_cache, "no key/value cache goes in"),
    "input-twice": (input_twice, "stands for two values"),
    "output-twice": (output_twice, "stands for two values"),
    "ambiguous": (ambiguous, "past_key_values.2.key"),
    "half-matched": (half_matched, "past_key_values.2.value"),
    "past-without-present": (past_without_present, "past_key_values.1.value"),
    "present-without-past": (present_without_past, "present.2.key"),
    "fewer-values-than-keys": (fewer_values_than_keys, "the cache is incomplete"),
    # hostile 28
    "rank-unknown": (lambda: restated("both", 1, None), "past_key_values.0.key"),
    "head-dim-unknown": (unknown_head_dim, "head_dim"),
    "dtypes-differ": (
        lambda: restated("present", TensorProto.FLOAT16, ["batch", 2, "kv_len", 4]), "one dtype",
    ),
    "cache-of-strings": (
        lambda: restated("both", TensorProto.STRING, ["batch", 2, "past_len", 4]),
        "past_key_values.0.key",
    ),
    "fixed-past": (lambda: restated("both", 1, ["batch", 2, 0, 4]), "past_key_values.0.key"),
    # hostile 29
    "no-logits": (no_logits, "expected one output of logits"),
    "logits-int64": (lambda: logits_as(TensorProto.INT64), "expected one output of logits"),
    "logits-int8": (lambda: logits_as(TensorProto.INT8), "expected one output of logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_graph_is_refused_in_one_sentence(folder: Path, name: str) -> None:
    # hostile 27, 28, 29
    build, words = REFUSED[name]
    assert words in refused(save(build(), folder), UnsupportedModel, "unsupported_model")


def test_what_cannot_be_paired_names_the_way_to_pair_it(folder: Path) -> None:
    """# hostile 27."""
    message = refused(save(ambiguous(), folder), UnsupportedModel, "unsupported_model")
    assert "--kv-map" in message


def test_names_of_another_layer_are_not_believed(folder: Path) -> None:
    """Layer 0's present has layer 1's name, and the other way round.  # hostile 27."""

    def crossed(side: str, layer: int, role: str) -> str:
        return optimum_name(side, 1 - layer if side == "present" else layer, role)

    expected = continued(save(decoder(Design()), folder))
    save(decoder(Design(name=crossed)), folder)
    pairs = {entry.past: entry.present for entry in ortkv.inspect(folder).entries}
    assert pairs[optimum_name("past", 0, "key")] == optimum_name("present", 1, "key")
    assert continued(folder) == expected


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_logits_of_half_precision_are_cast(folder: Path, dtype: int) -> None:
    """# hostile 29."""
    exact = ortkv.Generator(save(decoder(Design()), folder)).start(PROMPT).logits
    logits = ortkv.Generator(save(logits_as(dtype), folder)).start(PROMPT).logits
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-2, atol=1e-2)


def shipped(folder: Path) -> Path:
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("kind", ["vocabulary", "added"])
def test_a_tokenizer_wider_than_the_logits_is_refused(folder: Path, kind: str) -> None:
    """# hostile 30."""
    file = shipped(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    if kind == "vocabulary":
        tokenizer["model"]["vocab"]["zzzz"] = 70_000
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": 70_000, "content": "<|beyond|>", **flags})
    file.write_text(json.dumps(tokenizer))
    message = refused(folder, UnsupportedModel, "unsupported_model", by_inspect=False)
    assert "70000" in message or "logits only" in message


@pytest.mark.parametrize("name", ["config.json", "genai_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_malformed_config_is_refused(folder: Path, name: str, content: str) -> None:
    """# hostile 31."""
    save(decoder(Design()), folder)
    (folder / name).write_text(content)
    message = refused(folder, ConfigError, "config_error", by_inspect=False)
    assert name in message
    if name != "genai_config.json":  # it may name the graph, so that it is read even to inspect
        assert len(ortkv.inspect(folder).entries) == 4


def test_a_config_that_contradicts_the_graph_is_not_believed(folder: Path) -> None:
    """# hostile 31."""
    expected = continued(save(decoder(Design()), folder))
    schema = ortkv.inspect(folder)
    wrong = {"num_hidden_layers": 7, "num_key_value_heads": 99, "head_dim": 1, "vocab_size": 3,
             "hidden_size": -1, "num_attention_heads": "many"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(wrong))
    genai = {"model": {"decoder": {"inputs": {"past_key_names": "other.%d"}, "head_size": 0}}}
    (folder / "genai_config.json").write_text(json.dumps(genai))
    assert ortkv.inspect(folder) == schema
    assert continued(folder) == expected


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.mark,)


def test_code_in_a_folder_is_never_run(folder: Path) -> None:
    """# hostile 32."""
    expected = ortkv.Generator(SHIPPED).generate("ROMEO:", max_new_tokens=8)
    mark = folder.parent / "mark"
    shipped(folder)
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    for name in ("modeling_x.py", "tokenization_x.py", "__init__.py", "setup.py", "conftest.py"):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        stated = json.loads(file.read_text()) if file.exists() else {}
        stated["auto_map"] = {"AutoModel": "modeling_x.X", "AutoTokenizer": "tokenization_x.T"}
        stated["trust_remote_code"] = True
        file.write_text(json.dumps(stated))
    assert ortkv.Generator(folder).generate("ROMEO:", max_new_tokens=8) == expected
    assert not mark.exists()
    pickle.loads((folder / "model.pt").read_bytes())  # noqa: S301 - our own, above
    assert mark.exists(), "the bomb is a dud: the test would show nothing"


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_sequence_goes_on_when_its_files_change(folder: Path, change: str) -> None:
    """What is loaded stays; what is loaded next is the new model.  # hostile 34."""
    expected = continued(save(decoder(Design()), folder))
    generator = ortkv.Generator(folder)
    sequence = generator.start(PROMPT)
    started = sequence.generate_ids(max_new_tokens=2)
    (folder / "model.onnx").unlink()
    if change == "replaced":
        save(decoder(Design(num_layers=3)), folder)
    assert started + sequence.generate_ids(max_new_tokens=NUM_NEW - 2) == expected
    assert generator.generate_ids([PROMPT], max_new_tokens=NUM_NEW)[0] == expected
    if change == "replaced":
        assert len(ortkv.Generator(folder).schema.entries) == 6
