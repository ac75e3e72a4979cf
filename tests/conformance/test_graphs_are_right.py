"""Every variant in plain onnxruntime, fed by hand, gives numpy's logits at every step.

The driver below knows a design's conventions from its fields and its caches from
``expected_entries``; it shares no code with ortkv. So the generator is right, and so is the truth
that derivations are judged by: layouts, roles and layers are checked number by number.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from conformance_cases import CASES
from graph_design import ENCODER_LEN, Design, encoder_states, groups, weights
from graph_reference import reference
from graph_truth import expected_entries, expected_helpers
from graphs import decoder, embedding_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array = NDArray[Any]

ROWS = ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1])
"""Tokens of each row, more than any window holds."""
ROOM = 10
"""Of a capacity that the graph leaves open."""
PADS = [0, 2]
"""Of a ragged batch: slots before each row's own tokens."""


def chunks(design: Design) -> list[int]:
    """How many tokens each run takes."""
    if not design.past:
        return [7]
    one_by_one = design.write in ("Where", "Blend") and design.update == "scatter"
    if one_by_one or design.query_len == 1 or design.attention == "dmmha":
        return [1] * 7
    # Of several rows, GroupQueryAttention takes several tokens only over an empty past.
    return [4, 1, 1, 1] if design.attention.startswith("gqa") else [3, 2, 1, 1]


