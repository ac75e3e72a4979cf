"""Text comes out in whole characters, once, and never past a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortkv.text import Text

from tokenizers_built import byte_level, metaspace

SETTINGS = settings(max_examples=50, deadline=None, derandomize=True, database=None)
BYTES = Text(byte_level(merges=False))
MERGED = Text(byte_level())
META = Text(metaspace())
HARD_TEXTS = (
    "hello 🙂 there",
    "👩‍👩‍👧‍👦 family",  # joined by U+200D
    "e\u0301 is é, and ń̈ stacks",  # combining marks
    "日本語、한국어、ไทย",
    "مرحبا بالعالم",
    "a\u0000b\r\n\ttab",
    "🏳️‍🌈🇩🇪",
)


def pieces_of(text: Text, before: list[int], after: list[int], *stops: str) -> list[str]:
    stream = text.stream(before, stops)
    return [stream.push(token) for token in after] + [stream.finish()]


@pytest.mark.parametrize("text", [BYTES, MERGED, META], ids=["bytes", "merged", "metaspace"])
@pytest.mark.parametrize("whole", HARD_TEXTS)
def test_pieces_are_whole_characters_wherever_the_prompt_is_cut(
    text: Text, whole: str
) -> None:  # hostile 44
    """The cut may fall within a character; what was shown of the prompt is never shown again."""
    ids = text.encode(whole, first=False)
    assert text.decode(ids) == whole
    for cut in range(1, len(ids)):
        pieces = pieces_of(text, ids[:cut], ids[cut:])
        assert "\ufffd" not in "".join(pieces)
        # All of the prompt that is whole; byte fallback replaces a whole run for one open byte.
        starts = [text.decode(ids[:n]).rstrip("\ufffd") for n in range(cut + 1)]
        shown_before = max((start for start in starts if whole.startswith(start)), key=len)
        assert shown_before + "".join(pieces) == whole, f"cut at token {cut}"


@SETTINGS
@given(st.text(min_size=2, max_size=40), st.data())
def test_any_text_survives_any_cut(whole: str, data: st.DataObject) -> None:  # hostile 44
    """One token a byte: a character takes up to four of them."""
    raw = whole.encode()
    ids = BYTES.encode(whole, first=False)
    assert len(ids) == len(raw)
    cut = data.draw(st.integers(1, len(ids)))
    streamed = "".join(pieces_of(BYTES, ids[:cut], ids[cut:]))
    start = cut  # the character under the cut began at or before it
    while start and start < len(raw) and raw[start] & 0xC0 == 0x80:
        start -= 1
    wanted = raw[start:].decode()
    # A genuine U+FFFD at the very end may be one more byte's wait away.
    assert streamed == (wanted if not wanted.endswith("\ufffd") else wanted[: len(streamed)])


def test_a_character_is_shown_with_its_last_byte_and_not_before() -> None:
    ids = BYTES.encode("a🙂b", first=False)
    assert pieces_of(BYTES, ids[:1], ids[1:]) == ["", "", "", "🙂", "b", ""]


def test_a_prompt_that_ends_within_a_character_has_it_completed() -> None:
    ids = BYTES.encode("cafés", first=False)
    assert pieces_of(BYTES, ids[:4], ids[4:]) == ["é", "s", ""]


def test_a_long_prompt_that_ends_within_a_character_has_it_completed() -> None:
    """Only the last tokens of a prompt are looked at."""
    ids = BYTES.encode("x" * 100 + "日本", first=False)
    for cut in range(100, len(ids)):
        pieces = "".join(pieces_of(BYTES, ids[:cut], ids[cut:]))
        assert pieces == ("日本" if cut < 103 else "本")


def test_a_broken_end_of_the_prompt_is_not_repeated() -> None:
    """The prompt's own replacement character was shown a second time by the first piece."""
    ids = BYTES.encode("a\ufffd", first=False)
    after = BYTES.encode("bc", first=False)
    assert "".join(pieces_of(BYTES, ids, after)) == "bc"
    broken = BYTES.encode("h🙂", first=False)[:-1]
    assert "".join(pieces_of(BYTES, broken, after)) == "bc"


