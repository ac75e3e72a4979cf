"""The designs that conformance is tested on, by name."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

from graph_design import Design
from graph_scores import MIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ATOMS = ("BHSD", "BSHD", "BHDS")
LAYOUTS = (
    "BHSD", "BSHD", "BHDS", "SBHD", "HBSD", "HBDS",
    "(BH)SD", "(BH)DS", "BS(HD)", "SB(HD)", "B(HD)S", "BHSD",
)  # fmt: skip
HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
BYTES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
MASK_DTYPES = {"int32": TensorProto.INT32, "bool": TensorProto.BOOL, "float": TensorProto.FLOAT}
MASKS_4D = ("4d_keep", "4d_drop", "4d_add", "4d_ones")
POSITION_INPUTS = (
    "position_ids", "flat", "3d", "cache_position", "past_length", "past_length_1",
    "past_lengths", "total_length", "mask", "derived",
)  # fmt: skip
WRITES = ("ScatterND", "ScatterElements", "TensorScatter", "Where", "Blend")


class RandomNames:
    """Names that mean nothing, for every input and output, the same each time asked for."""

    def __init__(self, seed: str) -> None:
        self.source = random.Random(seed)  # noqa: S311
        self.known: dict[Any, str] = {}

    def __call__(self, *what: Any) -> str:
        if what not in self.known:
            letters = "".join(self.source.choices("abcdefghij", k=8))
            self.known[what] = f"{letters}{len(self.known)}"
        return self.known[what]


def secret(name: str, design: Design) -> Design:
    """The same in another opset, every name random and inputs and outputs shuffled."""
    names, seed = RandomNames(name), zlib.crc32(name.encode())
    # onnxruntime 1.31 loses int8 on the way when it moves a Transpose over opset 21's
    # QuantizeLinear, and refuses its own graph.
    last = 20 if design.quantized else 24
    opset = 14 + seed % (last - 13) if design.opset == Design().opset else design.opset
    return replace(design, name=names, label=names, order=seed, opset=opset)


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Axis orders of keys and values, merged axes, with and without shared heads."""
    for pair in itertools.product(ATOMS, ATOMS):
        yield "-".join(pair), {"layouts": pair}
        yield f"{'-'.join(pair)}-delta", {"layouts": pair, "update": "delta"}
    for layout in LAYOUTS[3:-1]:
        for update in ("concat", "delta"):
            yield f"{layout}-{update}", {"layouts": (layout, layout), "update": update}
        yield f"{layout}-shared", {"layouts": (layout, layout), "num_heads": 4, "num_kv_heads": 2}
    for pair in (("(BH)DS", "(BH)SD"), ("HBDS", "HBSD"), ("B(HD)S", "BS(HD)"), ("SBHD", "BHSD")):
        yield "-".join(pair), {"layouts": pair}
    for layout in ("BSD", "BDS", "SBD"):
        yield f"{layout}-one-head", {"layouts": (layout, layout), "num_heads": 4, "num_kv_heads": 1}
    yield "BHSD-shared", {"num_heads": 4, "num_kv_heads": 2}
    yield "batch-of-one", {"batch": 1}
    yield "HBDS-batch-of-one", {"batch": 1, "layouts": ("HBDS", "HBSD")}
    yield "BHSD-one-head", {"num_heads": 3, "num_kv_heads": 1}
    for layout, inner in itertools.permutations(("BHSD", "BSHD", "SBHD", "BHDS"), 2):
        yield f"{layout}-joined-as-{inner}", {"layouts": (layout, layout), "join_layout": inner}
    for update in ("concat", "delta", "scatter"):
        yield f"idle-nodes-{update}", {"idle_nodes": True, "update": update}
    yield "idle-nodes-joined-as-BSHD", {"idle_nodes": True, "join_layout": "BSHD"}
    yield "square-heads", {"num_heads": 4, "head_dim": 4}
    yield "anonymous-dims", {"anonymous": True}
    yield "anonymous-BSHD", {"anonymous": True, "layouts": ("BSHD", "BSHD")}


