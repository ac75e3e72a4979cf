"""The state of a sequence, and the loop that lengthens one or many.

The cache holds the first ``past_len`` of a sequence's tokens. Tokens beyond that (a prompt
not yet run, the token chosen last) are run when scores are next needed, so no verb can
leave a token out of the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from ortkv.cache import Cache
from ortkv.decoder import Decoder
from ortkv.encoder import encode
from ortkv.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    OrtkvError,
    TokenizerMissing,
    UnsupportedModel,
)
from ortkv.sampling import choose
from ortkv.schema import takes_source

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from ortkv.decoder import LoadedGraph
    from ortkv.encoder import Encoded, EncoderGraph
    from ortkv.generation_config import GenerationConfig
    from ortkv.text import Text, TextStream

    SourceInput = str | Sequence[int] | NDArray[Any]
    """What an encoder reads: text, token ids, or features [size, frames] of floats."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What every sequence of one model shares. ``text`` is an error where there is no tokenizer.

    ``decoder_start``: the token that a decoder with an encoder starts from, where it is stated.
    """

    graph: LoadedGraph
    text: Text | TokenizerMissing
    defaults: GenerationConfig
    context_length: int | None
    decoder_start: int | None = None

    @property
    def takes_source(self) -> bool:
        """Whether the decoder looks at an encoder's output."""
        return takes_source(self.graph.schema)

    def require_encoder(self) -> EncoderGraph:
        """The encoder's graph.   Raises: UnsupportedModel where the folder has none."""
        if self.graph.encoder is None:
            of_encoder = ("encoder_states", "encoder_mask")
            helpers = [h.name for h in self.graph.schema.helpers if h.kind in of_encoder]
            pasts = [e.past for e in self.graph.schema.entries if e.update == "constant"]
            raise UnsupportedModel(
                f"the decoder takes {', '.join(map(str, [*helpers, *pasts][:2]))}, which an "
                "encoder makes, and there is none: expected encoder_model.onnx (or encoder.onnx) "
                "beside the decoder. Export the model with its encoder."
            )
        return self.graph.encoder

    def require_decoder_start(self) -> int:
        """The token a decoder starts from.   Raises: InvalidRequest where the model says none."""
        if self.decoder_start is None:
            raise InvalidRequest(
                "the model's JSON has no decoder_start_token_id: expected one in "
                "generation_config.json or config.json. Add it, or start the decoder yourself: "
                "start(decoder_ids, source=...)."
            )
        return self.decoder_start

    def encoded(self, source: SourceInput) -> Encoded:
        """What the encoder makes of one source.

        Raises: InvalidRequest where it does not take it; UnsupportedModel without an encoder.
        """
        encoder = self.require_encoder()
        if not encoder.schema.takes_features and not isinstance(source, np.ndarray):
            is_text = isinstance(source, str)
            source = (
                self.require_text().encode(source, first=True) if is_text else _token_ids(source)
            )
        return encode(encoder, cast("NDArray[Any]", source), self.graph.schema.entries)

    def require_text(self) -> Text:
        """The tokenizer.   Raises: TokenizerMissing."""
        if isinstance(self.text, TokenizerMissing):
            # A fresh one each time: an exception raised again grows by a traceback.
            raise TokenizerMissing(str(self.text)) from self.text.__cause__
        return self.text


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """One token the loop chose. ``text``: what may be shown now; '' where none was asked for."""

    row: int
    token: int
    text: str


