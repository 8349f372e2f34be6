"""TextStream against a naive reading of the whole text."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import TextStream


class Pieces:
    """A tokenizer whose token i is the i-th piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def reference(data: bytes, stop: list[str]) -> tuple[str, bool]:
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


texts = st.text(alphabet="ab<é日🎼", max_size=24)
stops = st.lists(st.text(alphabet="ab<é日🎼", min_size=1, max_size=4), max_size=4)


@given(texts, stops, st.lists(st.integers(0, 96)), st.lists(st.integers(0, 30)))
def test_any_split_gives_the_text_of_the_whole(
    text: str, stop: list[str], cuts: list[int], calls: list[int]
) -> None:
    pieces = split(text.encode(), cuts)
    expected, stopped = reference(text.encode(), stop)
    stream = TextStream(Pieces(pieces), stop)
    edges = sorted({0, len(pieces), *(c for c in calls if c < len(pieces))})
    shown = ""
    for a, b in itertools.pairwise(edges):
        shown += stream.push(range(a, b))
        assert "\ufffd" not in shown
        assert expected.startswith(shown)
    shown += stream.finish()
    assert (shown, stream.stopped, stream.length) == (expected, stopped, len(expected))
    assert stream.finish() == ""


@given(texts, stops)
def test_what_is_held_back_is_exactly_what_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    stream = TextStream(Pieces([c.encode() for c in text]), stop)
    shown = ""
    for i in range(len(text)):
        shown += stream.push([i])
        if stream.stopped:
            break
        held = text[len(shown) : i + 1]
        possible = [k for k in range(i + 2) for s in stop if k < len(s) and text[: i + 1].endswith(s[:k])]
        assert len(held) == max(possible, default=0)


@given(st.binary(max_size=24), st.lists(st.integers(0, 24)), stops)
def test_invalid_bytes_are_replaced_and_nothing_else_is_lost(
    data: bytes, cuts: list[int], stop: list[str]
) -> None:
    pieces = split(data, cuts)
    stream = TextStream(Pieces(pieces), stop)
    shown = "".join(stream.push([i]) for i in range(len(pieces))) + stream.finish()
    assert shown == reference(data, stop)[0]


def test_offsets_say_where_each_token_begins() -> None:
    stream = TextStream(Pieces([b"ab", "é".encode()[:1], "é".encode()[1:], b"c"]))
    assert stream.push(range(4)) == "abéc"
    assert stream.offsets == [0, 2, 2, 3]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(Pieces([]), [""])