def session_of(model: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def numpy_type(dtype: int) -> Any:
    return helper.tensor_dtype_to_np_dtype(dtype)


class Driver:
    """One graph and its caches, each in its own layout, as the last run left them."""

    def __init__(self, design: Design, pads: list[int]) -> None:
        self.design, self.batch, self.done = design, len(pads), 0
        self.pads = np.array(pads)[:, None]
        self.session = session_of(decoder(design))
        self.entries, self.kinds = expected_entries(design), expected_helpers(design)
        self.types = {value.name: value.type for value in self.session.get_inputs()}
        self.ranks = {value.name: len(value.shape) for value in self.session.get_inputs()}
        self.pasts = {e["past"]: self.first(e) for e in self.entries if e["past"]}

    def first(self, entry: dict[str, Any]) -> Array:
        """The cache before the first token."""
        design, layout = self.design, entry["layout"]
        if entry["update"] == "replace":
            widths = {"BXX": [design.width, design.conv_state_len],
                      "BXXX": [design.num_heads, design.head_dim, design.head_dim]}  # fmt: skip
            return np.zeros([self.batch, *widths[layout]], np.float32)
        if entry["update"] == "constant":
            return self.cross(entry)
        length = {"concat": 0, "delta": 0, "in_place": ROOM, "scatter": ROOM}.get(
            entry["update"], 0
        )
        shape = [prod(self.size(letter, design.capacity or length) for letter in group)
                 for group in groups(layout)]  # fmt: skip
        return np.zeros(shape, numpy_type(design.cache_dtype))

    def cross(self, entry: dict[str, Any]) -> Array:
        """Keys or values of the encoder's output; none yet where the graph makes them."""
        design, part = self.design, {"cross_key": "cwk", "cross_value": "cwv"}[entry["role"]]
        made = encoder_states(design) @ weights(design)[f"{part}_{entry['layer']}"]
        heads = made.reshape(ENCODER_LEN, -1, design.head_dim).swapaxes(0, 1)[None]
        heads = heads[:, :, :0] if design.cross.startswith("first") else heads
        return np.repeat(heads, self.batch, axis=0)

    def size(self, letter: str, length: int) -> int:
        design = self.design
        sizes = {"B": self.batch, "H": design.kv_heads, "D": design.head_dim, "S": length}
        return (sizes | {"2": 2, "L": design.kinds.count("A")})[letter]

    def run(self, tokens: Array) -> Array:
        """Logits of new tokens [batch, query_len]."""
        feeds = dict(self.pasts)
        feeds |= {name: FEEDS[kind](self, tokens, name) for name, kind in self.kinds.items()}
        feeds |= self.tokens(tokens)
        feeds = {name: array.astype(as_numpy(self.types[name])) for name, array in feeds.items()}
        names = [value.name for value in self.session.get_outputs()]
        found = dict(zip(names, self.values(names, feeds), strict=True))
        self.ran = tokens.shape[1]
        self.done += self.ran
        for entry in self.entries:
            self.pasts[entry["past"] or entry["present"]] = self.after(entry, found)
        return found[self.design.label("logits")]

    def values(self, names: list[str], feeds: dict[str, Array]) -> list[Array]:
        """By OrtValues, which can be bfloat16."""
        inputs = {name: as_value(array) for name, array in feeds.items()}
        return [as_array(value) for value in self.session.run_with_ort_values(names, inputs)]

    def tokens(self, tokens: Array) -> dict[str, Array]:
        design = self.design
        if "inputs_embeds" not in design.extras:
            return {design.label("tokens"): tokens}
        name = design.label("inputs_embeds")
        embed = session_of(embedding_model(design))
        return {name: embed.run([name], {design.label("tokens"): tokens})[0]}

    def after(self, entry: dict[str, Any], found: dict[str, Array]) -> Array:
        """The past of the next run."""
        if entry["past"] is None:
            return found[entry["present"]]
        past = self.pasts[entry["past"]]
        present = found.get(entry["present"], past)
        if self.design.cross == "first_only" and entry["update"] == "constant":
            return present if self.done == self.ran else past
        if entry["update"] == "delta":
            axis = groups(entry["layout"]).index("S")
            whole = np.concatenate([past, present], axis)
            kept = range(whole.shape[axis])[-(self.design.capacity or whole.shape[axis]) :]
            return whole.take(list(kept), axis)
        return present

    # What each run is told, by kind.

    def seen(self, new: int) -> Array:
        """bool [batch, query_len, keys]: which slots each new token attends, causally."""
        design, done = self.design, self.done
        slots = np.arange(done + new)
        if design.update == "scatter":
            slots = np.arange(design.capacity or ROOM)
        elif design.update == "window_left":
            held = min(done, design.capacity or 0)
            slots = np.arange((design.capacity or 0) + new) + done - held
        elif design.capacity:  # right-aligned: slot 0 holds position done - capacity
            slots = np.arange(design.capacity + new) - (design.capacity - done)
        queries = np.arange(done, done + new)[:, None]
        own = (slots >= self.pads)[:, None]
        return (slots <= queries) & (slots >= 0) & own

    def mask_2d(self, tokens: Array, _: str) -> Array:
        return self.seen(tokens.shape[1])[:, -1]

    def mask_4d(self, tokens: Array, _: str) -> Array:
        seen = self.seen(tokens.shape[1])[:, None]
        turned = {"4d_keep": seen, "4d_ones": seen, "4d_drop": ~seen}
        return turned.get(self.design.mask, np.where(seen, 0.0, -1e9))

    def positions(self, tokens: Array, name: str) -> Array:
        slots = np.arange(self.done, self.done + tokens.shape[1])
        lines = np.maximum(slots - self.pads, 0)
        return {1: slots, 2: lines, 3: np.stack([lines] * 3)}[self.ranks[name]]

    def number(self, value: int, name: str) -> Array:
        """A scalar, [1] or [batch]."""
        shape = next(v.shape for v in self.session.get_inputs() if v.name == name)
        return np.full([dim if isinstance(dim, int) else self.batch for dim in shape], value)


FEEDS: dict[str, Callable[[Driver, Array, str], Array]] = {
    "mask_2d": Driver.mask_2d,
    "mask_4d": Driver.mask_4d,
    "positions": Driver.positions,
    "cache_position": Driver.positions,
    "past_length": lambda d, _, name: d.number(d.done, name),
    "total_length": lambda d, new, name: d.number(d.done + new.shape[1], name),
    "last_positions": lambda d, new, name: d.number(d.done + new.shape[1] - 1, name),
    "use_cache_branch": lambda d, _, __: np.array([d.done > 0]),
    "num_logits_to_keep": lambda _, __, ___: np.array(1),
    "beam_indices": lambda d, _, __: np.arange(d.batch),
    "token_types": lambda _, new, __: np.zeros_like(new),
    "unknown": lambda _, __, ___: np.array(1.0),
    "encoder_states": lambda d, _, __: np.tile(encoder_states(d.design), (d.batch, 1, 1)),
    "encoder_mask": lambda d, _, __: np.ones((d.batch, ENCODER_LEN)),
    "cache_scale": lambda d, _, name: np.array([scale_of(d.design, name)]),
    "cache_zero_point": lambda d, _, __: np.array([d.design.zero_point]),
}


def scale_of(design: Design, name: str) -> float:
    pairs = [(layer, role) for layer in range(design.num_layers) for role in ("key", "value")]
    return next(design.scale(*pair) for pair in pairs if design.name("scale", *pair) == name)


def as_numpy(ort_type: str) -> Any:
    kind = ort_type.removeprefix("tensor(").removesuffix(")")
    names = {"float": "float32", "float16": "float16", "double": "float64"}
    return ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(names.get(kind, kind))


def as_value(array: Array) -> Any:
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        kind = TensorProto.BFLOAT16
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind)
    return ort.OrtValue.ortvalue_from_numpy(array)


