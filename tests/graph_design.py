"""What a tiny decoder is like: a ``Design``, its names and its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

INPUT_IDS, MASK, LOGITS, USE_CACHE = "input_ids", "attention_mask", "logits", "use_cache_branch"
CANONICAL = "BHSD"
NUM_POSITIONS, ENCODER_LEN, ROTARY_BASE = 64, 3, 100.0
USUAL = {
    "tokens": INPUT_IDS,
    "mask": MASK,
    "logits": LOGITS,
    "use_cache": USE_CACHE,
    "positions": "position_ids",
    "past_length": "past_sequence_length",
    "total_length": "total_sequence_length",
    "beam_indices": "beam_idx",
    "token_types": "token_type_ids",
    "last_positions": "seqlens_k",
    "unknown": "residual_scale",
}


def optimum_name(side: str, layer: int, role: str) -> str:
    """optimum's and the ONNX Runtime GenAI builder's names."""
    if side in ("scale", "zero_point"):
        return f"past_key_values.{layer}.{role}_{side}"
    return f"{'past_key_values' if side == 'past' else 'present'}.{layer}.{role}"


def usual_name(what: str) -> str:
    """The name most exporters give to an input or output that is not cache."""
    return USUAL.get(what, what)


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a graph is like.

    name: a cache tensor's name from side, layer and role.   label: any other's, from its use.
    order: a seed that shuffles inputs and outputs.   anonymous: open dims have no names.
    batch, query_len: fixed sizes.   id_dtype: of tokens, positions and lengths.
    past: False in a graph for first runs, which reads no cache.
    merged: an ``If`` over use_cache_branch.
    in_function: attention is a function of the model's own.

    attention: 'plain' (MatMul and Softmax), 'exp' (Softmax in arithmetic), 'scaled_both' (half of
    the scale to each side), 'turned' (caches on the left of MatMul), 'head_by_head', 'apart' (past
    and new are never joined: for 'delta'), 'einsum', 'attention_whole' (the standard op over
    a cache joined outside), 'attention_nonpad' (the same, told each row's length by
    nonpad_kv_seqlen), 'attention' (the op joins, 4-D inputs), 'attention_3d', 'gqa_mask'
    (GroupQueryAttention, its lengths from the mask), 'gqa_shape' (from the past's own shape),
    'gqa_inputs' (from inputs), 'mha' (MultiHeadAttention), 'mha_buffer' (the same in place, told
    the past's length), 'dmmha' (DecoderMasked-, in place, one token a run), 'fused'
    (com.microsoft's Attention).   packed: GroupQueryAttention takes q, k, v in one.

    layouts: of the key and of the value; letters in parentheses share an axis, a missing H is
    one kv head.   stacked: what one tensor holds: '' a key or a value; '2' a layer's key and
    value on an axis of their own, '2D' side by side on the last axis; 'L' every layer's keys (or
    values); 'L2' all.   stack_axis: where those axes are.   stack_join: 'parts' are joined
    to the past, or the 'whole' tensor of a layer.   join_layout: the axes they are joined in,
    where not the cache's own.   idle_nodes: nodes on either side that change nothing.

    update: 'concat', 'delta' (presents are the new tokens alone), 'scatter', 'window' (ends at
    the buffer's end), 'window_left' (fills from its start, then slides; told by write_from).
    capacity: the past's fixed length.   write: the op that scatters.   write_from: where to, as
    ``position_input``, or 'layer_lengths' (a counter in and out for each layer).

    cache_dtype, cache_cast: 'around' (pasts are cast as they come in, presents as they go out)
    or 'inside' (new tokens are cast).   scales: of int8 and uint8, 'constant' or 'input'.

    mask: '', '2d', and these of rank 4: '4d_keep' (True attends), '4d_drop' (True is masked),
    '4d_add' (0 or -1e9), '4d_ones' (1 attends).
    positions: '', 'learned', 'rotary' (tables), 'rotary_computed', 'rotary_op' (RotaryEmbedding),
    'rotary_inside' (GroupQueryAttention's own).   position_input: 'position_ids', 'flat', '3d',
    'cache_position', 'past_length' (scalar), 'past_length_1' ([1]), 'past_lengths' ([batch]),
    'total_length', 'mask' (its running sum), 'derived' (the past's shape).

    cross: attention over an encoder's output: '' none; 'given' (cross keys and values are
    inputs), 'passed' (and go out again), 'hidden' (computed from encoder_hidden_states in every
    run), 'first' (computed in the run without a past, else passed), 'first_only' (else empty).
    layer_kinds: a letter a layer: Attention, Convolution, Recurrence.
    conv_state_len: 2 or 3, of a kernel of 3.   recurrence: 'scan', or 'step' (one token a run).
    extras: further inputs: num_logits_to_keep, beam_indices, token_types, inputs_embeds (instead
    of tokens), unknown (a float scalar), encoder_mask.
    """

    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int | None = None
    head_dim: int = 4
    vocab_size: int = 11
    seed: int = 0
    opset: int = 17
    name: Callable[[str, int, str], str] = optimum_name
    label: Callable[[str], str] = usual_name
    order: int | None = None
    anonymous: bool = False
    batch: int | None = None
    query_len: int | None = None
    id_dtype: int = TensorProto.INT64
    past: bool = True
    merged: bool = False
    in_function: bool = False
    attention: str = "plain"
    packed: bool = False
    layouts: tuple[str, str] = (CANONICAL, CANONICAL)
    stacked: str = ""
    stack_axis: int = 0
    stack_join: str = "parts"
    join_layout: str = ""
    idle_nodes: bool = False
    update: str = "concat"
    capacity: int | None = None
    write: str = "ScatterND"
    write_from: str = "cache_position"
    cache_dtype: int = TensorProto.FLOAT
    cache_cast: str = "around"
    scales: str = "constant"
    mask: str = "2d"
    mask_dtype: int = TensorProto.INT64
    positions: str = ""
    position_input: str = "position_ids"
    cross: str = ""
    layer_kinds: str = ""
    conv_state_len: int = 2
    recurrence: str = "scan"
    extras: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def kinds(self) -> str:
        """A letter a layer."""
        return self.layer_kinds or "A" * self.num_layers

    @property
    def quantized(self) -> bool:
        return self.cache_dtype in (TensorProto.INT8, TensorProto.UINT8)

    def scale(self, layer: int, role: str) -> float:
        """Of a quantized cache; another for each tensor, so that mixing them up shows."""
        return 0.1 + 0.03 * layer + (0.01 if role == "value" else 0.0)

    @property
    def zero_point(self) -> int:
        return 128 if self.cache_dtype == TensorProto.UINT8 else 3


