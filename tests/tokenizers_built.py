"""Small tokenizers built in memory: byte-level BPE and metaspace with byte fallback."""

from pathlib import Path

from ortkv.folder import ModelFolder
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SPECIALS = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
            "<|end_header_id|>", "<|eot_id|>")  # fmt: skip
UNKNOWN = "<unk>"
CORPUS = ("the quick brown fox says hello to the user and the assistant\n\n", "naïve café 日本語")


def byte_level(*, merges: bool = True, added: tuple[str, ...] = ()) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; without merges every byte is a token.

    ``added`` are tokens that are not special, as the runs of spaces of GPT-NeoX.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=340 if merges else 256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2 has it: '▁' for a space, and a byte token for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁he", "llo", "▁the", "re", *"abcdefghijklmnopqrstuvwxyz!.,"]
    merges = [
        ("h", "e"),
        ("▁", "he"),
        ("l", "l"),
        ("ll", "o"),
        ("t", "he"),
        ("▁", "the"),
        ("r", "e"),
    ]
    pieces += ["he", "ll", "the"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def folder_of(root: Path) -> ModelFolder:
    """A folder whose graph is of no interest."""
    return ModelFolder(root=root, graph=root / "model.onnx")
