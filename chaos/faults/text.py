"""Plain-text anatomy shared by the prompt faults: paragraphs, sentences, words, the question.

Every cut is a span of the text itself, so that joining spans never changes a character.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import combinations
from typing import Any

Span = tuple[int, int]

_PARAGRAPH = re.compile(r"\n\s*\n")
# A sentence ends at its mark and closing quotes, or at a line break; an initial, an abbreviation or a
# decimal point is no end. Ideographic marks need no space after them.
_END = re.compile(
    r"(?:(?<!\b[A-Z])(?<!\b[A-Z]r)(?<!\b[A-Z]rs)[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+[」』”]*|\n)\s*"
)
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_PIECE = re.compile(r"\s*[^\W_]{1,6}|\s*\S|\s+")
_ENDING = re.compile(r"(?<=..)(?:es|ed|s|e)$")
_MONTH = r"(?:January|February|March|April|May|June|July|August|(?:Sept|Nov|Dec)ember|October)\b"
# What a question asks for, and how a sentence looks that could say it, but for the names in the question.
_CUES = (
    (re.compile(r"\b(?:when|year)\b", re.IGNORECASE), re.compile(r"\b\d{4}\b")),
    (
        re.compile(r"\bhow (?!long ago)\w+\b|\b(?:age|price|number|length)\b", re.IGNORECASE),
        re.compile(r"\d"),
    ),
    (
        re.compile(r"\b(?:where|city|town|country|station|port)\b", re.IGNORECASE),
        re.compile(
            rf"\b(?:in|at|from|to|of|near|is) (?!{_MONTH})[A-Z]\w+\b(?! [A-Z])|^[A-Z]\w+ (?:hosts|is)\b"
        ),
    ),
    (re.compile(r"\bwho(?:m|se)?\b|\bname of\b", re.IGNORECASE), re.compile(r"\b[A-Z]\w+ [A-Z]\w+")),
    (re.compile(r"\bmonth\b", re.IGNORECASE), re.compile(rf"\b{_MONTH}")),
)
_LABEL = re.compile(r"^\s*[^\W\d_]{1,12}:\s*")
_COMMON = """
about after also and are been before can could did does for from given had has have how into is its many much
passage please that the their them there these they this those was were what when where which who whom
question whose why will with would you your name say tell according
"""
_PLACE = re.compile(r"[^\w'’-]+")
#: A name inside a sentence.
NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b[A-Z][^\W\d_]+(?:\s+[A-Z][^\W\d_]+)*")
_STOP = frozenset(_COMMON.split())


def pieces(text: str) -> list[str]:
    """Cut a text into token-sized pieces without a tokenizer: at most six characters of one word, or one
    mark. Within about a tenth of the count of a byte-level BPE on English prose."""
    return _PIECE.findall(text)


def sentences(text: str) -> list[Span]:
    """Return the spans of the sentences, each with the space that follows it; they cover the text."""
    spans: list[Span] = []
    start = 0
    for match in _END.finditer(text):
        if text[start : match.end()].strip():
            spans.append((start, match.end()))
            start = match.end()
    if text[start:].strip() or (start < len(text) and not spans):
        spans.append((start, len(text)))
    elif spans:
        spans[-1] = (spans[-1][0], len(text))
    return spans


def question_start(text: str) -> int:
    """Return where the question begins: the last paragraph, or the last sentence of a lone one."""
    body = text.rstrip()
    breaks = list(_PARAGRAPH.finditer(body))
    if breaks:
        return breaks[-1].end()
    spans = sentences(body)
    return spans[-1][0] if spans else len(text)


def last_user(messages: list[dict[str, Any]]) -> int | None:
    """Return the index of the last message of a user (or of a text completion), None without one."""
    users = [index for index, message in enumerate(messages) if message["role"] in {"user", "prompt"}]
    return users[-1] if users else None


def label_end(text: str) -> int:
    """Return the length of a leading label such as `Question: `, 0 without one."""
    match = _LABEL.match(text)
    return match.end() if match else 0


def subject(passage: str, question: str) -> str | None:
    """Return what a question about a passage is about: its longest run of words that begins with a capital
    letter and occurs in the passage twice, else the passage's most frequent name; None without one.

    With its article, where the question has one.
    """
    words = [word for word in _PLACE.split(question) if word]
    runs = [
        (first, " ".join(words[first:last]))
        for first, last in combinations(range(1, len(words) + 1), 2)
        if words[first][:1].isupper()
    ]
    for first, run in sorted(runs, key=lambda found: -len(found[1])):
        if len(re.findall(rf"\b{re.escape(run)}\b", passage)) > 1:
            return f"the {run}" if words[first - 1] == "the" else run
    names = Counter(NAME.findall(passage))
    return names.most_common(1)[0][0] if names else None


def stems(text: str) -> set[str]:
    """Return the content words of a text, lower-case, without endings and cut to four letters."""
    words = (word.casefold() for word in _WORD.findall(text))
    return {
        _ENDING.sub("", word)[:4] for word in words if word not in _STOP and (len(word) > 2 or word.isdigit())
    }


def relevance(passages: list[str], question: str) -> list[float]:
    """Score each passage by the words it shares with the question; rare words count more.

    Knows nothing of the answer: a word that occurs in every passage (the subject's name) weighs nothing.
    """
    found = [stems(passage) for passage in passages]
    frequency = Counter(stem for stems_of_one in found for stem in stems_of_one)
    asked = stems(question)
    weight = {stem: math.log(1.05 * len(passages) / count) for stem, count in frequency.items()}
    cues = [sign for asks, sign in _CUES if asks.search(question)]
    named = re.compile("|".join(map(re.escape, NAME.findall(question))) or r"(?!)")
    return [
        sum(weight[stem] for stem in one & asked)
        + 0.4 * any(cue.search(named.sub("", passage)) for cue in cues)
        for one, passage in zip(found, passages, strict=True)
    ]
