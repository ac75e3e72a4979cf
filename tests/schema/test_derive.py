"""Schemas derived from graphs whose answer is known from how they were built."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from ortkv.errors import UnsupportedModel
from ortkv.schema import CacheSchema, derive
from ortkv.signature import signature_of

from graphs import INPUT_IDS, LOGITS, MASK, USE_CACHE, Design, decoder, full_logits

LAYOUT_PAIRS = [
    ("BHSD", "BHSD"), ("BSHD", "BSHD"), ("BHDS", "BHSD"), ("BHSD", "BHDS"), ("BHDS", "BHDS"),
]  # fmt: skip
TOPOLOGY_ALONE = {"topology", "shape"}


def schema_of(model: onnx.ModelProto) -> CacheSchema:
    return derive(signature_of(model), model)


def secret_name(side: str, layer: int, role: str) -> str:
    """A name that says nothing; another for each tensor, in no order."""
    return "t" + hashlib.sha256(f"{side} {layer} {role}".encode()).hexdigest()[:6]


def swapped_name(side: str, layer: int, role: str) -> str:
    """A known convention's name, with key and value the wrong way round."""
    wrong = {"key": "value", "value": "key"}[role]
    return f"{'past_key_values' if side == 'past' else 'present'}.{layer}.{wrong}"


def assert_schema(design: Design, model: onnx.ModelProto, update: str) -> CacheSchema:
    """Every entry is what the design says, in the layers' true order."""
    schema = schema_of(model)
    got = [
        (e.layer, e.role, e.past, e.present, e.layout, e.update, e.num_kv_heads, e.head_dim)
        for e in schema.entries
    ]
    assert got == [
        (layer, role, design.name("past", layer, role), design.name("present", layer, role),
         layout, update, design.num_heads, design.head_dim)
        for layer in range(design.num_layers)
        for role, layout in zip(("key", "value"), design.layouts, strict=True)
    ]  # fmt: skip
    assert (schema.tokens, schema.logits) == (INPUT_IDS, LOGITS)
    assert schema.vocab_size == design.vocab_size
    assert {h.name: h.kind for h in schema.helpers}[MASK] == "mask_2d"
    return schema


def shape_of(past: Any) -> list[int]:
    """The shape of an empty past of one row."""
    sizes: dict[Any, Any] = {"batch": 1, "past_len": 0}
    return [sizes.get(dim, dim) for dim in past.shape]