def groups(layout: str) -> list[str]:
    """The letters of each axis: ['BH', 'S', 'D'] of '(BH)SD'."""
    return [merged or one for merged, one in re.findall(r"\((\w+)\)|(\w)", layout)]


def tensors(design: Design) -> list[tuple[int, str]]:
    """(first layer, role) of each key and value tensor; role 'key_value' where it holds both."""
    attending = [i for i, kind in enumerate(design.kinds) if kind == "A"]
    layers = attending[:1] if design.stacked in ("L", "L2") else attending
    roles = ["key_value"] if design.stacked in ("2", "2D", "L2") else ["key", "value"]
    return [(layer, role) for layer in layers for role in roles]


def layout_of(design: Design, role: str) -> str:
    """The axes of a whole cache tensor."""
    plain = design.layouts[1] if role == "value" else design.layouts[0]
    if design.stacked == "2D":
        return plain.replace("D", "(2D)")
    axes = [f"({g})" if len(g) > 1 else g for g in groups(plain)]
    return "".join([*axes[: design.stack_axis], design.stacked, *axes[design.stack_axis :]])


def weights(design: Design) -> dict[str, NDArray[np.float32]]:
    """Every weight by the name it has in the graph."""
    random = np.random.default_rng(design.seed)
    width, vocab = design.width, design.vocab_size

    def draw(*shape: int) -> NDArray[np.float32]:
        return random.normal(0.0, 0.6, shape).astype(np.float32)

    found = {"embedding": draw(vocab, width), "head": draw(width, vocab)}
    kv_width = design.kv_heads * design.head_dim
    widths = {"wq": width, "wk": kv_width, "wv": kv_width, "wo": width}
    for layer, kind in enumerate(design.kinds):
        if kind == "C":
            found[f"kernel_{layer}"] = draw(width, 1, 3)
            continue
        found |= {f"{part}_{layer}": draw(width, size) for part, size in widths.items()}
        if design.cross:
            found |= {f"c{part}_{layer}": draw(width, size) for part, size in widths.items()}
    if design.positions == "learned":
        found["position_table"] = draw(NUM_POSITIONS, width)
    if "token_types" in design.extras:
        found["type_table"] = draw(2, width)
    return found


def encoder_states(design: Design) -> NDArray[np.float32]:
    """[ENCODER_LEN, width]: what an encoder would have made."""
    random = np.random.default_rng(design.seed + 1)
    return random.normal(0.0, 1.0, (ENCODER_LEN, design.width)).astype(np.float32)


def rotary_tables(design: Design) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [NUM_POSITIONS, head_dim / 2]."""
    half = np.arange(design.head_dim // 2)
    angles = np.outer(np.arange(NUM_POSITIONS), ROTARY_BASE ** (-2 * half / design.head_dim))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
