"""Graphs that leave something open: a map settles it, and they then run as numpy says."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ortkv import Generator, inspect, verify
from ortkv.errors import ConfigError, OrtkvError, UnsupportedModel
from ortkv.feeds import Run, feed
from ortkv.schema import CacheSchema, derive, read_map
from ortkv.schema.explain import explain
from ortkv.schema.spec import HelperInput
from ortkv.signature import signature_of

from conformance_cases import CASES, SOURCES
from graph_truth import expected_entries
from graphs import LOGITS, Design, decoder, full_logits

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOLERANCE = 1e-4  # fp32 against float64 in numpy
TOKENS = [3, 1, 4, 1, 5, 9]
KEY, PRESENT = "past_key_values.0.key", "present.0.key"


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((DOCS / name).read_text()))


def saved(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> Path:
    onnx.save(model, folder / name)
    return folder / name


def assert_runs(path: Path, design: Design, kv_map: Any, *, certify: bool = True) -> None:
    """Logits of a prompt and of every step after it are numpy's."""
    sequence = Generator(path, kv_map=kv_map, certify=certify).start(TOKENS[:3])
    found = [sequence.logits, *(sequence.extend([token]).logits for token in TOKENS[3:])]
    expected = full_logits(design, TOKENS)[2:]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def line_in(error: OrtkvError) -> dict[str, Any]:
    """The line that a message says would settle it."""
    found = re.search(r"put (\{.*\}) in ortkv\.json", str(error))
    assert found is not None, error
    validator("kv_map.schema.json").validate(json.loads(found[1])["kv_map"])
    return json.loads(found[1])


def derived(names: tuple[str, ...]) -> Iterator[tuple[str, onnx.ModelProto, CacheSchema]]:
    for name in names:
        model = decoder(CASES[name])
        try:
            yield name, model, derive(signature_of(model), model)
        except UnsupportedModel:
            continue  # what is open is for other tests