def stacks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Several keys or values in one tensor."""
    several = {"num_layers": 3}
    for stacked, layout in itertools.product(("2", "L", "L2"), ("BHSD", "BSHD", "BHDS", "SBHD")):
        for update in ("concat", "delta"):
            yield f"{stacked}+{layout}-{update}", {
                "stacked": stacked, "layouts": (layout, layout), "update": update, **several,
            }  # fmt: skip
    for layout, update in itertools.product(("BHSD", "BSHD"), ("concat", "delta")):
        yield f"2D+{layout}-{update}", {
            "stacked": "2D", "layouts": (layout, layout), "update": update, **several,
        }  # fmt: skip
    one_head = {"num_heads": 4, "num_kv_heads": 1, "stacked": "2D", "layouts": ("BSD", "BSD")}
    yield "BS(2D)", one_head
    yield "BS(2D)-whole", one_head | {"stack_join": "whole"}
    yield "BHS(2D)-whole", {"stacked": "2D", "stack_join": "whole", **several}
    yield "2+BHSD-whole", {"stacked": "2", "stack_join": "whole", **several}
    yield "2+BHSD-whole-delta", {"stacked": "2", "stack_join": "whole", "update": "delta"}
    yield "2+(BH)SD-whole", {"stacked": "2", "stack_join": "whole", "layouts": ("(BH)SD",) * 2}
    yield "LBS(HD)", {"stacked": "L", "layouts": ("BS(HD)", "BS(HD)"), **several}
    yield "L2BS(HD)", {"stacked": "L2", "layouts": ("BS(HD)", "BS(HD)"), **several}
    yield "L(BH)SD", {"stacked": "L", "layouts": ("(BH)SD", "(BH)SD"), **several}
    yield "L-keys-and-values-apart", {"stacked": "L", "layouts": ("BHDS", "BHSD"), **several}
    yield "BLSHD", {"stacked": "L", "stack_axis": 1, "layouts": ("BSHD", "BSHD"), **several}
    yield "BL2HSD", {"stacked": "L2", "stack_axis": 1, **several}
    yield "B2HSD", {"stacked": "2", "stack_axis": 1, **several}
    yield "two-layers-stacked", {"stacked": "L", "num_layers": 2}
    yield "L-shared-heads", {"stacked": "L", "num_heads": 4, "num_kv_heads": 2}


def scatters() -> Iterator[tuple[str, dict[str, Any]]]:
    """A buffer of fixed capacity, written at a position."""
    for write, layout in itertools.product(WRITES, ATOMS):
        yield f"{write}-{layout}", scatter(write, layout)
    for write in ("ScatterND", "ScatterElements", "Where"):
        yield f"{write}-capacity-12", scatter(write) | {"capacity": 12}
        yield f"{write}-4d_keep", scatter(write) | {"mask": "4d_keep"}
        yield f"{write}-no-mask", scatter(write) | {"mask": ""}
        yield f"{write}-past_length", scatter(write) | {"write_from": "past_length"}
        yield f"{write}-past_length_1", scatter(write) | {"write_from": "past_length_1"}
        yield f"{write}-position_ids", scatter(write) | {"write_from": "position_ids"}
    for layout in ("(BH)SD", "BS(HD)", "HBSD", "SBHD"):
        yield f"ScatterND-{layout}", scatter("ScatterND", layout)
        yield f"ScatterElements-{layout}", scatter("ScatterElements", layout)
    for mask in MASKS_4D[1:]:
        yield f"ScatterND-{mask}", scatter("ScatterND") | {"mask": mask}
    yield "transformers-static", scatter("ScatterND") | {
        "write_from": "layer_lengths", "mask": "4d_keep", "capacity": 16,
    }  # fmt: skip
    yield "LBS(HD)-at-an-offset", scatter("ScatterND", "BS(HD)") | {
        "stacked": "L", "capacity": 16, "write_from": "past_length_1", "mask": "",
    }  # fmt: skip
    yield "rotary-cache_position", scatter("ScatterND") | {
        "positions": "rotary", "position_input": "cache_position",
    }  # fmt: skip
    yield "learned-position_ids", scatter("ScatterElements") | {"positions": "learned"}
    yield "TensorScatter-shared", scatter("TensorScatter") | {"num_heads": 4, "num_kv_heads": 2}
    yield "TensorScatter-attention", scatter("TensorScatter") | {"attention": "attention_whole"}
    nonpad = scatter("TensorScatter") | {"attention": "attention_nonpad"}
    yield "nonpad", nonpad
    yield "nonpad-no-mask", nonpad | {"mask": "", "query_len": 1}
    yield "nonpad-shared", nonpad | {"num_heads": 4, "num_kv_heads": 2, "mask": "4d_add"}
    yield "ScatterND-fp16", scatter("ScatterND") | half("fp16", "inside")
    yield "ScatterND-einsum", scatter("ScatterND") | {"attention": "einsum"}
    yield "ScatterND-function", scatter("ScatterND") | {"in_function": True}


def scatter(write: str, layout: str = "BHSD") -> dict[str, Any]:
    by_op = {"opset": 24, "write_from": "past_lengths"} if write == "TensorScatter" else {}
    one = {"query_len": 1} if write in ("Where", "Blend") else {}
    return {"update": "scatter", "write": write, "layouts": (layout, layout)} | by_op | one


def windows() -> Iterator[tuple[str, dict[str, Any]]]:
    """A past of fixed length that slides, in the graph or by the host (static delta)."""
    rotary = {"positions": "rotary"}
    for layout in ("BHSD", "BSHD", "BHDS"):
        pair = {"layouts": (layout, layout)}
        yield f"window-{layout}", {"update": "window", "capacity": 4, **pair, **rotary}
    yield "window-no-positions", {"update": "window", "capacity": 5}
    yield "window-learned", {"update": "window", "capacity": 4, "positions": "learned"}
    yield "window-stacked", {"update": "window", "capacity": 4, "stacked": "L2"}
    yield "window-shared", {"update": "window", "capacity": 4, "num_heads": 4, "num_kv_heads": 2}
    yield "window-one-token", {"update": "window", "capacity": 4, "query_len": 1, **rotary}
    left = {"update": "window_left", "capacity": 4}
    for layout in ATOMS:
        yield f"left-{layout}", left | {"layouts": (layout, layout)}
    yield "left-rotary-past_length", left | rotary | {
        "position_input": "past_length", "write_from": "past_length",
    }  # fmt: skip
    yield "left-stacked", left | {"stacked": "2"}
    yield "left-no-mask", left | {"mask": ""}
    static = {"update": "delta", "capacity": 8, "mask": "4d_add", **rotary}
    yield "static-delta", static
    yield "static-delta-one-token", static | {"query_len": 1, "batch": 1}
    yield "static-delta-head-first", static | {
        "query_len": 1, "batch": 1, "layouts": ("HBDS", "HBSD"),
    }  # fmt: skip
    yield "static-delta-head-first-rows", static | {"layouts": ("HBDS", "HBSD")}
    yield "static-delta-2d", static | {"mask": "2d"}
    yield "static-delta-BHDS", static | {"layouts": ("BHDS", "BHSD")}


def positions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to tell a graph where its tokens are."""
    for kind, source in itertools.product(("learned", "rotary"), POSITION_INPUTS):
        yield f"{kind}-{source}", {"positions": kind, "position_input": source}
    for source in ("position_ids", "past_length", "derived"):
        yield (
            f"rotary_computed-{source}",
            {"positions": "rotary_computed", "position_input": source},
        )
    yield "rotary_op", {"positions": "rotary_op"}
    yield "rotary-BSHD-shared", {
        "positions": "rotary", "layouts": ("BSHD", "BSHD"), "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    yield (
        "rotary-delta",
        {"positions": "rotary", "update": "delta", "position_input": "past_length"},
    )


