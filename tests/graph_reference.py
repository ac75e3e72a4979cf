"""The decoder of a design in numpy: every token at once, float64, no cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from onnx import TensorProto

from graph_design import Design, encoder_states, rotary_tables, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

DECAY = 0.7


def full_logits(design: Design, tokens: Sequence[int]) -> NDArray[np.float32]:
    """[len(tokens), vocab_size]."""
    return reference(design, tokens)[0]


def reference(
    design: Design, tokens: Sequence[int]
) -> tuple[NDArray[np.float32], dict[tuple[int, str], Array]]:
    """Logits [len(tokens), vocab_size]; and what a cache of them all holds, by layer and role.

    Keys and values are [kv_heads, len(tokens), head_dim], conv states [width, conv_state_len],
    recurrent states [num_heads, head_dim, head_dim].
    """
    w = {name: array.astype(np.float64) for name, array in weights(design).items()}
    x = w["embedding"][np.array(tokens)]
    if design.positions == "learned":
        x = x + w["position_table"][: len(tokens)]
    if "token_types" in design.extras:
        x = x + w["type_table"][0]
    cache: dict[tuple[int, str], Array] = {}
    for layer, kind in enumerate(design.kinds):
        mix = {"A": _attention, "C": _convolution, "R": _recurrence}[kind]
        x = x + mix(design, w, layer, x, cache)
        if kind == "A" and design.cross:
            x = x + _cross(design, w, layer, x, cache)
    return (x @ w["head"]).astype(np.float32), cache


def _heads(design: Design, x: Array) -> Array:
    """[num_heads, tokens, head_dim]."""
    return x.reshape(len(x), -1, design.head_dim).swapaxes(0, 1)


def _rotated(design: Design, x: Array) -> Array:
    """[heads, tokens, head_dim] at positions 0, 1, 2 …; halves, not interleaved."""
    cos, sin = (np.concatenate([t, t], -1)[: x.shape[1]] for t in rotary_tables(design))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], -1) * sin


def _attend(q: Array, k: Array, v: Array, seen: NDArray[np.bool_]) -> Array:
    """[tokens, num_heads * head_dim]; ``seen`` [tokens, kv_len]."""
    k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
    scores = np.where(seen, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (shares / shares.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(0, 1).reshape(q.shape[1], -1)


def _stored(design: Design, array: Array, layer: int, role: str) -> Array:
    """As read back from a cache of the design's dtype, where new tokens go through it too."""
    if design.cache_dtype == TensorProto.FLOAT or design.cache_cast == "around":
        return array
    if design.quantized:
        scale, zero = np.float64(np.float32(design.scale(layer, role))), design.zero_point
        low, high = (0, 255) if design.cache_dtype == TensorProto.UINT8 else (-128, 127)
        return (np.clip(np.round(array / scale) + zero, low, high) - zero) * scale
    half = np.float16 if design.cache_dtype == TensorProto.FLOAT16 else ml_dtypes.bfloat16
    return array.astype(np.float32).astype(half).astype(np.float64)


def _attention(
    design: Design, w: dict[str, Array], layer: int, x: Array, cache: dict[tuple[int, str], Array]
) -> Array:
    q, k, v = (_heads(design, x @ w[f"{part}_{layer}"]) for part in ("wq", "wk", "wv"))
    if design.positions.startswith("rotary"):
        q, k = _rotated(design, q), _rotated(design, k)
    k, v = _stored(design, k, layer, "key"), _stored(design, v, layer, "value")
    cache[layer, "key"], cache[layer, "value"] = k, v
    seen = np.tri(len(x), dtype=bool)
    if design.update.startswith("window"):
        assert design.capacity
        seen &= ~np.tri(len(x), k=-design.capacity, dtype=bool)
    return _attend(q, k, v, seen) @ w[f"wo_{layer}"]


def _cross(
    design: Design, w: dict[str, Array], layer: int, x: Array, cache: dict[tuple[int, str], Array]
) -> Array:
    states = encoder_states(design).astype(np.float64)
    q = _heads(design, x @ w[f"cwq_{layer}"])
    k, v = (_heads(design, states @ w[f"{part}_{layer}"]) for part in ("cwk", "cwv"))
    cache[layer, "cross_key"], cache[layer, "cross_value"] = k, v
    seen = np.ones((len(x), len(states)), bool)
    return _attend(q, k, v, seen) @ w[f"cwo_{layer}"]


def _convolution(
    design: Design, w: dict[str, Array], layer: int, x: Array, cache: dict[tuple[int, str], Array]
) -> Array:
    """Causal and depthwise, of kernel 3, over zeros before the first token."""
    kernel = w[f"kernel_{layer}"][:, 0]
    before = np.concatenate([np.zeros((3, design.width)), x]).T
    cache[layer, "conv"] = before[:, -design.conv_state_len :]
    return np.stack([(before[:, i + 1 : i + 4] * kernel).sum(-1) for i in range(len(x))])


def _recurrence(
    design: Design, w: dict[str, Array], layer: int, x: Array, cache: dict[tuple[int, str], Array]
) -> Array:
    """Linear attention with decay, over a state of [num_heads, head_dim, head_dim]."""
    q, k, v = (_heads(design, x @ w[f"{part}_{layer}"]) for part in ("wq", "wk", "wv"))
    state = np.zeros((design.num_heads, design.head_dim, design.head_dim))
    mixed = []
    for i in range(len(x)):
        state = DECAY * state + k[:, i, :, None] * v[:, i, None, :]
        mixed.append((q[:, i, None, :] @ state).reshape(-1))
    cache[layer, "recurrent"] = state
    return np.stack(mixed) / design.width @ w[f"wo_{layer}"]
