"""Contradicts a statement without knowing any answer: swaps a number, a name or a listed word for another
of its class, else negates. Deterministic in its seed."""

from __future__ import annotations

import random
import re

# Classes of words that can stand for each other. A match is swapped within its class.
_CLASSES: tuple[tuple[str, ...], ...] = (
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    (
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
        "November", "December",
    ),
    ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "grey", "pink"),
    ("spring", "summer", "autumn", "winter"),
    ("north", "south", "east", "west"),
    (
        "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "twenty", "thirty", "forty", "fifty",
    ),
)  # fmt: skip
_NAMES = (
    "Osterholm", "Quillford", "Bramwick", "Tessaly", "Varnholt", "Lindqvar", "Perrowell", "Sundermoor",
    "Kestelby", "Ardenholt",
)  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)")
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b[A-Z][^\W\d_]+(?:\s+[A-Z][^\W\d_]+)*")
_BE = re.compile(r"\b(is|are|was|were|has|had|can|will)\b(?! not\b)")


def contradict(sentence: str, keep: str, seed: int) -> str | None:
    """Return the sentence with one fact changed, None when it holds nothing that could be.

    Names and numbers that occur in `keep` (the question) identify the subject and stay.
    """
    rng = random.Random(seed)
    for match in reversed(list(_NUMBER.finditer(sentence))):
        if match.group() not in keep:
            return _swap(sentence, match, _other_number(match.group(), rng))
    for words in _CLASSES:
        pattern = re.compile(rf"\b(?:{'|'.join(words)})\b")
        for match in pattern.finditer(sentence):
            if match.group() not in keep:
                return _swap(sentence, match, rng.choice([word for word in words if word != match.group()]))
    for match in reversed(list(_NAME.finditer(sentence))):
        if match.group() not in keep:
            return _swap(sentence, match, rng.choice([name for name in _NAMES if name != match.group()]))
    return _BE.sub(r"\1 not", sentence, count=1) if _BE.search(sentence) else None


def _swap(sentence: str, match: re.Match[str], word: str) -> str:
    return sentence[: match.start()] + word + sentence[match.end() :]


def _other_number(text: str, rng: random.Random) -> str:
    """Return another number of the same shape: as many digits, the same marks, no new leading zero."""
    while True:
        digits = [rng.choice("123456789") if char.isdigit() else char for char in text]
        if digits != list(text):
            return "".join(digits)