FAMILIES = {
    source: tuple(name for name in CASES if name.startswith(f"{source}/") and name.count("/") == 1)[
        ::2
    ]
    for source in SOURCES
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_inspect_prints_is_a_map_that_changes_nothing_but_the_evidence(family: str) -> None:
    printed, stated = validator("inspect.schema.json"), validator("kv_map.schema.json")
    count = 0
    for name, model, schema in derived(FAMILIES[family]):
        document = json.loads(json.dumps(schema.to_dict()))
        printed.validate(document)
        stated.validate(document)
        again = derive(signature_of(model), model, read_map(document, "map.json"))
        assert [e.evidence for e in again.entries] == [
            (*e.evidence, "stated") for e in schema.entries
        ], name
        assert plain(again) == plain(schema), name
        count += 1
    assert count > len(FAMILIES[family]) / 2


def plain(schema: CacheSchema) -> CacheSchema:
    """Without what tells that something was stated."""
    helpers = sorted((replace(h, is_stated=False) for h in schema.helpers), key=lambda h: h.name)
    entries = tuple(replace(entry, evidence=()) for entry in schema.entries)
    return replace(schema, helpers=tuple(helpers), entries=entries)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_explanation_names_ops_of_the_graph_on_the_way_to_the_present(family: str) -> None:
    for name, model, schema in derived(FAMILIES[family]):
        found = explain(signature_of(model), model, schema)
        document = {"explain": [explanation.to_dict() for explanation in found]}
        document = json.loads(json.dumps(schema.to_dict() | document))
        validator("inspect.schema.json").validate(document)
        for entry, shown in zip(schema.entries, found, strict=True):
            assert [axis.axis for axis in shown.axes] == list(range(len(shown.axes)))
            if entry.present is None:
                assert shown.path == ()
                continue
            assert shown.path, name
            if entry.update not in ("replace", "constant"):
                assert shown.join in shown.path, name
            if not (entry.role in ("conv", "recurrent") or name.startswith("score/exp")):
                assert shown.role_from is not None, name


@pytest.mark.parametrize(
    "name",
    ["score/exp-BHSD-BHSD/secret", "score/exp-BSHD-BSHD-shared/secret",
     "score/exp-BHDS-BHSD/secret"],
)  # fmt: skip
def test_a_role_that_the_graph_hides_is_settled_by_the_line_of_the_error(
    name: str, tmp_path: Path
) -> None:
    """The softmax is arithmetic and no name means anything; pairs and layouts are seen."""
    design = CASES[name]
    path = saved(tmp_path, decoder(design))
    with pytest.raises(UnsupportedModel) as failure:
        inspect(path)
    document = line_in(failure.value)
    roles = {entry["past"]: entry["role"] for entry in expected_entries(design)}
    for entry in document["kv_map"]["entries"]:
        entry["role"] = roles.pop(entry["past"])
    assert not roles
    assert_runs(path, design, document)
    assert verify(path, kv_map=document).ok
    for found, expected in zip(
        inspect(path, kv_map=document).to_dict()["entries"], expected_entries(design), strict=True
    ):
        assert {key: found[key] for key in expected} == expected
        assert "stated" in found["evidence"]


@pytest.mark.parametrize(
    "name",
    ["score/exp-BHDS-BHSD/secret", "score/exp-BSHD-BSHD/secret", "score/apart-BHDS-BSHD/secret",
     "score/apart-BHSD-BHSD", "score/apart-stacked/secret", "score/apart-4d_add/secret"],
)  # fmt: skip
def test_a_whole_map_needs_no_evidence(name: str, tmp_path: Path) -> None:
    """Also where past and new tokens are never joined in the graph."""
    design = CASES[name]
    path = saved(tmp_path, decoder(design))
    assert_runs(path, design, {"entries": expected_entries(design)}, certify=False)


@pytest.mark.parametrize(
    "name", [n for n in CASES if re.fullmatch(r"dtype/u?int8-input(-BSHD|-delta)?(/secret)?", n)]
)
def test_scales_that_are_inputs_are_fed_their_stated_values(name: str, tmp_path: Path) -> None:
    design = CASES[name]
    path = saved(tmp_path, decoder(design))
    with pytest.raises(UnsupportedModel) as failure:
        inspect(path)
    document = line_in(failure.value)
    document["kv_map"]["inputs"]["values"] = scales(design, document)
    assert_runs(path, design, document)
    helpers = inspect(path, kv_map=document).to_dict()["inputs"]
    assert set(helpers["values"].items()) <= set(scales(design, document).items())
    assert verify(path, kv_map=document).ok


def scales(design: Design, document: dict[str, Any]) -> dict[str, float]:
    """The right value for every input that the error's line lists."""
    known = {
        design.name(what, layer, role): value
        for layer in range(design.num_layers)
        for role in ("key", "value")
        for what, value in (
            ("scale", design.scale(layer, role)), ("zero_point", design.zero_point),
        )
    }  # fmt: skip
    return {name: known[name] for name in document["kv_map"]["inputs"]["values"]}


def test_a_wrong_scale_is_not_numpys(tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    design = CASES["dtype/int8-input"]
    path = saved(tmp_path, decoder(design))
    with pytest.raises(UnsupportedModel) as failure:
        inspect(path)
    document = line_in(failure.value)  # every scale and zero point is 1
    with pytest.raises(AssertionError):
        assert_runs(path, design, document)


@pytest.mark.parametrize("name", ["input/unknown", "input/everything/secret"])
def test_an_unknown_number_is_settled_by_the_line_of_the_error(name: str, tmp_path: Path) -> None:
    design = CASES[name]
    path = saved(tmp_path, decoder(design))
    with pytest.raises(UnsupportedModel) as failure:
        inspect(path)
    assert_runs(path, design, line_in(failure.value))


def with_a_rival() -> onnx.ModelProto:
    """A second past that the graph could take in the place of the first, and never does."""
    model = decoder(Design())
    rival = onnx.ValueInfoProto()
    rival.CopyFrom(next(v for v in model.graph.input if v.name == KEY))
    rival.name = "rival"
    model.graph.input.append(rival)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "first"))
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == KEY:
                node.input[i] = "chosen"
    model.graph.node.insert(0, helper.make_node("Where", ["first", KEY, "rival"], ["chosen"]))
    return model


def test_two_inputs_that_claim_one_place_are_told_apart(tmp_path: Path) -> None:
    path = saved(tmp_path, with_a_rival())
    with pytest.raises(UnsupportedModel, match="ambiguous") as failure:
        inspect(path)
    document = line_in(failure.value)["kv_map"]
    assert {entry["past"] for entry in document["entries"]} == {KEY, "rival"}
    cache = next(entry for entry in document["entries"] if entry["past"] == KEY)
    document["entries"] = [{**cache, "layer": 0, "update": "concat"}]
    document["inputs"] = {"helpers": {"rival": "zeros"}}
    document["entries"][0]["layout"] = "BHSD"
    assert_runs(path, Design(), document)
    first = inspect(path, kv_map=document).entries[0]
    assert (first.past, first.evidence) == (KEY, ("name", "shape", "stated"))


