"""Quality probes: is the answer right, when the right answer is known? Knows nothing of faults.

Free answers are judged on their first sentence: what a small model rambles on is not the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from chaos.faults.text import sentences
from chaos.prompts.item import Item

_ABSTAIN = re.compile(
    r"\b(?:(?:does|do|did|is|are|was|were)(?: not|n['’]t) (?:\w+ )?"
    r"(?:mention|say|state|specif|provide|given|known|include|contain)\w*"
    r"|not (?:mentioned|specified|stated|provided|given|known)|no (?:mention|information)|unknown"
    r"|(?:can|could)(?:not| not|n['’]t) (?:be )?(?:determine|answer|find|tell)\w*"
    r"|i (?:do not|don['’]t) know)\b",
    re.IGNORECASE,
)


class Verdict(msgspec.Struct, frozen=True):
    """What a probe says of one reply. `abstained`: it said that it does not know."""

    correct: bool
    abstained: bool


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """A share of correct replies with its 95 % Wilson interval; all null when there were none."""

    total: int
    correct: int
    rate: float | None
    low: float | None
    high: float | None


def normalise(text: str) -> str:
    """Return the text lower-case, with single spaces, without marks and without commas in numbers."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold())
    return " ".join(re.sub(r"[^\w\s-]", " ", text).split())


def first_sentence(text: str) -> str:
    """Return the first sentence of a reply."""
    spans = sentences(text)
    return text[slice(*spans[0])] if spans else ""


def judge(item: Item, reply: str) -> Verdict:
    """Judge a reply, given without the prefill that it continues."""
    if item.check == "format":
        return Verdict(_card_matches(item, reply), bool(_ABSTAIN.search(reply)))
    head = first_sentence(reply)
    words = f" {normalise(head)} "
    abstained = bool(_ABSTAIN.search(head))
    if item.check == "abstain":
        return Verdict(abstained, abstained)
    return Verdict(all(f" {normalise(answer)} " in words for answer in item.answers), abstained)


def accuracy(verdicts: Iterable[Verdict]) -> Accuracy:
    """Return the share of correct verdicts with its interval."""
    found = list(verdicts)
    return proportion(sum(verdict.correct for verdict in found), len(found))


def proportion(correct: int, total: int, z: float = 1.959964) -> Accuracy:
    """Return a share with its Wilson score interval."""
    if total == 0:
        return Accuracy(total=0, correct=0, rate=None, low=None, high=None)
    rate = correct / total
    centre = rate + z * z / (2 * total)
    spread = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return Accuracy(total=total, correct=correct, rate=rate, low=max(0.0, low), high=min(1.0, high))


def _card_matches(item: Item, reply: str) -> bool:
    """Check every line of a card: its key, where the prefill has not given it, and its value."""
    lines = (item.messages[-1]["content"] + reply).strip().splitlines()
    keys = _keys(item.messages[1]["content"])
    if len(lines) < len(keys):
        return False
    for key, answer, line in zip(keys, item.answers, lines, strict=False):
        found, _, value = line.partition(":")
        if normalise(found) != key or normalise(answer) not in normalise(value):
            return False
    return True


def _keys(card: str) -> Sequence[str]:
    return [line.partition(":")[0] for line in card.splitlines()]
