"""Each planted fault is found under its code and no other; a clean export has none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ortkv.doctor import diagnose
from ortkv.doctor.memory import available_bytes
from ortkv.runtime import kernels

from graphs import INPUT_IDS, LOGITS, MASK, Design, decoder
from tokenizers_built import byte_level

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
VOCAB = 400
IN_PLACE = Design(attention="gqa_mask", vocab_size=VOCAB)
CLEAN = frozenset({"logits_everywhere"})
"""Notes of the clean folder: its logits are of every position, and small."""
CONCAT = CLEAN | {"cache_copied"}


@dataclass
class Folder:
    """A model's folder about to be spoiled."""

    path: Path
    design: Design = IN_PLACE
    model: onnx.ModelProto = field(init=False)

    def __post_init__(self) -> None:
        self.model = decoder(self.design)
        self.write("config.json", {"max_position_embeddings": 64, "eos_token_id": 2})
        self.write("generation_config.json", {"eos_token_id": 2})
        byte_level().save(str(self.path / "tokenizer.json"))
        (self.path / "chat_template.jinja").write_text("{{ messages[0].content }}")

    def write(self, name: str, data: dict[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(data))

    def update(self, name: str, **changes: Any) -> None:
        data = json.loads((self.path / name).read_text()) | changes
        self.write(name, {k: v for k, v in data.items() if v is not None})

    def findings(self, provider: str = "cpu") -> dict[str, str]:
        """Code to level."""
        onnx.save(self.model, self.path / "model.onnx")
        return {f.code: f.level for f in diagnose(self.path, provider=provider)}

    def without_input(self, name: str) -> None:
        kept = [value for value in self.model.graph.input if value.name != name]
        del self.model.graph.input[:]
        self.model.graph.input.extend(kept)

    def before_logits(self, *nodes: onnx.NodeProto) -> None:
        """Nodes between 'raw', which the graph's last node now makes, and the logits."""
        self.model.graph.node[-1].output[0] = "raw"
        self.model.graph.node.extend(nodes)

    def weight(self, name: str, array: Any) -> None:
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))


def plain(path: Path, **axes: Any) -> Folder:
    return Folder(path, Design(vocab_size=VOCAB, positions="learned", **axes))


def test_a_clean_folder_has_a_note_alone(tmp_path: Path) -> None:
    assert Folder(tmp_path).findings() == dict.fromkeys(CLEAN, "note")


def test_the_clean_concatenating_folder_has_its_copy_alone(tmp_path: Path) -> None:
    found = plain(tmp_path).findings()
    assert found == {"logits_everywhere": "note", "cache_copied": "warning"}


def test_the_shipped_export_has_notes_alone() -> None:
    assert {f.level for f in diagnose(ROOT / "models" / "shakespeare-onnx")} <= {"note"}


# Faults in the folder's files.


def bad_json(folder: Folder) -> None:
    (folder.path / "tokenizer_config.json").write_text("{")


def wide_tokenizer(folder: Folder) -> None:
    byte_level(added=tuple(f"word{i}" for i in range(VOCAB))).save(
        str(folder.path / "tokenizer.json")
    )


def old_transformers(folder: Folder) -> None:
    folder.update(
        "config.json",
        transformers_version="4.57.6",
        rope_theta=10000.0,
        rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
    )


def old_transformers_said_elsewhere(folder: Folder) -> None:
    old_transformers(folder)
    folder.update("config.json", transformers_version="5.1.0", rope_theta=None)
    folder.write("ortkv.json", {"versions": {"transformers": "4.57.6"}})


