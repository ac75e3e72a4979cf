"""Where a decoder starts, what it is forced to say, and text on either side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import ortkv
import pytest
from ortkv.errors import ConfigError, InvalidRequest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encoder_decoder.references import FIXTURES, TOLERANCE, generator, rows


def copied(tmp_path: Path, name: str = "t5-optimum", **generation: Any) -> Path:
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_start_is_generation_configs_then_configs_then_bos(tmp_path: Path) -> None:
    folder = copied(tmp_path, decoder_start_token_id=5)
    source = rows("t5-optimum")[0].source
    assert ortkv.Generator(folder).start(source).tokens == [5]
    (folder / "generation_config.json").unlink()
    assert ortkv.Generator(folder).start(source).tokens == [0]
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 9}))
    assert ortkv.Generator(folder).start(source).tokens == [9]


@pytest.mark.parametrize("start", [64, -1, "0", [1], True])
def test_a_start_that_is_no_token_is_refused(tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match="decoder_start_token_id is"):
        ortkv.Generator(copied(tmp_path, decoder_start_token_id=start))


@pytest.mark.parametrize(
    ("settings", "forced"),
    [
        ({"forced_bos_token_id": 7}, [7]),
        ({"forced_decoder_ids": [[1, 7], [2, 9]]}, [7, 9]),
        ({"forced_decoder_ids": [[1, None], [2, 9]]}, None),
    ],
)
def test_forced_tokens_are_generated(tmp_path: Path, settings: Any, forced: Any) -> None:
    """They count as new tokens, as in transformers, and what follows is greedy after them."""
    row = rows("t5-optimum")[0]
    forced = forced or [row.greedy[0], 9]
    started = ortkv.Generator(copied(tmp_path, decoder_start_token_id=0, **settings))
    found = started.generate_ids([row.source], max_new_tokens=8)[0]
    plain = generator("t5-optimum").start([0, *forced], source=row.source)
    assert found == forced + plain.generate_ids(max_new_tokens=8 - len(forced))


def test_tokens_suppressed_at_the_beginning_may_come_later() -> None:
    row = rows("t5-optimum")[0]
    first = row.greedy[0]
    found = generator("t5-optimum").generate_ids(
        [row.source], max_new_tokens=1, begin_suppress_tokens=[first]
    )
    order = np.argsort(row.logits[0])
    assert found == [[int(order[-2])]]
    assert int(order[-1]) == first
    sequence = generator("t5-optimum").start(row.source)
    later = sequence.generate_ids(max_new_tokens=6, begin_suppress_tokens=[0, *found[0]])
    assert later == row.greedy[:6]


def test_a_forced_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"found token ids \[64\]"):
        generator("t5-optimum").generate_ids([[4]], max_new_tokens=2, forced_bos_token_id=64)


@pytest.mark.parametrize("value", [3, [3], [[1]], [[1, 2, 3]], [[1.5, 2]], [[1, -1]], "12"])
def test_malformed_forced_ids_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="forced_decoder_ids"):
        generator("t5-optimum").defaults.updated(forced_decoder_ids=value)


def with_tokenizer(folder: Path) -> Path:
    """Words w4, w5, ...; a whole text ends in </s>, as T5's does."""
    words = {"</s>": 1} | {f"w{i}": i for i in range(3, 64)}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_text_goes_to_the_encoder_and_comes_from_the_decoder(tmp_path: Path) -> None:
    folder = with_tokenizer(copied(tmp_path, decoder_start_token_id=0))
    by_text = ortkv.Generator(folder)
    ids = by_text.generate_ids([[4, 9, 33, 1], [7, 8, 1]], max_new_tokens=5)
    texts = by_text.generate(["w4 w9 w33", "w7 w8"], max_new_tokens=5)
    assert texts == [by_text.text.decode(row) for row in ids]
    assert "".join(by_text.stream("w4 w9 w33", max_new_tokens=5)) == texts[0]
    started = by_text.start("w5 w6", source="w4 w9 w33")
    assert started.tokens == [0, 5, 6]
    expected = by_text.start([0, 5, 6], source=[4, 9, 33, 1]).logits
    np.testing.assert_allclose(started.logits, expected, rtol=0, atol=TOLERANCE)
    assert started.extend("w7").tokens == [0, 5, 6, 7]
