"""Finding and reading a tokenizer, and refusing what is no text."""

import json
import sys
from pathlib import Path

import pytest
from ortkv.errors import ConfigError, InvalidRequest, TokenizerMissing
from ortkv.text import Text, load_text
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tokenizers_built import byte_level, folder_of, metaspace


def test_a_saved_tokenizer_is_read(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = load_text(folder_of(tmp_path))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    sample = "the quick café 🙂\n\n 日本"
    assert text.encode(sample, first=True) == reference.encode(sample)
    assert text.decode(text.encode(sample, first=True)) == sample
    assert text.num_tokens == len(reference)


def test_bos_comes_first_and_only_at_the_start() -> None:
    tokenizer = metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    text = Text(tokenizer)
    plain = text.encode("hello", first=False)
    assert plain
    assert 1 not in plain
    assert text.encode("hello", first=True) == [1, *plain]


def test_the_number_of_tokens_counts_added_ones_and_holes() -> None:
    """A vocabulary may skip ids; the logits must be wide enough for the highest."""
    assert Text(byte_level(merges=False, added=("  ",))).num_tokens == 256 + 6 + 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"not json",
        b"\xff\xfe\x00",
        b'{"version": "1.0", "model": {"type": "X"}}',
    ],
)
def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json cannot be read"):
        load_text(folder_of(tmp_path))


def test_a_folder_without_a_tokenizer_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"no tokenizer\.json: copy .*generate_ids"):
        load_text(folder_of(tmp_path))


def test_a_slow_tokenizer_without_transformers_gives_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerMissing, match="pip install transformers sentencepiece"):
        load_text(folder_of(tmp_path))


def test_a_slow_tokenizer_is_converted_as_transformers_does(tmp_path: Path) -> None:
    """GPT-2's vocab.json and merges.txt, from before there was a tokenizer.json."""
    byte_level().save(str(tmp_path / "whole.json"))
    model = json.loads((tmp_path / "whole.json").read_text())["model"]
    (tmp_path / "whole.json").unlink()
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    text = load_text(folder_of(tmp_path))
    assert text.encode("hello the user", first=False) == byte_level().encode("hello the user").ids


def test_a_tokenizer_beside_the_graph_wins_over_the_root(tmp_path: Path) -> None:
    root, onnx = tmp_path, tmp_path / "onnx"
    onnx.mkdir()
    metaspace().save(str(root / "tokenizer.json"))
    byte_level(merges=False).save(str(onnx / "tokenizer.json"))
    folder = folder_of(onnx).__class__(root=root, graph=onnx / "model.onnx")
    assert load_text(folder).num_tokens == 262


@pytest.mark.parametrize("prompt", ["\ud800", "ok \udfff", None, 5, b"bytes"])
def test_what_is_not_valid_text_is_refused(prompt: str) -> None:  # hostile 44
    with pytest.raises(InvalidRequest, match="not valid text"):
        Text(byte_level()).encode(prompt, first=True)


@pytest.mark.parametrize(
    "config",
    [{"bos_token": 5}, {"eos_token": {"lstrip": True}}, {"pad_token": []},
     {"chat_template": 7}, {"chat_template": [{"name": "default"}]}, {"chat_template": ["x"]}],
)  # fmt: skip
def test_a_malformed_tokenizer_config_is_a_config_error(tmp_path: Path, config: dict) -> None:
    """Each was a bare KeyError or TypeError."""  # hostile 31
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: {next(iter(config))}"):
        load_text(folder_of(tmp_path))
