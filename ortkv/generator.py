"""The façade: a path in, sequences and text out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from ortkv.certificate import certified
from ortkv.errors import InvalidRequest
from ortkv.loading import load
from ortkv.sequence import decode, start_sequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ortkv.certificate import Certificate
    from ortkv.generation_config import GenerationConfig
    from ortkv.loading import MapSource
    from ortkv.runtime import Provider
    from ortkv.schema import CacheSchema
    from ortkv.sequence import SequenceState, SourceInput
    from ortkv.text import Text


class Generator:
    """A model on an execution provider, ready to run.

    path: a folder, an .onnx file, or the id of a hub repository.
    provider: 'cpu', 'cuda', 'cuda:N', 'auto', or onnxruntime's own list of providers.
    threads: onnxruntime's; None takes every core the process may use.
    precision: which of a folder's graphs, by the end of its name: 'q4' for model_q4.onnx. None
    takes the one without, or the only one.
    kv_map: what cannot be derived of the cache, as a JSON file or a dict (docs/kv_map.md); by
    default what the folder's ortkv.json has under "kv_map".
    certify: prove the cache by a few runs, once a graph and provider (see ``ortkv.certificate``).

    Settings of ``generate``, ``generate_ids`` and ``stream`` have the names and meanings of
    ``ortkv.GenerationConfig``; the model's generation_config.json gives their defaults.

    A model with an encoder reads prompts with it (its source: text, token ids, or an array of
    features [size, frames]), and its decoder's tokens are what is generated.

    Raises: OrtkvError; see ``ortkv.errors`` for the kinds.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        provider: Provider = "cpu",
        threads: int | None = None,
        precision: str | None = None,
        certify: bool = True,
        kv_map: MapSource | None = None,
    ) -> None:
        loaded = load(path, provider=provider, threads=threads, precision=precision, kv_map=kv_map)
        self._model = loaded.model
        if self._model.takes_source:
            self._model.require_encoder()
        self._certificate = certified(loaded) if certify else None

    @property
    def certificate(self) -> Certificate | None:
        """What the load proved of the cache; None where it was not asked to."""
        return self._certificate

    @property
    def schema(self) -> CacheSchema:
        """The cache schema: how the graph's cache goes in and out."""
        return self._model.graph.schema

    @property
    def provider(self) -> str:
        """onnxruntime's name of the execution provider in use."""
        return self._model.graph.session.get_providers()[0]

    @property
    def text(self) -> Text:
        """The tokenizer and chat template.   Raises: TokenizerMissing."""
        return self._model.require_text()

    @property
    def defaults(self) -> GenerationConfig:
        """The model's own settings, as its generation_config.json has them."""
        return self._model.defaults

    @property
    def context_length(self) -> int | None:
        """The most tokens a sequence may have; None where the model does not say."""
        return self._model.context_length

    def start(self, prompt: SourceInput, source: SourceInput | None = None) -> SequenceState:
        """A new sequence after prefill of text or token ids.

        source: what the encoder reads, for a model that has one; ``prompt`` is then the decoder's,
        text after the token that it starts from, ids as they are. Without a source ``prompt`` is
        it, and the decoder starts from that token alone.
        """
        return start_sequence(self._model, prompt, source)

    @overload
    def generate(self, prompt: str | NDArray[Any], **settings: object) -> str: ...
    @overload
    def generate(self, prompt: list[str] | list[NDArray[Any]], **settings: object) -> list[str]: ...
    def generate(
        self, prompt: str | NDArray[Any] | list[str] | list[NDArray[Any]], **settings: object
    ) -> str | list[str]:
        """The continuation of a prompt, or of each of several run together.

        With an encoder: what the decoder makes of a source, text or features.
        """
        config = self.defaults.updated(**settings)
        if isinstance(prompt, str | np.ndarray):
            return self._generate([prompt], config)[0]
        return self._generate(_checked_rows(prompt, "such as ['One', 'Two']"), config)

    def generate_ids(
        self, prompts: Sequence[Sequence[int]] | Sequence[NDArray[Any]], **settings: object
    ) -> list[list[int]]:
        """New token ids for each of several prompts run together; needs no tokenizer.

        With an encoder: each prompt is a source, and the ids are the decoder's after its start.
        """
        config = self.defaults.updated(**settings)
        sequences = [
            self.start(prompt) for prompt in _checked_rows(prompts, "such as [[1, 2], [3]]")
        ]
        before = [len(sequence.tokens) for sequence in sequences]
        for _ in decode(sequences, config, text=False):
            pass
        return [s.tokens[n:] for s, n in zip(sequences, before, strict=True)]

    def stream(self, prompt: str | NDArray[Any], **settings: object) -> Iterator[str]:
        """As ``generate``, in pieces as they are generated, each of whole characters."""
        config = self.defaults.updated(**settings)
        sequence = self.start(prompt)
        return (e.text for e in decode([sequence], config, text=True) if e.text)

    def __repr__(self) -> str:
        schema = self.schema
        return f"Generator({schema.num_layers} layers, {self.provider}, {schema.logits_dtype})"

    def _generate(
        self, prompts: Sequence[str | NDArray[Any]], config: GenerationConfig
    ) -> list[str]:
        sequences = [self.start(prompt) for prompt in prompts]
        texts = [""] * len(sequences)
        for emitted in decode(sequences, config, text=True):
            texts[emitted.row] += emitted.text
        return texts


def _checked_rows(rows: object, expected: str) -> list[Any]:
    """The rows of a batch, arrays of ids as lists."""
    if isinstance(rows, np.ndarray):
        rows = list(cast("NDArray[Any]", rows))
    if not isinstance(rows, list | tuple) or not rows:
        found = "no prompts" if isinstance(rows, list | tuple) else f"a {type(rows).__name__}"
        raise InvalidRequest(
            f"found {found} in the place of a batch: expected a list of prompts, {expected}. Put a "
            "single prompt in a list."
        )
    for row in cast("list[object]", rows):
        if not isinstance(row, str | list | tuple | np.ndarray):
            raise InvalidRequest(
                f"found a {type(row).__name__} as a row of the batch: expected a list of prompts, "
                f"{expected}. Put a single prompt in a list."
            )
    return list(cast("list[Any]", rows))