def as_array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    raw = ctypes.string_at(value.data_ptr(), 2 * prod(value.shape()))
    return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(value.shape())


def canonical(driver: Driver, entry: dict[str, Any], array: Array) -> dict[tuple[int, str], Array]:
    """[batch, heads, slots, head_dim] by layer and role, out of a tensor and its layout."""
    design, layout = driver.design, entry["layout"]
    if entry["update"] == "replace":
        return {(entry["layer"], entry["role"]): array}
    axis = groups(layout).index("S")
    letters = "".join(groups(layout))
    array = array.reshape([driver.size(letter, array.shape[axis]) for letter in letters])
    for missing in "L2H":
        if missing not in letters:
            array, letters = array[None], missing + letters
    array = array.transpose([letters.index(letter) for letter in "L2BHSD"])
    layers = [i for i, kind in enumerate(design.kinds) if kind == "A"]
    layers = layers if "L" in layout else [entry["layer"]]
    roles = ["key", "value"] if entry["role"] == "key_value" else [entry["role"]]
    return {(layer, role): array[i, j] for i, layer in enumerate(layers)
            for j, role in enumerate(roles)}  # fmt: skip


def tolerance(design: Design) -> float:
    """Of the largest logit: fp32 against float64, or what a cache of half precision rounds."""
    if design.cache_dtype == TensorProto.FLOAT or design.cache_cast == "inside":
        return 2e-5
    return 2e-2 if design.cache_dtype == TensorProto.FLOAT16 else 2e-1


def check_caches(driver: Driver, caches: list[dict[tuple[int, str], Array]]) -> None:
    """Each cache holds numpy's numbers where its entry says."""
    design, done = driver.design, driver.done
    for entry in driver.entries:
        for key, found in canonical(
            driver, entry, driver.pasts[entry["past"] or entry["present"]]
        ).items():
            wanted = np.stack([cache[key] for cache in caches])
            if entry["role"] in ("key", "value", "key_value"):
                found = held(driver, found, wanted.shape[2])
                wanted = wanted[:, :, -found.shape[2] :]
                if design.quantized:
                    found = (found.astype(float) - design.zero_point) * design.scale(*key)
            found = found.astype(np.float32)
            scale = tolerance(design) * max(1.0, np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, rtol=0, atol=scale, err_msg=f"{key} {done}")


def held(driver: Driver, array: Array, count: int) -> Array:
    """The slots that hold tokens: at the start of a buffer, at the end of a window."""
    fixed_past = driver.design.capacity and driver.design.update in ("delta", "window")
    return array[:, :, -min(count, array.shape[2]) :] if fixed_past else array[:, :, :count]


def run_all(design: Design, pads: list[int]) -> None:
    """Chunk by chunk, logits and caches against numpy's; rows begin with their pads."""
    driver = Driver(design, pads)
    tokens, start = np.array(ROWS[: len(pads)]), 0
    for count in chunks(design):
        stop = start + count
        found = driver.run(tokens[:, start:stop])
        for row, pad, logits in zip(tokens, pads, found, strict=True):
            own = min(len(logits), stop - pad)
            if own <= 0:
                continue
            wanted = reference(design, row[pad:stop].tolist())[0][-own:]
            atol = tolerance(design) * np.abs(wanted).max()
            np.testing.assert_allclose(logits[-own:], wanted, rtol=0, atol=atol)
        if not any(pads):
            check_caches(driver, [reference(design, row[:stop].tolist())[1] for row in tokens])
        start = stop


def tells_rows_apart(design: Design) -> bool:
    """True where the inputs can say that a row begins with padding."""
    if design.update == "scatter" and design.write_from == "position_ids":
        return False  # one place for all rows
    told = design.positions == "" or design.position_input in ("position_ids", "3d", "mask")
    masked = design.mask and not design.attention.startswith(("gqa", "dmmha"))
    return bool(masked and told and set(design.kinds) == {"A"} and design.batch is None)