FILES: list[tuple[str, str, Callable[[Folder], Any]]] = [
    ("memory_short", "warning",
     lambda f: f.update("config.json", max_position_embeddings=10**12)),
    ("context_unknown", "note", lambda f: f.update("config.json", max_position_embeddings=None)),
    ("eos_missing", "warning",
     lambda f: [f.update(name, eos_token_id=None)
                for name in ("config.json", "generation_config.json")]),
    ("eos_out_of_vocab", "error",
     lambda f: f.update("generation_config.json", eos_token_id=[2, VOCAB])),
    ("pad_is_eos", "note", lambda f: f.update("config.json", pad_token_id=2)),
    ("setting_ignored", "warning", lambda f: f.update("generation_config.json", num_beams=4)),
    ("config_error", "error", lambda f: f.update("generation_config.json", temperature="hot")),
    ("config_error", "error", bad_json),
    ("generation_config_missing", "note",
     lambda f: (f.path / "generation_config.json").unlink()),
    ("chat_template_missing", "note", lambda f: (f.path / "chat_template.jinja").unlink()),
    ("tokenizer_missing", "warning", lambda f: (f.path / "tokenizer.json").unlink()),
    ("tokenizer_missing", "warning", lambda f: (f.path / "tokenizer.json").write_text("{")),
    ("tokenizer_too_wide", "error", wide_tokenizer),
    ("rope_ignored", "error", old_transformers),
    ("rope_ignored", "error", old_transformers_said_elsewhere),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "level", "plant"), FILES, ids=[f"{i}-{f[0]}" for i, f in enumerate(FILES)]
)
def test_a_fault_in_the_files(
    tmp_path: Path, code: str, level: str, plant: Callable[[Folder], Any]
) -> None:
    folder = Folder(tmp_path)
    plant(folder)
    assert folder.findings() == {**dict.fromkeys(CLEAN, "note"), code: level}