def masks() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, dtype in MASK_DTYPES.items():
        yield f"mask-{name}", {"mask_dtype": dtype}
    for mask, update in itertools.product(MASKS_4D, ("concat", "delta")):
        yield f"{mask}-{update}", {"mask": mask, "update": update}
    yield "no-mask", {"mask": ""}
    yield "no-mask-one-row", {"mask": "", "batch": 1}
    yield "no-mask-rotary", {"mask": "", "positions": "rotary"}
    yield "4d_keep-rotary-3d", {"mask": "4d_keep", "positions": "rotary", "position_input": "3d"}
    yield "4d_drop-SBHD", {"mask": "4d_drop", "layouts": ("SBHD", "SBHD"), "positions": "rotary"}


def half(name: str, cast: str) -> dict[str, Any]:
    return {"cache_dtype": (HALVES | BYTES)[name], "cache_cast": cast}


def dtypes() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, cast in itertools.product(HALVES, ("around", "inside")):
        for stacked in ("", "2", "L2"):
            yield f"{name}-{cast}-{stacked or 'single'}", half(name, cast) | {"stacked": stacked}
    for name, scales in itertools.product(BYTES, ("constant", "input")):
        given = half(name, "inside") | {"scales": scales}
        yield f"{name}-{scales}", given
        yield f"{name}-{scales}-BSHD", given | {"layouts": ("BSHD", "BSHD")}
        yield f"{name}-{scales}-delta", given | {"update": "delta"}
    yield "int8-scatter", half("int8", "inside") | scatter("ScatterND")
    yield "uint8-shared", half("uint8", "inside") | {"num_heads": 4, "num_kv_heads": 2}


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Attention as other than MatMul and Softmax."""
    for pair in itertools.product(ATOMS, ATOMS):
        yield f"einsum-{'-'.join(pair)}", {"attention": "einsum", "layouts": pair}
    shared = {"num_heads": 4, "num_kv_heads": 2}
    yield "einsum-shared", {"attention": "einsum", **shared}
    yield "einsum-SBHD", {"attention": "einsum", "layouts": ("SBHD", "HBDS")}
    for form, opset in itertools.product(
        ("attention", "attention_3d", "attention_whole"), (23, 24)
    ):
        yield f"{form}-{opset}", {"attention": form, "opset": opset}
        yield f"{form}-{opset}-shared", {"attention": form, "opset": opset, **shared}
    yield "attention-rotary", {"attention": "attention", "opset": 23, "positions": "rotary"}
    yield "attention-4d_keep", {"attention": "attention", "opset": 23, "mask": "4d_keep"}
    yield "attention-stacked", {"attention": "attention", "opset": 24, "stacked": "L2"}
    for layout in ("BSHD", "BHDS", "(BH)SD"):
        given = {"attention": "attention_whole", "layouts": (layout, layout), "opset": 23}
        yield f"attention_whole-{layout}", given
    for form in ("gqa_mask", "gqa_shape", "gqa_inputs"):
        wide = {"attention": form, "head_dim": 16}
        yield form, wide
        yield f"{form}-shared", wide | shared
        yield f"{form}-packed", wide | {"packed": True, **shared}
        yield f"{form}-rotary", wide | {"positions": "rotary_inside"}
        yield f"{form}-packed-rotary", wide | {"packed": True, "positions": "rotary_inside"}
        yield f"{form}-rotary-outside", wide | {"positions": "rotary"}
    yield "gqa_mask-merged", {"attention": "gqa_mask", "head_dim": 16, "merged": True}
    yield "gqa_inputs-no-mask", {"attention": "gqa_inputs", "head_dim": 16, "mask": ""}
    yield "mha", {"attention": "mha"}
    yield "mha-stacked", {"attention": "mha", "stacked": "2"}
    yield "mha-rotary", {"attention": "mha", "positions": "rotary"}
    yield "mha-4d_add", {"attention": "mha", "mask": "4d_add"}
    yield "mha_buffer", {"attention": "mha_buffer", "mask": ""}
    yield "mha_buffer-one-token", {"attention": "mha_buffer", "mask": "", "query_len": 1}
    yield "mha_buffer-rotary", {
        "attention": "mha_buffer", "mask": "", "query_len": 1, "positions": "rotary",
    }  # fmt: skip
    yield "dmmha", {"attention": "dmmha", "query_len": 1, "mask": ""}
    yield "dmmha-mask", {"attention": "dmmha", "query_len": 1}
    yield "fused", fused()
    yield "fused-learned", fused() | {"positions": "learned"}
    yield "fused-int32-mask", fused() | {"mask_dtype": TensorProto.INT32}
    yield "fused-no-mask", fused() | {"mask": ""}
    for layout in (*ATOMS, "(BH)SD"):
        yield f"function-{layout}", {"in_function": True, "layouts": (layout, layout)}
    yield "function-delta", {"in_function": True, "update": "delta"}
    yield "function-stacked", {"in_function": True, "stacked": "L"}
    yield "function-einsum", {"in_function": True, "attention": "einsum"}


def scores() -> Iterator[tuple[str, dict[str, Any]]]:
    """MatMul and Softmax in other pieces."""
    shared = {"num_heads": 4, "num_kv_heads": 2}
    for form, pair in itertools.product(MIXES, (("BHSD",) * 2, ("BHDS", "BHSD"), ("BSHD",) * 2)):
        if form != "plain":
            given = {"attention": form, "layouts": pair}
            yield f"{form}-{'-'.join(pair)}", given
            yield f"{form}-{'-'.join(pair)}-shared", given | shared | {"update": "delta"}
    # Of fixed length: onnxruntime's FusedMatMul leaves noise where it sums over no tokens.
    apart = {"attention": "apart", "update": "delta", "capacity": 8}
    for pair in itertools.product(ATOMS, ATOMS):
        yield f"apart-{'-'.join(pair)}", apart | {"layouts": pair}
    yield "apart-shared", apart | shared
    yield "apart-stacked", apart | {"stacked": "L"}
    yield "apart-4d_add", apart | {
        "mask": "4d_add", "layouts": ("HBDS", "HBSD"), "positions": "rotary",
    }  # fmt: skip


def fused() -> dict[str, Any]:
    return {"attention": "fused", "stacked": "2", "stack_join": "whole"}


def inputs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Merged graphs and further inputs."""
    for layout in ATOMS:
        yield f"merged-{layout}", {"merged": True, "layouts": (layout, layout)}
    for stacked in ("2", "L", "L2"):
        yield f"merged-{stacked}", {"merged": True, "stacked": stacked}
    yield "merged-rotary", {"merged": True, "positions": "rotary"}
    yield "merged-fp16", {"merged": True} | half("fp16", "inside")
    yield "merged-opset-14", {"merged": True, "opset": 14}
    for extra in ("num_logits_to_keep", "beam_indices", "token_types", "inputs_embeds", "unknown"):
        yield extra, {"extras": (extra,)}
    yield "inputs_embeds-3d", {
        "extras": ("inputs_embeds",), "positions": "rotary", "position_input": "3d",
    }  # fmt: skip
    yield "beams-stacked", {"extras": ("beam_indices",), "stacked": "2"}
    yield "beams-scatter", {"extras": ("beam_indices",)} | scatter("ScatterND")
    yield "everything", {
        "extras": ("num_logits_to_keep", "beam_indices", "token_types", "unknown"),
        "positions": "rotary",
    }  # fmt: skip
    small = {"id_dtype": TensorProto.INT32, "mask_dtype": TensorProto.INT32}
    yield "int32-ids", small | {"positions": "rotary"}
    yield "int32-ids-cache_position", small | scatter("ScatterND")
    yield "int32-ids-stacked", small | {"stacked": "2", "positions": "learned"}
    for stacked in ("", "L2"):
        yield f"first-run-{stacked or 'single'}", {"past": False, "stacked": stacked}
    yield "first-run-gqa", {"past": False, "attention": "gqa_mask", "head_dim": 16}
    for opset in range(14, 25):
        yield f"opset-{opset}", {"opset": opset, "positions": "rotary"}


