"""Part of the context is lost before the model sees it.

`side` names what is **removed**: `prefix` keeps the tail, `suffix` the head, `middle` both ends. Only
message content is cut, by whole tokens or whole sentences; template markup does not exist yet. How much
goes: `ratio` of the units, or what exceeds `budget` tokens, whichever is more. At least one unit always
stays (two for `middle`). `needle` knows no place: it removes the sentences that share most with the
question, one unless the amount says more.

Presets: `prefix15` removes the first 15 %; `window` keeps the tail within 2,048
tokens and drops the first 30 % even where the text would have fitted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, chain, pairwise
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from chaos.faults.base import MAX_COUNT, Messages, Pieces, PromptFault
from chaos.faults.text import Span, last_user, question_start, relevance, sentences

PRESETS: dict[str, tuple[str, float, int]] = {
    "prefix15": ("prefix", 0.15, 0),
    "window": ("prefix", 0.3, 2048),
}


class Unit(msgspec.Struct, frozen=True):
    """A removable stretch of one message."""

    message: int
    span: Span
    tokens: int


class Truncation(PromptFault, frozen=True, kw_only=True):
    """Removes the chosen side of the passage (`reach` user) or of the whole conversation (context)."""

    kind: ClassVar[str] = "truncation"
    title: ClassVar[str] = "Context truncation by tokens or sentences"
    order: ClassVar[int] = 30
    moves: ClassVar[tuple[str, ...]] = ("confidence", "entropy", "lookback", "probe accuracy")
    control: ClassVar[dict[str, bool | float]] = {"spare_question": True}

    unit: Annotated[Literal["sentences", "tokens"], Meta(description="what is cut whole")] = "sentences"
    side: Annotated[
        Literal["prefix", "suffix", "middle", "needle"],
        Meta(description="what is removed; needle: the sentence that answers"),
    ] = "prefix"
    ratio: Annotated[float, Meta(ge=0, lt=1, description="fraction of the units removed")] = 0.0
    budget: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="tokens that may stay; 0: no window")] = 0
    preset: Annotated[
        Literal["", "prefix15", "window"], Meta(description="fixed numbers; replaces side, ratio, budget")
    ] = ""
    reach: Annotated[
        Literal["user", "context"], Meta(description="the last user message, or all of the conversation")
    ] = "user"
    keep_question: Annotated[bool, Meta(description="the last paragraph (or sentence) is never cut")] = True
    spare_question: Annotated[
        bool,
        Meta(description="control: drops as many tokens, of the sentences least related to the question"),
    ] = False

    def __post_init__(self) -> None:
        if self.side == "needle":
            if self.preset or self.unit == "tokens":
                raise ValueError("side needle removes whole sentences: leave unit and preset out")
        elif not (self.preset or self.ratio or self.budget):
            raise ValueError("give ratio, budget or preset: nothing would be removed")

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return the messages without the removed units; a message that loses everything goes too."""
        target = last_user(messages)
        if target is None:
            return None
        text = messages[target]["content"]
        question = question_start(text) if self.keep_question else len(text)
        units = self._units(messages, target, question, self.unit, pieces)
        whole = self._units(messages, target, question, "sentences", pieces)
        related = _by_relation(whole, messages, text[question_start(text) :])
        lost = self._chosen(related[::-1] if self.side == "needle" else units)
        if self.spare_question:
            lost = lost and _least_related(related, sum(unit.tokens for unit in lost))
        return _without(messages, lost) if lost else None

    def _units(self, messages: Messages, target: int, question: int, unit: str, pieces: Pieces) -> list[Unit]:
        """List what may be cut, in reading order. A last message of the assistant is a prefill: never cut."""
        found: list[Unit] = []
        for index, message in enumerate(messages):
            prefill = index == len(messages) - 1 and message["role"] == "assistant"
            if prefill or (self.reach == "user" and index != target):
                continue
            text = message["content"][:question] if index == target else message["content"]
            if unit == "sentences":
                found += [
                    Unit(index, span, len(pieces(text[slice(*span)].rstrip()))) for span in sentences(text)
                ]
            else:
                ends = accumulate(len(piece) for piece in pieces(text))
                found += [Unit(index, span, 1) for span in pairwise(chain([0], ends))]
        return found

    def _chosen(self, units: list[Unit]) -> list[Unit]:
        """Choose the units of the named side that have to go; a needle is at the front of its own order."""
        side, ratio, budget = PRESETS.get(self.preset, (self.side, self.ratio, self.budget))
        sums = [0, *accumulate(unit.tokens for unit in units)]

        def first(number: int) -> int:
            if side == "middle":
                return max(1, (len(units) - number) // 2)
            return len(units) - number if side == "suffix" else 0

        def tokens(number: int) -> int:
            return sums[first(number) + number] - sums[first(number)]

        most = max(0, len(units) - (2 if side == "middle" else 1))
        number = min(most, max(math.ceil(ratio * len(units) - 1e-9), side == "needle"))
        if budget:
            number = bisect_left(range(most), sums[-1] - budget, lo=number, key=tokens)
        return units[first(number) : first(number) + number]


def _by_relation(units: list[Unit], messages: Messages, question: str) -> list[Unit]:
    """Return sentences, the least related to the question first."""
    scores = relevance([messages[unit.message]["content"][slice(*unit.span)] for unit in units], question)
    return [units[index] for index in sorted(range(len(units)), key=lambda index: scores[index])]


def _least_related(related: list[Unit], tokens: int) -> list[Unit]:
    """Choose sentences of about `tokens` in all, in their order. The last one, the most related, stays."""
    chosen: list[Unit] = []
    total = 0
    for unit in related[:-1]:
        if chosen and abs(total + unit.tokens - tokens) > abs(total - tokens):
            break
        chosen.append(unit)
        total += unit.tokens
    return chosen


def _without(messages: Messages, lost: list[Unit]) -> Messages:
    """Return the messages with the lost spans cut out, in one piece each."""
    result: Messages = []
    for index, message in enumerate(messages):
        spans = [unit.span for unit in lost if unit.message == index]
        if not spans:
            result.append(message)
            continue
        text = message["content"]
        edges = [0, *(edge for span in sorted(spans) for edge in span), len(text)]
        kept = "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
        if kept.strip():
            result.append({**message, "content": kept})
    return result