def test_bytes_that_are_no_character_are_replaced_and_the_rest_is_shown() -> None:
    ids = BYTES.encode("é", first=False)[:1] + BYTES.encode("ok", first=False)
    start = BYTES.encode("x", first=False)
    streamed = "".join(pieces_of(BYTES, start, ids))
    assert streamed == b"\xc3ok".decode(errors="replace") == BYTES.decode(ids)


def test_special_tokens_are_not_shown() -> None:
    end = BYTES.encode("<|im_end|>", first=False)
    ids = BYTES.encode("hi", first=False)
    assert len(end) == 1
    assert "".join(pieces_of(BYTES, ids, ids + end + ids)) == "hihi"
    assert BYTES.decode(ids + end) == "hi"


def test_a_metaspace_piece_keeps_the_space_it_starts_with() -> None:
    """Decoded on its own, '▁there' loses its space, and words run together."""
    before, after = META.encode("hello", first=False), META.encode("there", first=False)
    assert META.decode(after) == "there"
    assert "".join(pieces_of(META, before, after)) == " there"
    assert META.decode(before) + " there" == META.decode(before + after)


def test_a_metaspace_stream_without_a_prompt_starts_as_decode_does() -> None:
    ids = META.encode("hello there", first=False)
    assert "".join(pieces_of(META, [], ids)) == META.decode(ids) == "hello there"


@pytest.mark.parametrize("text", [BYTES, MERGED], ids=["bytes", "merged"])
@pytest.mark.parametrize(
    ("whole", "stops", "shown"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("one STO two ST", ["STOP"], None),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("say \n\nUser: hi", ["\nUser:", "\n\n"], "say "),
        ("x🙂y", ["🙂"], "x"),
        ("日本語", ["本語だ"], None),
        ("STOP", ["STOP"], ""),
        ("xyz", ["z", "yz", "xyz"], ""),
        ("no stop", [], None),
    ],
)
def test_a_stop_string_is_cut_and_a_near_miss_is_released(
    text: Text, whole: str, stops: list[str], shown: str | None
) -> None:
    """``shown`` None: no stop string comes, and nothing of the text may be lost."""
    stream = text.stream(text.encode("> ", first=False), stops)
    got = ""
    for token in text.encode(whole, first=False):
        got += stream.push(token)
        if stream.stopped:
            break
    assert stream.stopped == (shown is not None)
    got += stream.finish()
    assert got == (whole if shown is None else shown)


def test_nothing_of_a_stop_string_is_shown_while_it_may_still_come() -> None:
    stream = BYTES.stream(BYTES.encode(">", first=False), ["END!"])
    pieces = [stream.push(token) for token in BYTES.encode("aENx", first=False)]
    assert pieces == ["a", "", "", "ENx"]
    pieces = [stream.push(token) for token in BYTES.encode("EEND", first=False)]
    assert pieces == ["", "E", "", ""]
    assert stream.finish() == "END"
    assert not stream.stopped


@SETTINGS
@given(
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_stopping_in_a_stream_is_stopping_in_the_whole_text(whole: str, stops: list[str]) -> None:
    """The text is cut where, token by token, a stop string is first complete."""
    ends = [at for at in range(len(whole) + 1) if any(whole[:at].endswith(s) for s in stops)]
    seen = whole[: ends[0]] if ends else whole
    wanted = seen[: min((seen.find(s) for s in stops if s in seen), default=len(seen))]
    stream = BYTES.stream(BYTES.encode(">", first=False), stops)
    got = ""
    for token in BYTES.encode(whole, first=False):
        got += stream.push(token)
        if stream.stopped:
            break
    assert got + stream.finish() == wanted
    assert stream.stopped == bool(ends)


def test_broken_bytes_after_whole_ones_do_not_stop_a_byte_fallback_stream() -> None:
    """The decoder reads a run of bytes otherwise once one is broken: tokenizers' own stream
    raised 'Invalid prefix' there."""
    before, ids = META.encode("hello", first=False), META.encode("日本", first=False)
    after = [*ids[1:4], ids[4], *META.encode("z", first=False)[1:]]
    assert [META.decode([i]) for i in after[:3]] == ["\ufffd"] * 3
    assert "".join(pieces_of(META, before, after)) == "日\ufffdz"
    assert "".join(pieces_of(META, before + after[:4], after[4:])) == "z"