def others() -> Iterator[tuple[str, dict[str, Any]]]:
    """Cross-attention, and layers whose cache is a state."""
    for cross in ("given", "passed", "hidden"):
        yield f"cross-{cross}", {"cross": cross}
        yield f"cross-{cross}-masked", {"cross": cross, "extras": ("encoder_mask",)}
        yield f"cross-{cross}-delta", {"cross": cross, "update": "delta"}
    yield "cross-first", {"cross": "first", "merged": True}
    yield "cross-first-rotary", {"cross": "first", "merged": True, "positions": "rotary"}
    yield "cross-first_only", {"cross": "first_only", "merged": True}
    yield "cross-first-run", {"cross": "first", "past": False}
    yield "cross-given-shared", {"cross": "given", "num_heads": 4, "num_kv_heads": 2}
    yield "cross-given-scatter", {"cross": "given"} | scatter("ScatterND")
    for kinds in ("CA", "CCAC", "AC", "RA", "RRRA", "CRA", "C", "R"):
        if "A" in kinds:
            yield f"hybrid-{kinds}", {"layer_kinds": kinds, "num_layers": len(kinds)}
    hybrid = {"layer_kinds": "CACA", "num_layers": 4}
    yield "hybrid-wide-state", hybrid | {"conv_state_len": 3}
    yield "hybrid-rotary", hybrid | {"positions": "rotary"}
    yield "hybrid-BSHD-delta", hybrid | {"layouts": ("BSHD", "BSHD"), "update": "delta"}
    yield "hybrid-stacked", hybrid | {"stacked": "L"}
    # Of two layers: more of random weights this wide amplify the last bit beyond any tolerance.
    yield "hybrid-gqa", {
        "layer_kinds": "CA", "num_layers": 2, "attention": "gqa_mask", "head_dim": 16,
    }  # fmt: skip
    yield "hybrid-step", {
        "layer_kinds": "RAR", "num_layers": 3, "recurrence": "step", "query_len": 1,
    }  # fmt: skip