def test_rope_that_both_versions_read_alike_is_no_fault(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    old_transformers(folder)
    folder.update("config.json", rope_theta=50000.0)
    assert folder.findings().keys() == CLEAN
    folder.update("config.json", rope_theta=None, transformers_version="5.0.0")
    assert folder.findings().keys() == CLEAN


# Faults in the graph.


def set_dim(folder: Folder, axis: int, size: int) -> None:
    tokens = next(v for v in folder.model.graph.input if v.name == INPUT_IDS)
    tokens.type.tensor_type.shape.dim[axis].dim_value = size


def unknown_op(folder: Folder) -> None:
    folder.before_logits(helper.make_node("Mystery", ["raw"], [LOGITS], domain="my.ops"))
    folder.model.opset_import.append(helper.make_opsetid("my.ops", 1))


def newer_opset(folder: Folder) -> None:
    folder.model.opset_import[0].version = 99


def newer_ir(folder: Folder) -> None:
    folder.model.ir_version = 99


def quantized(folder: Folder) -> None:
    outputs = ["rounded", "scale", "zero_point"]
    folder.model.graph.node.append(helper.make_node("DynamicQuantizeLinear", [LOGITS], outputs))


GRAPHS: list[tuple[str, str, Callable[[Folder], Any]]] = [
    ("missing_kernel", "error", unknown_op),
    ("runtime_too_old", "error", newer_opset),
    ("runtime_too_old", "error", newer_ir),
    ("fixed_batch", "warning", lambda f: set_dim(f, 0, 1)),
    ("fixed_batch", "error", lambda f: set_dim(f, 0, 2)),
    ("fixed_query_len", "error", lambda f: set_dim(f, 1, 3)),
    ("quantized_rows", "note", quantized),
]


@pytest.mark.parametrize(
    ("code", "level", "plant"), GRAPHS, ids=[f"{i}-{g[0]}" for i, g in enumerate(GRAPHS)]
)
def test_a_fault_in_the_graph(
    tmp_path: Path, code: str, level: str, plant: Callable[[Folder], Any]
) -> None:
    folder = Folder(tmp_path)
    plant(folder)
    assert folder.findings() == {**dict.fromkeys(CLEAN, "note"), code: level}


def test_one_token_steps(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    set_dim(folder, 1, 1)
    assert folder.findings() == {"one_token_steps": "warning"}


def test_a_pruned_mask(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Design(attention="gqa_shape", vocab_size=VOCAB))
    folder.without_input(MASK)
    assert folder.findings().keys() == CONCAT | {"mask_pruned"}
    set_dim(folder, 0, 1)  # one row a run needs no mask
    assert folder.findings().keys() == CONCAT | {"fixed_batch"}


def test_lengths_from_the_shape_of_the_past(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Design(attention="gqa_shape", vocab_size=VOCAB))
    assert folder.findings().keys() == CONCAT | {"positions_missing"}


def test_missing_positions(tmp_path: Path) -> None:
    folder = Folder(tmp_path, Design(vocab_size=VOCAB))
    assert folder.findings().keys() == CONCAT | {"positions_missing"}


@pytest.mark.parametrize("layouts", [("BSHD", "BHSD"), ("BHSD", "BSHD"), ("BSHD", "BSHD")])
def test_layouts_that_cost_a_transpose(tmp_path: Path, layouts: tuple[str, str]) -> None:
    found = plain(tmp_path, layouts=layouts).findings()
    assert found.keys() == CONCAT | {"cache_transposed"}


@pytest.mark.parametrize("layouts", [("BHDS", "BHSD"), ("BHSD", "BHDS")])
def test_a_swap_that_the_product_takes_in_costs_nothing(
    tmp_path: Path, layouts: tuple[str, str]
) -> None:
    assert plain(tmp_path, layouts=layouts).findings().keys() == CONCAT


def test_a_cache_in_another_dtype(tmp_path: Path) -> None:
    found = plain(tmp_path, cache_dtype=TensorProto.FLOAT16).findings()
    assert found.keys() == CONCAT | {"cache_cast"}


def test_bytes_of_the_copied_cache(tmp_path: Path) -> None:
    """2 layers x 2 tensors x 2 heads x 4 x 4 bytes x 64 tokens = 8 KiB."""
    folder = plain(tmp_path)
    folder.findings()
    finding = next(f for f in diagnose(tmp_path) if f.code == "cache_copied")
    assert "8.0 KiB at the full context of 64 tokens" in finding.message


def test_large_logits_of_every_position(tmp_path: Path) -> None:
    """2000 x 10000 x 4 bytes = 76.3 MiB."""
    folder = Folder(tmp_path, Design(attention="gqa_mask", vocab_size=10_000))
    folder.update("config.json", max_position_embeddings=4096)
    assert folder.findings() == {"logits_everywhere": "warning"}
    assert "76.3 MiB" in diagnose(tmp_path)[0].message


@pytest.mark.parametrize("axis", [1, 2])
def test_logits_of_the_last_position(tmp_path: Path, axis: int) -> None:
    """A slice of the vocabulary (axis 2) is no slice of the positions (axis 1)."""
    folder = Folder(tmp_path)
    for name, value in (("from", -1), ("to", 2**31), ("along", axis)):
        folder.weight(name, np.array([value]))
    last = folder.model.graph.node.pop()
    taken = helper.make_node("Slice", [last.input[0], "from", "to", "along"], ["last"])
    folder.model.graph.node.append(taken)
    last.input[0] = "last"
    folder.model.graph.node.append(last)
    assert folder.findings().keys() == (set() if axis == 1 else CLEAN)


def test_weights_in_both_graphs(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    onnx.save(folder.model, tmp_path / "decode.onnx")
    first = first_run_graph(folder.design)
    onnx.save(first, tmp_path / "prefill.onnx")
    found = {f.code: f for f in diagnose(tmp_path)}
    assert found.keys() == CLEAN | {"weights_twice"}
    # embedding and head, and 2 layers of 4 matrices of 8 x 8, in float32
    expected = (2 * VOCAB * 8 + 2 * 4 * 8 * 8) * 4 / 1024
    message = found["weights_twice"].message
    assert message.count(f"{expected:.1f} KiB") == 2
    for tensor in first.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.raw_data = (-numpy_helper.to_array(tensor)).tobytes()
    onnx.save(first, tmp_path / "prefill.onnx")
    assert {f.code for f in diagnose(tmp_path)} == CLEAN


def test_weights_in_one_file_of_both_graphs(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name, model in (("prefill.onnx", first_run_graph(folder.design)),
                        ("decode.onnx", folder.model)):  # fmt: skip
        (tmp_path / "shared.data").unlink(missing_ok=True)
        onnx.save(model, tmp_path / name, save_as_external_data=True, location="shared.data",
                  size_threshold=256)  # fmt: skip
    message = next(f.message for f in diagnose(tmp_path) if f.code == "weights_twice")
    assert "0 bytes on disk twice" in message


def first_run_graph(design: Design) -> onnx.ModelProto:
    """The same decoder without a past."""
    model = decoder(design)
    pasts = {v.name for v in model.graph.input if v.name.startswith("past")}
    kept = [v for v in model.graph.input if v.name not in pasts]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for node in model.graph.node:
        node.input[:] = ["" if name in pasts else name for name in node.input]
    return model


def test_data_left_from_an_earlier_save(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    data = tmp_path / "model.onnx.data"
    onnx.save(folder.model, tmp_path / "model.onnx", save_as_external_data=True,
              location=data.name, size_threshold=256)  # fmt: skip
    assert {f.code for f in diagnose(tmp_path)} == CLEAN
    data.write_bytes(data.read_bytes() + bytes(200_000))
    assert {f.code for f in diagnose(tmp_path)} == CLEAN | {"unused_data"}
    data.write_bytes(b"short")
    assert {f.code for f in diagnose(tmp_path)} == CLEAN | {"model_file_error"}
    data.unlink()
    assert {f.code for f in diagnose(tmp_path)} == CLEAN | {"model_file_error"}


def test_data_outside_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    tensor = folder.model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../elsewhere")
    assert folder.findings() == {"unsafe_model": "error", "logits_everywhere": "note"}


def test_a_graph_that_cannot_be_resolved(tmp_path: Path) -> None:
    """Checks that need no schema still run."""
    folder = Folder(tmp_path)
    folder.model.graph.input.append(helper.make_tensor_value_info("mystery", 1, []))
    folder.before_logits(helper.make_node("Mul", ["raw", "mystery"], [LOGITS]))
    folder.update("config.json", eos_token_id=None)
    folder.update("generation_config.json", eos_token_id=None)
    newer_ir(folder)
    found = folder.findings()
    assert found.keys() == {"unsupported_model", "runtime_too_old", "eos_missing"}
    assert found["unsupported_model"] == "error"


# Providers.


def test_float32_attention_on_cuda(tmp_path: Path) -> None:
    """GroupQueryAttention has CUDA kernels for half precision alone."""
    found = Folder(tmp_path).findings(provider="cuda")
    assert found.get("provider_unavailable", "error") == "error"  # where there is no CUDA here
    assert found["missing_kernel"] == "warning"
    rest = found.keys() - {"provider_unavailable", "missing_kernel"}
    assert rest == CLEAN | {"memory_needed"}


def test_plain_attention_has_all_its_kernels_on_cuda(tmp_path: Path) -> None:
    found = plain(tmp_path).findings(provider="cuda")
    assert found.keys() - {"provider_unavailable"} == CONCAT | {"memory_needed"}


def test_paged_attention_on_the_cpu(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    wires = ["raw"] * 3
    folder.before_logits(
        helper.make_node("PagedAttention", wires, [LOGITS], domain="com.microsoft")
    )
    assert folder.findings().keys() == CLEAN | {"missing_kernel"}


def test_an_op_whose_definition_is_made_of_others_needs_no_kernel(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.before_logits(helper.make_node("HardSwish", ["raw"], [LOGITS]))
    assert "HardSwish" not in {k.op for k in kernels() or ()}
    assert "missing_kernel" not in folder.findings()


def test_half_precision_products_on_the_cpu(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    half = TensorProto.FLOAT16
    last = folder.model.graph.node.pop()
    folder.weight("half", np.zeros((8, VOCAB), np.float16))
    folder.model.graph.node.extend([
        helper.make_node("Cast", [last.input[0]], ["x"], to=half),
        helper.make_node("MatMul", ["x", "half"], ["y"]),
        helper.make_node("Cast", ["y"], [LOGITS], to=TensorProto.FLOAT),
    ])  # fmt: skip
    has_kernel = any(
        k.op == "MatMul" and "tensor(float16)" in k.types.get("T", ()) for k in kernels() or ()
    )
    assert folder.findings().keys() == CLEAN | (set() if has_kernel else {"half_on_cpu"})


# Real exports.

TOLD = {
    "gpt2-merged": {"cache_copied", "one_token_steps", "positions_missing"},
    "gpt2-optimum": {"cache_copied"},
    "gpt2-ort": {"cache_copied"},
    "gpt2-ort-fused": {"cache_copied"},
    "gpt2-two-files": {"cache_copied", "one_token_steps", "positions_missing", "weights_twice"},
    "llama-genai": set[str](),
    "llama-merged": {"cache_copied"},
    "llama-optimum": {"cache_copied"},
    "llama-tf5": {"cache_copied"},
    "oldllama-merged": {"cache_copied", "one_token_steps", "positions_missing"},
    "qwen2-optimum": {"cache_copied"},
    "qwen3-optimum": {"cache_copied"},
}
BARE = {"eos_missing", "tokenizer_missing"}
"""The fixtures are graphs without tokenizers, of models without an end of sequence."""


@pytest.mark.parametrize("name", TOLD)
def test_real_exports(name: str) -> None:
    found = {f.code for f in diagnose(FIXTURES / name) if f.level != "note"}
    assert found == TOLD[name] | BARE


def test_memory_within_the_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:      8 kB\n")
    assert available_bytes(meminfo, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(meminfo, tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 8192
    assert available_bytes(tmp_path / "none", tmp_path) is None