def reordered(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same graph with inputs and outputs listed in another order."""
    for values in (model.graph.input, model.graph.output):
        order = np.random.default_rng(seed).permutation(len(values))
        shuffled = [values[i] for i in order]
        del values[:]
        values.extend(shuffled)
    return model


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("attention", "layouts", "head_dim"),
    [
        *(("plain", layouts, 4) for layouts in LAYOUT_PAIRS),
        *((kind, LAYOUT_PAIRS[0], 16) for kind in ("gqa_mask", "gqa_shape")),
    ],
)
def test_the_builders_graphs_are_sound(
    tmp_path: Path, attention: str, layouts: tuple[str, str], head_dim: int, merged: bool
) -> None:
    """Prompt and two steps in plain onnxruntime give what numpy gives, so the designs hold."""
    design = Design(attention=attention, layouts=layouts, merged=merged, head_dim=head_dim)
    path = tmp_path / "model.onnx"
    onnx.save(decoder(design), path)
    session: Any = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    tokens, wanted = [3, 1, 4, 1, 5], full_logits(design, [3, 1, 4, 1, 5])
    cache = {
        value.name: np.zeros(shape_of(value), np.float32)
        for value in session.get_inputs()
        if value.type == "tensor(float)"
    }
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        feeds = {INPUT_IDS: np.array([tokens[start:stop]]), MASK: np.ones((1, stop), np.int64)}
        if merged:
            feeds[USE_CACHE] = np.array([start > 0])
        logits, *presents = session.run(None, feeds | cache)
        np.testing.assert_allclose(logits[0], wanted[start:stop], rtol=1e-4, atol=1e-4)
        cache = dict(zip(cache, presents, strict=True))


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS)
@pytest.mark.parametrize("merged", [False, True])
def test_a_concatenated_cache_is_derived_in_every_layout(
    layouts: tuple[str, str], merged: bool
) -> None:
    design = Design(layouts=layouts, merged=merged)
    schema = assert_schema(design, decoder(design), "concat")
    assert all(set(e.evidence) == {"topology", "name", "shape"} for e in schema.entries)
    kinds = {h.kind for h in schema.helpers}
    assert kinds == {"mask_2d", "use_cache_branch"} if merged else {"mask_2d"}


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_names_that_say_nothing_and_any_order_change_nothing(
    layouts: tuple[str, str], merged: bool, seed: int
) -> None:
    """Layers and roles come from use alone, though inputs and outputs are shuffled apart."""
    design = Design(num_layers=3, layouts=layouts, merged=merged, name=secret_name)
    schema = assert_schema(design, reordered(decoder(design), seed), "concat")
    assert {kind for e in schema.entries for kind in e.evidence} <= TOPOLOGY_ALONE


@pytest.mark.parametrize("layouts", LAYOUT_PAIRS)
def test_use_in_the_graph_wins_over_a_name_that_says_the_opposite(
    layouts: tuple[str, str],
) -> None:
    design = Design(layouts=layouts, name=swapped_name)
    schema = assert_schema(design, reordered(decoder(design), 1), "concat")
    assert all("name" not in e.evidence for e in schema.entries)


def test_layers_named_out_of_order_are_numbered_by_use() -> None:
    """Layer 0 is the one that runs first, whatever its number is in the names."""

    def backwards(side: str, layer: int, role: str) -> str:
        return f"{'past_key_values' if side == 'past' else 'present'}.{2 - layer}.{role}"

    design = Design(num_layers=3, name=backwards)
    assert_schema(design, reordered(decoder(design), 4), "concat")


@pytest.mark.parametrize(
    "convention",
    [
        lambda s, i, r: f"{'past_key_values' if s == 'past' else 'present'}.{i}.{r}",
        lambda s, i, r: f"{'past_key_values' if s == 'past' else 'present_key_values'}.{i}.{r}",
        lambda s, i, r: f"past_key_values_{r}_cache_{i}{'' if s == 'past' else '_out'}",
        lambda s, i, r: f"{'past' if s == 'past' else 'present'}_key_values_{i}_{r}",
        lambda s, i, r: f"{'in' if s == 'past' else 'out'}put.past_key_values.layers.{i}.{r}s",
    ],
)
def test_known_conventions_are_evidence(convention: Callable[[str, int, str], str]) -> None:
    design = Design(num_layers=11, name=convention)
    schema = assert_schema(design, reordered(decoder(design), 2), "concat")
    assert all("name" in e.evidence for e in schema.entries)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("attention", "update", "alignment"),
    [("gqa_mask", "in_place", "start"), ("gqa_shape", "concat", "end")],
)
@pytest.mark.parametrize("name", [Design().name, secret_name, swapped_name])
def test_group_query_attention_shares_its_buffer_where_the_length_comes_from_outside(
    attention: str, update: str, alignment: str, merged: bool, name: Callable
) -> None:
    """From the past's own shape, a buffer with spare capacity would count as tokens.

    The branch of a merged graph for first runs gives out a cache of its own length.
    """
    design = Design(attention=attention, head_dim=16, name=name, merged=merged)
    if merged:
        update, alignment = "concat", "end"
    schema = assert_schema(design, reordered(decoder(design), 3), update)
    assert schema.row_alignment == alignment


def test_a_head_size_the_signature_leaves_open_is_taken_from_the_op() -> None:
    design = Design(attention="gqa_mask", head_dim=16)
    model = decoder(design)
    for value in itertools.chain(model.graph.input, model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 4:
            dims[3].dim_param = "head_size"
    assert_schema(design, model, "in_place")


def test_rows_may_be_ragged_only_where_the_graph_can_tell_them_apart() -> None:
    """Concatenating without positions as an input, padding would count as positions."""
    assert not schema_of(decoder(Design())).takes_ragged_rows
    assert schema_of(decoder(Design(attention="gqa_mask", head_dim=16))).takes_ragged_rows


def drop(values: object, name: str) -> None:
    """Remove the value of this name from a repeated field."""
    kept = [value for value in values if value.name != name]  # type: ignore[attr-defined]
    del values[:]  # type: ignore[attr-defined]
    values.extend(kept)  # type: ignore[attr-defined]


KEY_0 = "past_key_values.0.key"
PRESENT_0 = "present.0.key"


@pytest.mark.parametrize("attention", ["plain", "gqa_mask"])
@pytest.mark.parametrize("name", [PRESENT_0, "present.1.value"])
def test_a_past_without_a_present_is_refused_by_name(attention: str, name: str) -> None:
    # hostile 27
    model = decoder(Design(attention=attention, head_dim=16))
    drop(model.graph.output, name)
    past = name.replace("present", "past_key_values")
    with pytest.raises(UnsupportedModel, match=past.replace(".", r"\.")):
        schema_of(model)


def test_a_present_without_a_past_is_refused_by_name() -> None:  # hostile 27
    model = decoder(Design())
    extra = helper.make_tensor_value_info("present.2.key", TensorProto.FLOAT, ["batch", 2, "kv", 4])
    model.graph.output.append(extra)
    model.graph.node.append(helper.make_node("Identity", [PRESENT_0], ["present.2.key"]))
    with pytest.raises(UnsupportedModel, match=r"present\.2\.key|past_key_values\.0\.key"):
        schema_of(model)


@pytest.mark.parametrize("name", [Design().name, secret_name])
def test_a_layer_without_its_value_is_refused(name: Callable[[str, int, str], str]) -> None:
    """The value's past is a weight instead of an input."""  # hostile 27
    design = Design(name=name)
    model = decoder(design)
    past = name("past", 1, "value")
    drop(model.graph.input, past)
    constant = helper.make_tensor(past, TensorProto.FLOAT, [1, 2, 0, 4], [])
    model.graph.initializer.append(constant)
    with pytest.raises(UnsupportedModel, match=r"keys of layers \[0, 1\], values of layers \[0\]"):
        schema_of(model)


def test_two_pasts_of_one_present_are_refused() -> None:  # hostile 27
    """Both are joined into one cache: which of them the present feeds is open."""
    model = decoder(Design(num_layers=1))
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(next(v for v in model.graph.input if v.name == KEY_0))
    copy.name = "another"
    model.graph.input.append(copy)
    concat = next(n for n in model.graph.node if n.op_type == "Concat" and KEY_0 in n.input)
    concat.input.insert(0, "another")
    with pytest.raises(UnsupportedModel, match=r"ambiguous.*another"):
        schema_of(model)


def test_a_graph_without_a_cache_is_refused() -> None:  # hostile 27
    design = Design(num_layers=1)
    model = decoder(design)
    for role in ("key", "value"):
        past = design.name("past", 0, role)
        drop(model.graph.input, past)
        drop(model.graph.output, design.name("present", 0, role))
        model.graph.initializer.append(helper.make_tensor(past, 1, [1, 2, 0, 4], []))
    with pytest.raises(UnsupportedModel, match=r"no key/value cache goes in.*-with-past"):
        schema_of(model)


def test_missing_logits_are_refused() -> None:  # hostile 29
    model = decoder(Design())
    drop(model.graph.output, LOGITS)
    with pytest.raises(UnsupportedModel, match="expected one output of logits"):
        schema_of(model)


@pytest.mark.parametrize(
    ("elem_type", "dims"),
    [(TensorProto.INT64, ["b", "s", 11]), (TensorProto.FLOAT, ["b"]), (TensorProto.FLOAT, None)],
)
def test_logits_of_a_wrong_dtype_or_rank_are_refused(
    elem_type: int, dims: list | None
) -> None:  # hostile 29
    model = decoder(Design())
    drop(model.graph.output, LOGITS)
    model.graph.output.append(helper.make_tensor_value_info(LOGITS, elem_type, dims))
    with pytest.raises(UnsupportedModel, match="expected one output of logits"):
        schema_of(model)


def test_logits_by_another_name_are_found_and_two_candidates_are_refused() -> None:  # hostile 29
    model = decoder(Design())
    head = next(n for n in model.graph.node if LOGITS in n.output)
    head.output[0] = "scores"
    drop(model.graph.output, LOGITS)
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["b", "s", 11])
    model.graph.output.append(scores)
    assert schema_of(model).logits == "scores"
    more = helper.make_tensor_value_info("more_scores", TensorProto.FLOAT, ["b", "s", 11])
    model.graph.output.append(more)
    with pytest.raises(UnsupportedModel, match=r"scores.*more_scores.*found 2"):
        schema_of(model)


