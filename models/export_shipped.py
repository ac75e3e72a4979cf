"""Exports models/shakespeare to models/shakespeare-onnx, measures parity, writes card and manifest.

    pip install '.[cpu,export]' && python models/export_shipped.py

onnxruntime-genai's model builder makes the graph. Card and manifest are written only if every
check passes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import onnxruntime_genai
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from ortkv_export.manifest import Provenance, sha256_of, write_manifest

Array = npt.NDArray[np.float32]

HERE = Path(__file__).parent
BUILT = ("model.onnx", "model.onnx.data", "genai_config.json")
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PROMPT = "ROMEO:"
NUM_DECODED = 200
TOLERANCE = 1e-4
PACKAGES = ("onnxruntime-genai", "onnxruntime", "transformers", "torch")

CARD = """\
---
license: apache-2.0
language: en
library_name: ortkv
pipeline_tag: text-generation
base_model: models/shakespeare
---

# shakespeare-onnx

A Llama of {parameters:,} parameters that writes in the manner of Shakespeare's plays, as one ONNX
graph for prefill and decode. It is small enough to ship with ortkv, and is there to try the engine
without a download. It is a demonstration, not a useful language model.

- **Base model**: `models/shakespeare`, trained from scratch by `models/train.py` on Andrej
  Karpathy's tinyshakespeare; see `models/README.md` for the run, its losses and its limits.
- **Shape**: {layers} layers, hidden size {hidden}, {heads} query heads and {kv_heads} key-value
  heads of {head_dim}, context {context} tokens, byte-level BPE of {vocab} tokens, tied embeddings.
- **Graph**: `GroupQueryAttention` with packed QKV and rotary embedding inside; `past_key_values.N`
  and `present.N` may share one buffer `[batch, {kv_heads}, capacity, {head_dim}]`. The tied
  embedding is stored once: the graph transposes the weight of the output layer.
- **Precision**: float32 throughout; no quantization.
- **Decoding**: greedy by default (`generation_config.json` has no sampling settings). Neither bos
  nor eos is added to a prompt. The text it was trained on has no ends, so do not expect the model
  to choose eos: give a token limit, at most {context} with the prompt.

## Parity

Measured against transformers' `LlamaForCausalLM` in float32 on the prompt `{prompt}` and
{decoded} greedily chosen tokens, over every logit of every position:

| path | positions | largest absolute difference | same greedy token |
|---|---|---|---|
| prefill, the whole text at once | {length} | {prefill:.1e} | {prefill_same} of {length} |
| decode, one token at a time, past and present in one buffer | {decoded} | {decode:.1e} | \
{decode_same} of {decoded} |

onnxruntime-genai loads the folder and generates the same {decoded} tokens.
Versions: {versions}.

## Files

| file | bytes |
|---|---|
{files}

## Made by

`python models/export_shipped.py`, which runs

    python -m onnxruntime_genai.models.builder -i models/shakespeare -o OUT -p fp32 -e cpu -c CACHE

keeps the graph and `genai_config.json`, and takes the other files from the checkpoint unchanged.

## Licence

Apache-2.0, as the project. The text of Shakespeare is in the public domain.
"""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far two stacks of logits are apart, and where they choose the same token."""

    largest: float
    num_same: int

    @classmethod
    def between(cls, found: Array, expected: Array) -> "Gap":
        """found, expected: [positions, vocab]. Raises: RuntimeError above TOLERANCE."""
        if found.shape != expected.shape:
            raise RuntimeError(f"logits are {found.shape}, expected {expected.shape}")
        largest = float(np.abs(found - expected).max())
        if not largest <= TOLERANCE:
            raise RuntimeError(f"logits differ by {largest:.2e}, allowed {TOLERANCE:.0e}")
        same = found.argmax(axis=-1) == expected.argmax(axis=-1)
        return cls(largest=largest, num_same=int(same.sum()))


