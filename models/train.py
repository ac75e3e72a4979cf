"""Trains the small Llama model that ships with the project, from a plain text file.

    python models/train.py --corpus tinyshakespeare.txt

The same corpus, flags, thread count and library versions give the same steps; floating-point
results differ between processors. Needs torch and transformers, never imported by ortkv.
"""

import argparse
import csv
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

EOS = "<|endoftext|>"
EOS_ID = 0
VOCAB_SIZE = 2048
BLOCK_LEN = 512
ROPE_THETA = 10000.0
PROMPTS = ("ROMEO:", "KING RICHARD III:", "First Citizen:", "JULIET:")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warmup to `peak`, then a cosine down to a twentieth of it at `num_steps`."""

    num_steps: int
    num_warmup: int
    peak: float

    def rate(self, step: int) -> float:
        """The learning rate of one step, counted from 0."""
        if step < self.num_warmup:
            return self.peak * (step + 1) / self.num_warmup
        progress = (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup)
        return self.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train_tokenizer(text: str) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens; `EOS` is token 0 and encode never adds it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def build_model() -> LlamaForCausalLM:
    """A Llama with grouped-query attention and tied embeddings, freshly initialised."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=BLOCK_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drops embeddings and residual branches while the model is in training mode.

    Llama has no residual dropout of its own, and the corpus is small enough to learn by heart.
    """

    def drop(module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, rate, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for name, module in model.named_modules():
        if name.endswith(("self_attn.o_proj", "mlp.down_proj")):
            module.register_forward_hook(drop)


def make_optimizer(model: LlamaForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99))


def crop(stream: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random crops of the stream and their next tokens.

    A tenth of the crops begin with `EOS`, so that a prompt that begins with it is familiar.

    Returns: inputs and targets, each [batch, BLOCK_LEN] int64.
    """
    starts = torch.randint(len(stream) - BLOCK_LEN, (batch,), generator=generator)
    blocks = torch.stack([stream[start : start + BLOCK_LEN + 1] for start in starts.tolist()])
    inputs, targets = blocks[:, :-1].clone(), blocks[:, 1:]
    inputs[torch.rand(batch, generator=generator) < 0.1, 0] = EOS_ID
    return inputs, targets


def loss_of(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: LlamaForCausalLM, stream: Tensor, batch: int) -> float:
    """Mean loss over the stream in consecutive blocks; the incomplete last block is left out."""
    num_blocks = (len(stream) - 1) // BLOCK_LEN
    inputs = stream[: num_blocks * BLOCK_LEN].view(num_blocks, BLOCK_LEN)
    targets = stream[1 : num_blocks * BLOCK_LEN + 1].view(num_blocks, BLOCK_LEN)
    model.eval()
    total = 0.0
    for part_in, part_out in zip(inputs.split(batch), targets.split(batch), strict=True):
        total += loss_of(model, part_in, part_out).item() * len(part_in)
    model.train()
    return total / num_blocks


def fit(
    model: LlamaForCausalLM, train: Tensor, val: Tensor, args: argparse.Namespace
) -> dict[str, Tensor]:
    """Trains for `args.steps` steps, or until `args.minutes` have passed.

    Returns: the weights with the lowest validation loss.
    Changes: model, `loss.csv` in `args.out`.
    """
    schedule = Schedule(num_steps=args.steps, num_warmup=args.warmup, peak=args.lr)
    optimizer = make_optimizer(model, args.weight_decay)
    generator = torch.Generator().manual_seed(args.seed)
    best_loss, best = math.inf, model.state_dict()
    losses: list[float] = []
    began = time.monotonic()
    with (args.out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", "train_loss", "val_loss", "tokens", "seconds"])
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
            loss = loss_of(model, *crop(train, args.batch, generator))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            late = time.monotonic() - began > args.minutes * 60
            done = step + 1
            if done % args.every and done != args.steps and not late:
                continue
            val_loss = validate(model, val, args.batch)
            train_loss, losses = sum(losses) / len(losses), []
            seconds = round(time.monotonic() - began)
            tokens = done * args.batch * BLOCK_LEN
            log.writerow([done, f"{train_loss:.4f}", f"{val_loss:.4f}", tokens, seconds])
            file.flush()
            print(f"{done} train {train_loss:.4f} val {val_loss:.4f} {seconds} s", flush=True)
            if val_loss < best_loss:
                best_loss = val_loss
                best = {name: value.clone() for name, value in model.state_dict().items()}
            if late:
                break
    return best


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the checkpoint, its configurations and the tokenizer.

    config.json names rope_theta both at the top, where older readers look, and under
    rope_parameters, where transformers 5 keeps it.
    """
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = ROPE_THETA
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": BLOCK_LEN,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
    }
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def words(text: str) -> list[str]:
    """The words of a text in lower case, apostrophes kept inside them."""
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, temperature: float) -> str:
    """The prompt and 400 generated tokens; temperature 0 is greedy."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    chosen = GenerationConfig(max_new_tokens=400, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    if temperature:
        chosen.update(do_sample=True, temperature=temperature, top_k=0)
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    out = generate(ids, attention_mask=torch.ones_like(ids), generation_config=chosen)
    return tokenizer.decode(out[0].tolist())


def report(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str) -> None:
    """Prints one sample and the share of generated words the corpus does not hold."""
    known = set(words(text))
    for temperature in (0.0, 0.8):
        samples = [sample(model, tokenizer, prompt, temperature) for prompt in PROMPTS]
        # The last word may be cut short by the token limit.
        found = [word for each in samples for word in words(each)[:-1]]
        strange = [word for word in found if word not in known]
        print(f"--- temperature {temperature}\n{samples[0]}\n---")
        print(f"non-words: {len(strange)} of {len(found)} ({len(strange) / len(found):.2%})")
        print(" ".join(sorted(set(strange))))


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description="Trains the shipped model.")
    here = Path(__file__).parent
    parser.add_argument("--corpus", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--out", type=Path, default=here / "shakespeare")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop early after these")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--every", type=int, default=300, help="steps between validations")
    parser.add_argument("--batch", type=int, default=2, help=f"crops of {BLOCK_LEN} tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Trains on the first nine tenths of the corpus, keeps the best weights, prints a sample."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    text = args.corpus.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    tokenizer = train_tokenizer(text[:cut])
    train, val = (torch.tensor(tokenizer.encode(part).ids) for part in (text[:cut], text[cut:]))
    model = build_model()
    print(f"{model.num_parameters()} parameters, {len(train)} + {len(val)} tokens", flush=True)
    add_dropout(model, args.dropout)
    model.load_state_dict(fit(model.train(), train, val, args))
    save(model.eval(), tokenizer, args.out)
    report(model, tokenizer, text)


if __name__ == "__main__":
    main()