# One of each design's names will do here: random ones, which also take every opset's turn.
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.endswith("/secret") or name.startswith("name/")]
)
def test_a_variant_gives_numpys_logits_and_caches_at_every_step(name: str) -> None:
    run_all(CASES[name], [0] * (CASES[name].batch or len(ROWS)))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, design in CASES.items()
        if tells_rows_apart(design) and not name.endswith(("/secret", "/nameless"))
    ],
)
def test_a_padded_row_is_told_by_its_mask_and_positions(name: str) -> None:
    run_all(CASES[name], PADS)


@pytest.mark.parametrize(
    "name", ["layout/BHSD-BHSD", "layout/(BH)SD-concat", "stack/L2+BHSD-concat"]
)
@pytest.mark.parametrize("fault", ["cross", "layers", "late", "forget"])
def test_the_driver_sees_a_planted_fault(name: str, fault: str) -> None:
    """Keys fed as values, one layer's as another's, a step's cache kept from before or lost."""
    driver = Driver(CASES[name], [0, 0])
    driver.run(np.array(ROWS)[:, :3])
    names = list(driver.pasts)
    before = dict(driver.pasts)
    driver.run(np.array(ROWS)[:, 3:4])
    first = driver.pasts[names[0]]
    if fault == "cross" and len(names) > 1:
        driver.pasts |= {names[0]: driver.pasts[names[1]], names[1]: first}
    elif fault == "layers" and len(names) > 2:
        driver.pasts |= {names[0]: driver.pasts[names[2]], names[2]: first}
    elif fault == "late":
        driver.pasts[names[0]] = np.concatenate([before[names[0]]] * 2, -2)[..., -4:, :]
    else:
        driver.pasts[names[0]] = first * (np.arange(4) != 1)[:, None]
    found = driver.run(np.array(ROWS)[:, 4:5])
    wanted = np.stack([reference(CASES[name], row[:5])[0][-1:] for row in ROWS])
    assert np.abs(found - wanted).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("layout/BHSD-BHSD", {"role": "value"}),
        ("layout/BHSD-BHSD", {"layer": 1}),
        ("layout/(BH)SD-concat", {"layout": "(HB)SD"}),
        ("layout/BS(HD)-concat", {"layout": "BS(DH)"}),
        ("layout/square-heads", {"layout": "BDSH"}),
        ("stack/two-layers-stacked", {"layout": "2BHSD", "role": "key_value"}),
        ("stack/L2+BHSD-concat", {"layout": "2LBHSD"}),
    ],
)
def test_the_driver_sees_a_wrong_truth(name: str, fields: dict[str, Any]) -> None:
    """An entry with another role, layer or layout holds other numbers than numpy's."""
    driver = Driver(CASES[name], [0, 0])
    driver.run(np.array(ROWS)[:, :3])
    caches = [reference(CASES[name], row[:3])[1] for row in ROWS]
    check_caches(driver, caches)
    driver.entries[0] |= fields
    with pytest.raises((AssertionError, ValueError)):
        check_caches(driver, caches)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("position/learned-position_ids", "positions"),
        ("position/rotary-past_length", "past_length"),
        ("position/learned-total_length", "total_length"),
        ("mask/4d_drop-concat", "mask_4d"),
        ("scatter/ScatterND-BHSD", "cache_position"),
        ("form/gqa_inputs", "last_positions"),
        ("dtype/int8-input", "cache_scale"),
        ("input/merged-BHSD", "use_cache_branch"),
        ("input/unknown", "unknown"),
    ],
)
def test_the_driver_sees_a_helper_input_fed_wrong(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every helper input matters to its graph."""
    right = FEEDS[kind]

    def wrong(driver: Driver, tokens: Array, which: str) -> Array:
        found = right(driver, tokens, which)
        if found.dtype == np.bool_:
            return ~found if kind != "use_cache_branch" else np.zeros_like(found)
        return found * 2 if found.dtype.kind == "f" else found + driver.done // 3

    monkeypatch.setitem(FEEDS, kind, wrong)
    with pytest.raises(Exception, match=r"Not equal to tolerance|ONNXRuntimeError"):
        run_all(CASES[name], [0, 0])