class Graph:
    """One sequence on the exported graph, its cache updated in place."""

    def __init__(self, folder: Path) -> None:
        """Loads the graph and gives it empty buffers for the whole context."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = ort.InferenceSession(
            folder / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        # Outputs come back in the order in which they were first bound: logits are number 0.
        self._binding.bind_output("logits")
        shape = (1, config["num_key_value_heads"], config["max_position_embeddings"])
        for layer in range(config["num_hidden_layers"]):
            for part in ("key", "value"):
                empty = np.zeros((*shape, config["head_dim"]), np.float32)
                buffer = ort.OrtValue.ortvalue_from_numpy(empty)
                self._binding.bind_ortvalue_input(f"past_key_values.{layer}.{part}", buffer)
                self._binding.bind_ortvalue_output(f"present.{layer}.{part}", buffer)
        self._past_len = 0

    def extend(self, ids: list[int]) -> Array:
        """Feeds tokens after those already fed.

        Returns: their logits, [len(ids), vocab], a copy.   Changes: the cache.
        """
        self._past_len += len(ids)
        self._binding.bind_cpu_input("input_ids", np.array([ids], np.int64))
        self._binding.bind_cpu_input("attention_mask", np.ones((1, self._past_len), np.int64))
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding)
        return self._binding.get_outputs()[0].numpy()[0].copy()


def build(checkpoint: Path, out: Path) -> None:
    """Fills `out` with the graph and what has to lie beside it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "out"
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(checkpoint), "-o", str(built)]
        command += ["-p", "fp32", "-e", "cpu", "-c", str(Path(scratch) / "cache")]
        subprocess.run(command, check=True)
        for name in BUILT:
            shutil.copyfile(built / name, out / name)
    for name in KEPT:
        shutil.copyfile(checkpoint / name, out / name)


def decode_greedily(folder: Path, prompt: list[int]) -> tuple[list[int], Array]:
    """Generates NUM_DECODED tokens, and feeds each of them, one a step.

    Returns: prompt and generated tokens; logits of the generated ones, [NUM_DECODED, vocab].
    """
    graph = Graph(folder)
    ids, logits = list(prompt), [graph.extend(prompt)[-1]]
    for _ in range(NUM_DECODED):
        ids.append(int(logits[-1].argmax()))
        logits.append(graph.extend(ids[-1:])[-1])
    return ids, np.stack(logits[1:])


def generate_with_genai(folder: Path, prompt: str, length: int) -> list[int]:
    """The `length` tokens, prompt included, that onnxruntime-genai makes of the prompt."""
    og: Any = onnxruntime_genai  # its module has no types
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=length)
    generator = og.Generator(model, params)
    generator.append_tokens(og.Tokenizer(model).encode(prompt))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


@torch.no_grad()
def write_card(checkpoint: Path, out: Path) -> dict[str, float | int]:
    """Measures the export against transformers and writes README.md.   Returns: the figures.

    Raises: RuntimeError if logits or onnxruntime-genai's tokens differ.
    """
    prompt = Tokenizer.from_file(str(out / "tokenizer.json")).encode(PROMPT).ids
    ids, decoded = decode_greedily(out, prompt)
    if generate_with_genai(out, PROMPT, len(ids)) != ids:
        raise RuntimeError("onnxruntime-genai generates other tokens")
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = model(torch.tensor([ids])).logits[0].numpy()
    prefill = Gap.between(Graph(out).extend(ids), expected)
    decode = Gap.between(decoded, expected[len(prompt) :])
    config = model.config
    sizes = [(name, (out / name).stat().st_size) for name in sorted(BUILT + KEPT)]
    card = CARD.format(
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context=config.max_position_embeddings,
        vocab=config.vocab_size,
        prompt=PROMPT,
        decoded=NUM_DECODED,
        length=len(ids),
        prefill=prefill.largest,
        prefill_same=prefill.num_same,
        decode=decode.largest,
        decode_same=decode.num_same,
        versions=", ".join(f"{name} {version(name).split('+')[0]}" for name in PACKAGES),
        files="\n".join(f"| `{name}` | {size:,} |" for name, size in sizes),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    print(f"prefill {prefill}\ndecode {decode}")
    return {
        "prefill_max_abs_error": prefill.largest,
        "decode_max_abs_error": decode.largest,
        "num_greedy_tokens": NUM_DECODED,
        "num_greedy_tokens_equal": decode.num_same,
    }


def main() -> None:
    """Exports, checks, and writes the card."""
    parser = argparse.ArgumentParser(description="Exports and checks the shipped model.")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "shakespeare")
    parser.add_argument("--out", type=Path, default=HERE / "shakespeare-onnx")
    args = parser.parse_args()
    build(args.checkpoint, args.out)
    parity = write_card(args.checkpoint, args.out)
    provenance = Provenance(
        producer="onnxruntime_genai.models.builder",
        versions={name: version(name).split("+")[0] for name in PACKAGES},
        source="models/shakespeare",
        source_sha256=sha256_of(args.checkpoint / "model.safetensors"),
        precision="fp32",
        parity=parity,
    )
    write_manifest(args.out, provenance)


if __name__ == "__main__":
    main()