def names() -> Iterator[tuple[str, dict[str, Any]]]:
    """Layers numbered otherwise than they run."""
    yield "layers-reversed", {"num_layers": 4, "name": lambda s, i, r: f"{s}.{3 - i}.{r}"}
    lexical = sorted(range(12), key=str)
    yield "layers-lexical", {"num_layers": 12, "name": lambda s, i, r: f"{s}.{lexical[i]}.{r}"}
    yield "layers-from-one", {"name": lambda s, i, r: f"{s}_{r}_{i + 1}"}
    yield "layers-skip", {"name": lambda s, i, r: f"{s}.{5 * i + 2}.{r}"}
    yield (
        "keys-called-values",
        {"name": lambda s, i, r: f"{s}.{i}.{({'key': 'value', 'value': 'key'})[r]}"},
    )


SOURCES: dict[str, Callable[[], Iterator[tuple[str, dict[str, Any]]]]] = {
    "layout": layouts, "stack": stacks, "scatter": scatters, "window": windows,
    "position": positions, "mask": masks, "dtype": dtypes, "form": forms, "score": scores,
    "input": inputs, "other": others,
}  # fmt: skip


def cases() -> dict[str, Design]:
    """Each design as exporters name it, and with names that mean nothing; layouts also without
    names of dims.
    """
    found: dict[str, Design] = {}
    for family, source in SOURCES.items():
        for name, fields in source():
            found[f"{family}/{name}"] = Design(**fields)
    found |= {f"name/{name}": Design(order=1, **fields) for name, fields in names()}
    secrets = {
        f"{name}/secret": secret(name, design)
        for name, design in found.items()
        if not name.startswith("name/")
    }
    nameless = {
        f"{name}/nameless": replace(secret(f"{name}!", design), anonymous=True)
        for name, design in found.items()
        if name.startswith(("layout/", "stack/"))
    }
    return found | secrets | nameless


CASES = cases()