def test_tokens_and_logits_are_the_ones_that_are_named(tmp_path: Path) -> None:
    model = decoder(Design(label=lambda what: {"logits": "scores"}.get(what, what)))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"])
    model.graph.input.append(ids)
    model.graph.node.append(helper.make_node("Gather", ["embedding", "ids"], ["unread"]))
    more = helper.make_tensor_value_info("more", TensorProto.FLOAT, ["b", "s", 11])
    model.graph.node.append(helper.make_node("Neg", ["scores"], ["more"]))
    model.graph.output.append(more)
    path = saved(tmp_path, model)
    document: dict[str, Any] = {}
    for key, name in (("inputs", "tokens"), ("outputs", "logits")):
        with pytest.raises(UnsupportedModel, match="found 2") as failure:
            inspect(path, kv_map=document)
        line = line_in(failure.value)["kv_map"]
        assert line[key].keys() == {name}
        line[key][name] = {"tokens": "tokens", "logits": "scores"}[name]
        document |= line
        if name == "tokens":
            document["inputs"]["values"] = {"ids": 0}
    assert_runs(path, Design(), document)


def test_sizes_that_the_dims_leave_open_are_stated(tmp_path: Path) -> None:
    design = CASES["score/exp-BSHD-BSHD-shared/secret"]
    model = decoder(design)
    entries = expected_entries(design)
    for value in (*model.graph.input, *model.graph.output):
        if value.name in {name for e in entries for name in (e["past"], e["present"])}:
            for axis in (2, 3):
                value.type.tensor_type.shape.dim[axis].dim_param = f"size_{axis}"
    path = saved(tmp_path, model)
    assert_runs(path, design, {"entries": entries})
    first = {key: entries[0][key] for key in ("past", "role")}
    wrong = {"entries": [first | {"layout": "BSHD", "head_dim": 4}, *entries[1:]]}
    assert inspect(path, kv_map=wrong).entries[0].num_kv_heads == design.kv_heads


def test_the_batch_and_the_heads_may_share_an_axis(tmp_path: Path) -> None:
    design = CASES["layout/(BH)SD-concat/secret"]
    path = saved(tmp_path, decoder(design))
    assert_runs(path, design, {"entries": expected_entries(design)})


def test_a_states_role_and_layer_are_stated(tmp_path: Path) -> None:
    design = CASES["other/hybrid-CA/secret"]
    path = saved(tmp_path, decoder(design))
    (state,) = [e for e in expected_entries(design) if e["update"] == "replace"]
    entry = {"past": state["past"], "role": "recurrent", "layer": 5}
    found = inspect(path, kv_map={"entries": [entry]}).entries[-1]
    assert (found.past, found.role, found.layer) == (state["past"], "recurrent", 5)
    assert found.evidence == ("topology", "shape", "stated")
    assert_runs(path, design, {"entries": [state]}, certify=False)


def test_a_wrong_map_is_refused_by_the_certificate_and_by_verify(tmp_path: Path) -> None:
    design = Design()
    path = saved(tmp_path, decoder(design))
    key, value = expected_entries(design)[:2]
    crossed = {
        "entries": [key | {"present": value["present"]}, value | {"present": key["present"]}]
    }
    with pytest.raises(UnsupportedModel, match="the cache is not understood"):
        Generator(path, kv_map=crossed)
    assert not verify(path, kv_map=crossed).ok
    evidence = {e.past: e.evidence for e in inspect(path, kv_map=crossed).entries}
    assert "topology" not in evidence[KEY]


def test_the_maps_place_is_beside_the_model_or_given(tmp_path: Path) -> None:
    """What is given replaces what lies beside the model; the manifest's schema is no evidence."""
    design = CASES["input/unknown"]
    path = saved(tmp_path, decoder(design))
    right = {"inputs": {"values": {"residual_scale": 1.0}}}
    manifest = {"format": 1, "schema": {"inputs": {"tokens": "nothing"}}}
    beside, given = tmp_path / "ortkv.json", tmp_path / "map.json"
    beside.write_text(json.dumps(manifest))
    with pytest.raises(UnsupportedModel, match="residual_scale"):
        inspect(tmp_path)
    beside.write_text(json.dumps(manifest | {"kv_map": right}))
    assert_runs(tmp_path, design, None)
    assert_runs(path, design, None)
    given.write_text(json.dumps({"kv_map": {"inputs": {"values": {"residual_scale": 3.0}}}}))
    (fill,) = [h.fill for h in inspect(path, kv_map=given).helpers if h.kind == "stated"]
    assert fill == 3.0
    beside.write_text(json.dumps(manifest | {"kv_map": {"inputs": {"token": "x"}}}))
    with pytest.raises(ConfigError, match=r"ortkv\.json: kv_map: inputs .*'token'"):
        inspect(path)
    assert inspect(path, kv_map=str(given)).tokens == "input_ids"