def test_logits_are_the_output_as_wide_as_the_tokens_table() -> None:
    model = decoder(Design())
    hidden = helper.make_tensor_value_info("states", TensorProto.FLOAT, ["b", "s", 8])
    model.graph.output.insert(0, hidden)
    assert schema_of(model).logits == LOGITS


def used_in_the_logits(model: onnx.ModelProto, name: str) -> None:
    """Add the largest value of an input to every logit."""
    head = next(n for n in model.graph.node if LOGITS in n.output)
    head.output[0] = "raw"
    model.graph.node.extend(
        [
            helper.make_node("Cast", [name], [f"{name}_f"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMax", [f"{name}_f"], [f"{name}_max"], keepdims=0),
            helper.make_node("Add", ["raw", f"{name}_max"], [LOGITS]),
        ]
    )


@pytest.mark.parametrize(
    ("name", "elem_type", "dims"),
    [("prefix_states", TensorProto.FLOAT, ["b", "s", 8]),
     ("language_ids", TensorProto.INT64, ["b", "s"]),
     ("attention_mask", TensorProto.STRING, ["b", "s"]),
     ("position_ids", TensorProto.FLOAT, ["b", "s"])],
)  # fmt: skip
def test_an_unknown_input_is_refused_by_name(name: str, elem_type: int, dims: list) -> None:
    """Also a known name with a dtype that cannot be it."""
    model = decoder(Design())
    drop(model.graph.input, name)
    model.graph.input.append(helper.make_tensor_value_info(name, elem_type, dims))
    used_in_the_logits(model, name)
    with pytest.raises(UnsupportedModel, match=f"inputs: {name}.*neither cache nor"):
        schema_of(model)


def test_an_input_that_the_graph_does_not_use_gets_zeros_visibly() -> None:
    model = decoder(Design())
    model.graph.input.append(helper.make_tensor_value_info("lora_scale", 1, ["b", 3]))
    kinds = schema_of(model).to_dict()["inputs"]["helpers"]
    assert kinds == {MASK: "mask_2d", "lora_scale": "zeros"}


def test_head_sizes_that_no_dim_states_are_those_of_the_new_tokens() -> None:
    model = decoder(Design(num_layers=1))
    for values, name in ((model.graph.input, KEY_0), (model.graph.output, PRESENT_0)):
        drop(values, name)
        dims = ["batch", "h", "past_len", "d"]
        values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    key = next(entry for entry in schema_of(model).entries if entry.role == "key")
    assert (key.layout, key.num_kv_heads, key.head_dim) == ("BHSD", 2, 4)


@pytest.mark.parametrize("dims", [None, ["batch", 2, 0, 4]])
def test_a_cache_of_unknown_rank_or_fixed_length_is_refused(dims: list | None) -> None:
    """A sequence axis of a fixed size cannot hold the tokens to come."""  # hostile 28
    model = decoder(Design(num_layers=1))
    for values, name in ((model.graph.input, KEY_0), (model.graph.output, PRESENT_0)):
        drop(values, name)
        values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    with pytest.raises(UnsupportedModel, match=KEY_0.replace(".", r"\.")):
        schema_of(model)


def test_a_cache_whose_dtype_changes_on_the_way_is_refused() -> None:  # hostile 28
    model = decoder(Design(num_layers=1))
    drop(model.graph.output, PRESENT_0)
    present = helper.make_tensor_value_info(PRESENT_0, TensorProto.FLOAT16, ["b", 2, "kv", 4])
    model.graph.output.append(present)
    with pytest.raises(UnsupportedModel, match="one dtype"):
        schema_of(model)


@pytest.mark.parametrize("extra", ["tokens", "decoder_input_ids"])
def test_of_two_inputs_called_tokens_the_one_that_indexes_the_table_is_it(extra: str) -> None:
    model = decoder(Design())
    model.graph.input.append(helper.make_tensor_value_info(extra, TensorProto.INT64, ["b", "s"]))
    assert schema_of(model).tokens == INPUT_IDS


def test_two_inputs_of_tokens_are_refused() -> None:
    model = decoder(Design())
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"]))
    model.graph.node.append(helper.make_node("Gather", ["embedding", "ids"], ["unread"]))
    with pytest.raises(UnsupportedModel, match=r"exactly one input of token ids.*found 2"):
        schema_of(model)


@pytest.mark.parametrize(("attention", "ragged"), [("plain", True), ("gqa_shape", False)])
def test_rows_that_gqa_counts_by_the_pasts_shape_must_be_equal(
    attention: str, ragged: bool
) -> None:
    """GroupQueryAttention never looks at the mask: padding before a row would be attended."""
    model = decoder(Design(attention=attention, head_dim=16))
    positions = helper.make_tensor_value_info("position_ids", 7, ["batch", "query_len"])
    model.graph.input.append(positions)
    used_in_the_logits(model, "position_ids")
    assert derive(signature_of(model), model).takes_ragged_rows == ragged