class SequenceState:
    """One sequence: its tokens, its cache, its random numbers. Not for two threads at once.

    With an encoder the tokens are the decoder's, and what was encoded stays the sequence's.
    """

    def __init__(
        self,
        model: LoadedModel,
        decoder: Decoder | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> None:
        self._model = model
        self._encoded = encoded
        self._decoder = decoder or Decoder(model.graph, model.graph.new_cache(encoded))
        self._tokens: list[int] = []
        self._scores: NDArray[np.float32] | None = None
        self._random = np.random.default_rng()
        self._num_changes = 0
        self.finish_reason: str | None = None
        """Why the last generation ended: 'eos', 'stop_string' or 'length'; None while it runs."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated ids, all of them (a copy)."""
        return list(self._tokens)

    @property
    def past_len(self) -> int:
        """How many of the tokens the cache holds."""
        return self._decoder.cache.past_len

    @property
    def cache(self) -> Cache:
        """The sequence's cache, for reading. Aliases: changes with the sequence."""
        return self._decoder.cache

    @property
    def logits(self) -> NDArray[np.float32]:
        """[vocab_size] float32, a copy: the scores of the token that comes next."""
        return self.scores().copy()

    def scores(self) -> NDArray[np.float32]:
        """As ``logits``.   Aliases: valid until the sequence changes; copy to keep.

        Changes: the cache, by the tokens it did not hold yet.
        """
        if self._scores is None or self.past_len < len(self._tokens):
            if not self._tokens:
                raise InvalidRequest("the sequence is empty and scores no token: extend it first.")
            self._scores = None
            start = min(self.past_len, len(self._tokens) - 1)
            if start < self.past_len:
                start = self._decoder.cache.truncate(start)
            try:
                self._scores = self._decoder.prefill(self._tokens[start:])
            except OrtkvError:
                raise
            except BaseException:
                # An interrupt may fall while the run is being bound: a new binding is safe.
                self.release()
                raise
        return self._scores

    def extend(self, prompt: str | Sequence[int]) -> SequenceState:
        """Add text or token ids to the end, and run them. Returns: this sequence.

        Raises: InvalidRequest for ids outside the vocabulary; ContextLengthExceeded. The
        sequence is then as it was before.
        """
        new = self._ids(prompt)
        before = len(self._tokens)
        self._check_room(new, before)
        self._append(new)
        try:
            self.scores()
        except BaseException:
            self._undo_to(before)
            raise
        return self

    def rewind(self, length: int) -> SequenceState:
        """Keep the first ``length`` tokens. Returns: this sequence.

        Raises: InvalidRequest for a length it does not have; OutOfMemory. The sequence is then
        as it was before.
        """
        if not _is_integer(length) or not 0 <= length <= len(self._tokens):
            raise InvalidRequest(
                f"cannot rewind to {length!r} tokens: expected an integer from 0 to "
                f"{len(self._tokens)}, the tokens that the sequence has."
            )
        if length < self.past_len:
            # Before the tokens: stopped in between, the cache holds none but the sequence's own.
            self._scores = None
            self._decoder.cache.truncate(length)
        if length < len(self._tokens):
            self._num_changes += 1
            del self._tokens[length:]
        return self

    def become(self, tokens: Sequence[int]) -> SequenceState:
        """Hold these tokens instead, keeping the cache of the common start. Returns: itself.

        Raises: as ``extend``. The sequence is then as it was before.
        """
        ids = self._ids(tokens)
        if not ids:
            raise InvalidRequest("no token ids were given: expected at least one.")
        old = self._tokens
        pairs = zip(old, ids, strict=False)
        shorter = min(len(old), len(ids))
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        self._check_room(ids[common:], common)
        dropped = old[common:]
        self.rewind(common)
        try:
            return self.extend(ids[common:])
        except BaseException:
            # The cache holds the common start alone; the rest is run when scores are needed.
            self._append(dropped)
            raise

    def fork(self) -> SequenceState:
        """An independent twin: same tokens, cache and random numbers to come."""
        twin = SequenceState(self._model, self._decoder.fork(), encoded=self._encoded)
        twin._tokens = list(self._tokens)
        twin._scores = None if self._scores is None else self._scores.copy()
        twin._random = copy.deepcopy(self._random)
        return twin

    def generate(self, **settings: object) -> str:
        """Add tokens by the model's settings and these. Returns: their text."""
        return "".join(self.stream(**settings))

    def generate_ids(self, **settings: object) -> list[int]:
        """Add tokens by the model's settings and these. Returns: the new ids."""
        config = self._model.defaults.updated(**settings)
        return [emitted.token for emitted in decode([self], config, text=False)]

    def stream(self, **settings: object) -> Iterator[str]:
        """As ``generate``, in pieces as they are generated, each of whole characters."""
        config = self._model.defaults.updated(**settings)
        self._model.require_text()
        return (e.text for e in decode([self], config, text=True) if e.text)

    def __repr__(self) -> str:
        cache = self._decoder.cache
        entry = cache.schema.entries[0]
        return (
            f"SequenceState(tokens {len(self._tokens)}, kv {self.past_len}, "
            f"{entry.layout} {entry.dtype}, {cache.num_bytes / 2**20:.1f} MiB)"
        )

    def seed(self, seed: int | None) -> None:
        """Start the random numbers from a seed; None changes nothing."""
        if seed is not None:
            self._random = np.random.default_rng(seed)

    def add_choice(
        self, scores: NDArray[np.float32], num_new: int, config: GenerationConfig
    ) -> int:
        """Choose the next token by its scores [vocab_size] and add it; or that which is forced."""
        length = len(self._tokens)
        token = config.forced_token(length)
        if token is None:
            earlier = range(length - num_new, length)
            if all(config.forced_token(place) is not None for place in earlier):
                suppressed = config.suppress_tokens + config.begin_suppress_tokens
                config = replace(config, suppress_tokens=suppressed)
            token = choose(scores, self._tokens, num_new, config, self._random)
        self._check_known([token])
        self._append([token])
        return token

    def text_stream(self, config: GenerationConfig) -> TextStream:
        """A TextStream of what follows the sequence's tokens."""
        return self._model.require_text().stream(self._tokens, config.stop_strings)

    def room(self) -> int | None:
        """Tokens that still fit in the context; None where the model states no length."""
        limits = (self._model.context_length, self._model.graph.schema.capacity)
        stated = [limit for limit in limits if limit is not None]
        return min(stated) - len(self._tokens) if stated else None

    @property
    def num_changes(self) -> int:
        """How often tokens were added or dropped: tells a loop whether another had a hand in."""
        return self._num_changes

    @property
    def last_token(self) -> int:
        """The token added last."""
        return self._tokens[-1]

    def batch_key(self) -> object:
        """Sequences of one key may share a run."""
        schema = self._model.graph.schema
        if schema.fixed_batch == 1:
            return id(self)
        if schema.takes_ragged_rows:
            return None
        if self._encoded is None or schema.takes_ragged_sources:
            return len(self._tokens)
        return len(self._tokens), self._encoded.source_len

    def joined(self, sequences: Sequence[SequenceState]) -> Decoder:
        """A decoder over a copy of all their caches, one row each."""
        return Decoder(self._model.graph, Cache.joined([s.cache for s in sequences]))

    def release(self) -> None:
        """Free the cache's memory; the cache is computed again when the sequence is next used."""
        old, encoded = self._decoder.cache, self._encoded
        if encoded is None:
            cache = Cache(old.schema, old.device, source=old.source)
        else:
            cache = self._model.graph.new_cache(encoded)
        self._decoder = Decoder(self._model.graph, cache)
        self._scores = None

    def _append(self, new: Sequence[int]) -> None:
        self._num_changes += bool(new)
        self._tokens += new

    def _undo_to(self, length: int) -> None:
        """Drop the tokens after the first ``length``, even where the cache cannot be cut."""
        try:
            self.rewind(length)
        finally:
            del self._tokens[length:]

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self._text_ids(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not ids and not self._tokens:
            raise InvalidRequest(
                "the prompt is empty: expected text, or at least one token id. Start with the "
                "model's BOS token if there is nothing to say."
            )
        self._check_known(ids)
        return ids

    def _text_ids(self, prompt: str) -> list[int]:
        text = self._model.require_text()
        if self._encoded is None or self._tokens:
            return text.encode(prompt, first=not self._tokens)
        return [self._model.require_decoder_start(), *text.encode(prompt, first=False)]

    def _check_known(self, ids: Sequence[int]) -> None:
        width = self._model.graph.schema.vocab_size
        wrong = [i for i in ids if i < 0 or (width is not None and i >= width)]
        if wrong:
            raise InvalidRequest(
                f"found token ids {wrong[:5]}, which the model does not have: expected ids from 0 "
                f"to {(width or 2**31) - 1}. Use the model's own tokenizer."
            )

    def _check_room(self, new: Sequence[int], num_kept: int) -> None:
        limit = self._model.context_length
        if limit is not None and num_kept + len(new) > limit:
            raise ContextLengthExceeded(
                f"{num_kept + len(new)} tokens, of which {len(new)} are new, do not fit "
                f"in the model's context of {limit}: shorten the prompt."
            )


def start_sequence(
    model: LoadedModel, prompt: SourceInput, source: SourceInput | None = None
) -> SequenceState:
    """A new sequence after prefill.

    source: what the encoder reads; ``prompt`` is then the decoder's, text after the token it
    starts from, ids as they are. Without one, a model with an encoder takes ``prompt`` for it and
    its decoder starts from that token alone.
    Raises: InvalidRequest for a source where there is no encoder, and as ``extend``.
    """
    if not model.takes_source:
        if source is not None:
            raise InvalidRequest(
                "found a source for a decoder that looks at no encoder's output: expected the "
                "prompt alone. Put all text into the prompt."
            )
        return SequenceState(model).extend(cast("str | Sequence[int]", prompt))
    if source is None:
        first = [model.require_decoder_start()]
        return SequenceState(model, encoded=model.encoded(prompt)).extend(first)
    sequence = SequenceState(model, encoded=model.encoded(source))
    return sequence.extend(cast("str | Sequence[int]", prompt))


@dataclass(kw_only=True)
class _Row:
    """One sequence on its way through the loop."""

    index: int
    sequence: SequenceState
    stream: TextStream | None
    limit: int
    num_changes: int
    num_new: int = 0
    ended: bool = False

    def check_unchanged(self) -> None:
        """Raises: InvalidRequest where someone else changed the sequence since the last token."""
        if self.sequence.num_changes != self.num_changes:
            raise InvalidRequest(
                f"the sequence in row {self.index} was changed while its generation was under "
                "way: expected no extend, rewind or other generation until it ends. Close the "
                "generation first, or change a fork."
            )

    def advance(self, scores: NDArray[np.float32], config: GenerationConfig) -> Emitted:
        """Choose a token, and note whether it was the last.

        Raises: InvalidRequest where the sequence is no longer the one that was scored.
        """
        self.check_unchanged()
        token = self.sequence.add_choice(scores, self.num_new, config)
        self.num_changes = self.sequence.num_changes
        self.num_new += 1
        ended = token in config.eos_token_id
        text = "" if self.stream is None or ended else self.stream.push(token)
        reason = "eos" if ended else self._reason_to_stop()
        self.sequence.finish_reason = reason
        self.ended = reason is not None
        if self.stream is not None and self.ended:
            text += self.stream.finish()
        return Emitted(row=self.index, token=token, text=text)

    def _reason_to_stop(self) -> str | None:
        if self.stream is not None and self.stream.stopped:
            return "stop_string"
        return "length" if self.num_new >= self.limit else None


class _Batch:
    """Several sequences stepped as one. Changes: their own caches are given back."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        sequences = [row.sequence for row in rows]
        self._rows = list(rows)
        self._first: NDArray[np.float32] | None = np.stack([s.scores() for s in sequences])
        self._decoder = sequences[0].joined(sequences)
        for sequence in sequences:
            sequence.release()

    def scores(self, rows: Sequence[_Row]) -> NDArray[np.float32]:
        """[len(rows), vocab_size] float32: the scores after each row's last token."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if len(rows) < len(self._rows):
            self._decoder.cache.keep([self._rows.index(row) for row in rows])
            self._rows = list(rows)
        return self._decoder.step([row.sequence.last_token for row in rows])


def decode(
    sequences: Sequence[SequenceState], config: GenerationConfig, *, text: bool
) -> Generator[Emitted, None, None]:
    """Add tokens to every sequence until it ends. Yields: each token as it is chosen.

    text: whether to decode the tokens to text; stop strings need that, and turn it on.
    Raises: ContextLengthExceeded where a sequence has no room for a single token;
    InvalidRequest where one is changed by others before it ends.
    """
    with_text = text or bool(config.stop_strings)
    rows = [_row(i, sequence, config, with_text) for i, sequence in enumerate(sequences)]
    for group in _groups([row for row in rows if row.limit > 0]):
        yield from _decode_group(group, config)


def _row(index: int, sequence: SequenceState, config: GenerationConfig, with_text: bool) -> _Row:
    room = sequence.room()
    if room is not None and room <= 0 < config.max_new_tokens:
        num_tokens = len(sequence.tokens)
        raise ContextLengthExceeded(
            f"the sequence's {num_tokens} tokens fill the model's context of "
            f"{num_tokens + room}: no new token fits. Shorten the prompt, or rewind."
        )
    limit = config.max_new_tokens if room is None else min(config.max_new_tokens, room)
    sequence.seed(config.seed)
    sequence.finish_reason = None if limit else "length"
    stream = sequence.text_stream(config) if with_text else None
    return _Row(
        index=index,
        sequence=sequence,
        stream=stream,
        limit=limit,
        num_changes=sequence.num_changes,
    )


def _groups(rows: list[_Row]) -> list[list[_Row]]:
    """Rows that may share a run: all, or those of one length, or each alone."""
    groups: dict[object, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.sequence.batch_key(), []).append(row)
    return list(groups.values())


def _decode_group(rows: list[_Row], config: GenerationConfig) -> Iterator[Emitted]:
    batch = _Batch(rows) if len(rows) > 1 else None
    while rows:
        for row in rows:
            row.check_unchanged()
        scores = batch.scores(rows) if batch else [rows[0].sequence.scores()]
        for row, row_scores in zip(rows, scores, strict=True):
            yield row.advance(row_scores, config)
        rows = [row for row in rows if not row.ended]


def _token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise InvalidRequest(
            f"found a prompt of type {type(prompt).__name__}: expected a str, or a list of token "
            "ids. Decode bytes first."
        )
    return [_token_id(value) for value in cast("Iterable[object]", prompt)]


def _token_id(value: object) -> int:
    if not _is_integer(value):
        raise InvalidRequest(
            f"found {value!r} among the token ids: expected integers. For text, give a str."
        )
    return int(value)


def _is_integer(value: object) -> TypeGuard[int]:
    """An int or one of numpy's, but no bool, which Python counts among them."""
    return not isinstance(value, bool) and isinstance(value, Integral)