def test_a_map_holds_for_the_graph_of_first_runs_too(tmp_path: Path) -> None:
    design = CASES["dtype/int8-input"]
    values = scales(
        design,
        {"kv_map": {"inputs": {"values": [
            design.name(what, layer, role)
            for what in ("scale", "zero_point") for layer in range(2) for role in ("key", "value")
        ]}}},
    )  # fmt: skip
    saved(tmp_path, decoder(design), "decode.onnx")
    saved(tmp_path, decoder(replace(design, past=False)), "prefill.onnx")
    assert_runs(tmp_path, design, {"inputs": {"values": values}})


WRONG: list[tuple[Any, str]] = [
    ([], r"kv_map is \[\]: expected a JSON object"),
    ({"entrys": []}, r"unknown key 'entrys': expected keys of format, inputs, outputs, entries"),
    ({"format": 2}, r"kv_map: format is 2: expected 1"),
    ({"kv_map": {"inputs": []}}, r"kv_map: kv_map: inputs is \[\]"),
    ({"kv_map": {}, "inputs": {}}, r"kv_map: kv_map"),
    ({"inputs": {"tokens": 3}}, r"inputs\.tokens is 3: expected a string"),
    ({"inputs": {"tokens": "nobody"}}, r"inputs\.tokens is \"nobody\": expected one of the graph"),
    ({"outputs": {"logits": "nobody"}}, r"outputs\.logits is \"nobody\""),
    ({"outputs": {"scores": "logits"}}, r"outputs has the unknown key 'scores'"),
    ({"inputs": {"helpers": {"attention_mask": "mask"}}}, r"helpers\.attention_mask is \"mask\""),
    ({"inputs": {"helpers": {"nobody": "zeros"}}}, r"helpers\.nobody"),
    ({"inputs": {"helpers": {"attention_mask": "stated"}}}, r"together with its number"),
    ({"inputs": {"values": {"nobody": 1}}}, r"inputs\.values\.nobody"),
    ({"inputs": {"values": {"attention_mask": "1"}}}, r"attention_mask is \"1\": expected a num"),
    ({"inputs": {"values": {"attention_mask": True}}}, r"attention_mask is true"),
    ({"inputs": {"values": {"attention_mask": 0.5}}}, r"a number that int64 can hold"),
    ({"inputs": {"values": {"attention_mask": 10**400}}}, r"a finite number"),
    ({"inputs": {"values": {"attention_mask": 1}, "tokens": "attention_mask"}}, r"is not tokens"),
    ({"entries": {}}, r"entries is \{\}: expected a list"),
    ({"entries": [{}]}, r"entries\[0\]\.past is null: expected the name"),
    ({"entries": [{"past": KEY}, {"past": KEY}]}, r"entries\[1\]\.past .* one entry a past"),
    ({"entries": [{"past": "nobody"}]}, r"entries\[0\]\.past is \"nobody\""),
    ({"entries": [{"past": KEY, "present": "nobody"}]}, r"entries\[0\]\.present is \"nobody\""),
    ({"entries": [{"past": KEY, "present": None}]}, r"entries\[0\]\.present is null"),
    ({"entries": [{"past": KEY, "role": "kee"}]}, r"entries\[0\]\.role is \"kee\": .* key, value"),
    ({"entries": [{"past": KEY, "layer": -1}]}, r"entries\[0\]\.layer is -1"),
    ({"entries": [{"past": KEY, "layer": True}]}, r"entries\[0\]\.layer is true"),
    ({"entries": [{"past": KEY, "head_dim": 0}]}, r"entries\[0\]\.head_dim is 0"),
    ({"entries": [{"past": KEY, "update": "append"}]}, r"entries\[0\]\.update is \"append\""),
    ({"entries": [{"past": KEY, "dtype": "int8"}]}, r"dtype is \"int8\": expected float32"),
    ({"entries": [{"past": KEY, "layout": "BHS"}]}, r"layout is \"BHS\""),
    ({"entries": [{"past": KEY, "layout": "BHSDL"}]}, r"a letter, or letters in parentheses"),
    ({"entries": [{"past": KEY, "layout": "BHXD"}]}, r"layout is \"BHXD\""),
    ({"entries": [{"past": KEY, "layout": "B(SD)HL"}]}, r"S an axis of its own"),
    ({"entries": [{"past": KEY, "layout": "(B"}]}, r"layout is \"\(B\""),
    ({"entries": [{"past": KEY, "role": "conv", "layout": "BHSD"}]}, r"B, then an X"),
    ({"entries": [{"past": KEY, "role": "conv", "update": "concat"}]}, r"\"replace\" for a conv"),
    ({"entries": [{"past": KEY, "role": "key", "update": "replace"}]}, r"where update is replace"),
    ({"entries": [{"past": KEY, "role": "cross_key", "update": "concat"}]}, r"\"constant\" for a"),
    ({"entries": [{"past": KEY}], "inputs": {"tokens": KEY}}, r"it is inputs\.tokens"),
    ({"entries": [{"past": KEY, "present": LOGITS}], "outputs": {"logits": LOGITS}}, r"it is out"),
]


