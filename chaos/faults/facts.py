"""Contradicts a statement without knowing any answer: swaps a listed word, a number or a name for another
of its class, else negates. Deterministic in its seed."""

from __future__ import annotations

import random
import re

from chaos.faults.text import NAME

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
        "dog", "cat", "horse", "parrot", "rabbit", "hamster", "turtle", "goldfish", "lizard", "kitten",
        "giraffe", "tiger", "zebra", "lion", "camel", "penguin", "gorilla", "leopard", "panda", "jaguar",
    ),
    ("steel", "oak", "glass", "bamboo", "copper", "leather", "plastic", "marble", "cotton", "pine", "brass"),
    ("piano", "violin", "guitar", "flute", "trumpet", "cello", "clarinet", "harp", "drums", "organ", "banjo"),
    ("coal", "timber", "grain", "sugar", "coffee", "iron", "salt", "bananas", "cement", "rice", "bricks"),
    ("baker", "nurse", "pilot", "carpenter", "teacher", "farmer", "dentist", "tailor", "lawyer", "painter"),
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
_BE = re.compile(r"\b(is|are|was|were|has|had|can|will)\b(?! not\b)")


def contradict(sentence: str, keep: str, seed: int) -> str:
    """Return the sentence with one fact changed or, when none is found, denied.

    Names and numbers that occur in `keep` (the question) identify the subject and stay.
    """
    rng = random.Random(seed)
    for words in _CLASSES:
        for match in re.finditer(rf"\b(?:{'|'.join(words)})\b", sentence):
            if match.group() not in keep:
                return _swap(sentence, match, rng.choice([word for word in words if word != match.group()]))
    for match in reversed(list(_NUMBER.finditer(sentence))):
        if match.group() not in keep:
            return _swap(sentence, match, _other_number(match.group(), rng))
    for match in reversed(list(NAME.finditer(sentence))):
        if not any(word in keep for word in match.group().split()):
            return _swap(sentence, match, _other_name(match.group(), rng))
    if _BE.search(sentence):
        return _BE.sub(r"\1 not", sentence, count=1)
    return f"it is not true that {sentence}"


def _swap(sentence: str, match: re.Match[str], word: str) -> str:
    return sentence[: match.start()] + word + sentence[match.end() :]


def _other_name(name: str, rng: random.Random) -> str:
    """Return an invented name of as many words."""
    words = name.split()
    return " ".join(rng.sample([other for other in _NAMES if other not in words], min(len(words), 3)))


def _other_number(text: str, rng: random.Random) -> str:
    """Return another number of the same shape: as many digits, the same marks, a year of the same century."""
    head = 2 if re.fullmatch(r"1[0-9]\d\d|20\d\d", text) else 0
    while True:
        digits = [rng.choice("123456789") if char.isdigit() else char for char in text[head:]]
        if digits != list(text[head:]):
            return text[:head] + "".join(digits)
