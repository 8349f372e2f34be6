from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.sentence import FirstSentence


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        (["Paris", " is", " it", ".", " And"], 4),
        (["Pi is 3", ".", "14", "!"], 4),
        (["\n\n", "A", "\n", "B"], 3),
        (["no end"], None),
        (["Yes.", "No"], None),
        (["Yes!\nNo"], 1),
        ([], None),
    ],
)
def test_ends(chunks: list[str], tokens: int | None) -> None:
    sentence = FirstSentence()
    found = [n for chunk in chunks if (n := sentence.push(chunk, 1)) is not None]
    last = sentence.finish()
    assert (found + ([last] if last is not None else [])) == ([] if tokens is None else [tokens])


@given(st.lists(st.text("ab.!? \n", max_size=4), max_size=12))
def test_chunking_changes_nothing(chunks: list[str]) -> None:
    """One token a character: the answer is the offset just after the mark, however the text is cut."""
    text = "".join(chunks)
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s|$)", text)]
    ends += [m.end() for m in re.finditer("\n", text) if text[: m.start()].strip()]
    whole = FirstSentence()
    found = [n for char in text if (n := whole.push(char, 1)) is not None]
    last = whole.finish()
    assert [*found, *([last] if last is not None else [])] == ([min(ends)] if ends else [])
    cut = FirstSentence()
    hits = [n for chunk in chunks if (n := cut.push(chunk, len(chunk))) is not None]
    tail = cut.finish()
    hits += [tail] if tail is not None else []
    assert len(hits) == bool(ends)
    if ends:
        lengths = [0]
        for chunk in chunks:
            lengths.append(lengths[-1] + len(chunk))
        assert hits[0] == min(n for n in lengths if n >= min(ends))