@pytest.mark.parametrize(("document", "words"), WRONG, ids=range(len(WRONG)))
def test_a_malformed_map_is_refused_by_its_key(document: Any, words: str, tmp_path: Path) -> None:
    path, file = saved(tmp_path, decoder(Design())), tmp_path / "map.json"
    with pytest.raises(ConfigError, match=words):
        inspect(path, kv_map=document)
    if isinstance(document, dict):
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match=r"map\.json"):
            inspect(path, kv_map=file)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"inputs": {"helpers": {"input_ids": "mask_4d"}, "tokens": "attention_mask"}}, "mask_4d"),
        ({"inputs": {"tokens": KEY}}, r"inputs\.tokens is .*expected integers of"),
        ({"outputs": {"logits": PRESENT}, "entries": []}, "expected one output of logits"),
        ({"entries": [{"past": KEY, "num_kv_heads": 3}]}, r"entries\[0\].*an axis of 2"),
        ({"entries": [{"past": KEY, "layout": "BHDS"}]}, r"whose dims leave head_dim open"),
        ({"entries": [{"past": KEY, "layout": "BHDS", "head_dim": 4}]}, r"axis is fixed at 4"),
        ({"entries": [{"past": KEY, "layer": 1}]}, r"ambiguous, two inputs claim one place"),
        ({"entries": [{"past": KEY, "present": "present.1.key"}]}, r"ambiguous, two inputs"),
    ],
)
def test_a_map_that_the_graph_contradicts_is_refused(
    document: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        inspect(saved(tmp_path, decoder(Design())), kv_map=document)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '{"kv_map": '])
def test_a_file_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    path, file = saved(tmp_path, decoder(Design())), tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"map\.json"):
        inspect(path, kv_map=file)
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        inspect(path, kv_map=tmp_path / "absent.json")


def test_too_little_of_an_unknown_past_says_what_is_missing(tmp_path: Path) -> None:
    design = CASES["score/apart-BHSD-BHSD/secret"]
    value = next(e for e in expected_entries(design) if e["role"] == "value")
    document = {"entries": [{"past": value["past"], "role": "value"}]}
    with pytest.raises(UnsupportedModel, match="found no present, layout"):
        inspect(saved(tmp_path, decoder(design)), kv_map=document)


@pytest.mark.parametrize(("dtype", "fill"), [("int8", 3.0), ("bfloat16", 0.5), ("bool", 1.0)])
def test_a_stated_value_fills_the_declared_shape(dtype: str, fill: float) -> None:
    stated = HelperInput(
        name="scale", kind="stated", dtype=dtype, dims=("batch", 3, None), fill=fill
    )
    run = Run(lengths=[2, 2], past_len=2, query_len=1, axes=())
    found = feed(stated, run)
    assert (found.shape, str(found.dtype)) == ((1, 3, 1), dtype)
    assert (found.astype(np.float64) == fill).all()
    assert not feed(replace(stated, kind="zeros", fill=0.0), run).astype(np.float64).any()


def test_the_documents_know_every_word_of_the_schema() -> None:
    """The lists in both JSON schemas are those of spec.py."""
    from typing import get_args

    from ortkv.schema.spec import Evidence, HelperKind, Role, Update

    for name in ("inspect.schema.json", "kv_map.schema.json"):
        keys = json.loads((DOCS / name).read_text())["properties"]
        helpers = keys["inputs"]["properties"]["helpers"]["additionalProperties"]["enum"]
        entry = keys["entries"]["items"]["properties"]
        assert set(helpers) == set(get_args(HelperKind))
        assert set(entry["role"]["enum"]) == set(get_args(Role))
        assert set(entry["update"]["enum"]) == set(get_args(Update))
        assert set(entry["evidence"]["items"]["enum"]) == set(get_args(Evidence))


def test_the_documented_map_is_one() -> None:
    text = (DOCS / "kv_map.md").read_text()
    (document,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    validator("kv_map.schema.json").validate(json.loads(document)["kv_map"])
    assert read_map(json.loads(document), "kv_map.md").entries["c0"].role == "key"
