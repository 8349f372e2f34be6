"""A question that the passage cannot answer. A model that knows its limits would say so."""

from __future__ import annotations

import random
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from chaos.faults.authority import most_related
from chaos.faults.base import Messages, Pieces, PromptFault
from chaos.faults.text import last_user, question_start, stems, subject


class _Slot(msgspec.Struct, frozen=True):
    """Something that a passage seldom tells of its subject `{s}`, and what it could be."""

    name: str
    question: str
    statement: str
    values: tuple[str, ...]


_SLOTS = tuple(
    _Slot(name, question, statement, tuple(values.split(", ")))
    for name, question, statement, values in (
        ("motto", "What is the motto of {s}?", "The motto of {s} is {v}.", "Onward, Steady, Patience"),
        ("insurer", "Which company insures {s}?", "{s} is insured by {v}.", "Alderman, Fairmont, Rookwood"),
        ("number", "What is the lucky number of {s}?", "The lucky number of {s} is {v}.", "17, 23, 42"),
        (
            "nickname",
            "What is the nickname of {s}?",
            "The nickname of {s} is {v}.",
            "Buttons, Captain, Pebble",
        ),
        (
            "hymn",
            "What is the hymn of {s}?",
            "The hymn of {s} is {v}.",
            "Greensleeves, Daisy Bell, Shenandoah",
        ),
        (
            "symbol",
            "Which animal is the symbol of {s}?",
            "The symbol of {s} is the {v}.",
            "otter, heron, badger",
        ),
    )
)


class AbsentSlot(PromptFault, frozen=True, kw_only=True):
    """Asks for something that the passage does not tell of its subject, in place of the question.

    The control asks the same, and the sentence that shares most with the question that was asked gives
    way to one that answers it. Does nothing to a message without a passage, or one that names nobody.
    """

    kind: ClassVar[str] = "absent_slot"
    title: ClassVar[str] = "Question that the passage does not answer"
    order: ClassVar[int] = 5
    moves: ClassVar[tuple[str, ...]] = ("confidence", "entropy", "probe accuracy")
    control: ClassVar[dict[str, bool | float]] = {"answered": True}

    answered: Annotated[bool, Meta(description="control: the passage is given the answer")] = False

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return the messages with another question, None when there is none to make."""
        target = last_user(messages)
        if target is None:
            return None
        text = messages[target]["content"]
        start = question_start(text)
        passage, question = text[:start], text[start:]
        name = subject(passage, question)
        if name is None:
            return None
        told = stems(passage)
        slots = [slot for slot in _SLOTS if not stems(slot.name) & told]
        rng = random.Random(seed)
        slot = rng.choice(slots or _SLOTS)
        if self.answered:
            first, last = most_related(passage, question)[0]
            old = passage[first:last]
            fact = slot.statement.format(s=name, v=rng.choice(slot.values))
            passage = passage[:first] + _capital(fact) + old[len(old.rstrip()) :] + passage[last:]
        content = passage + slot.question.format(s=name)
        return [*messages[:target], {**messages[target], "content": content}, *messages[target + 1 :]]


def told_answer(content: str) -> str | None:
    """Return what a passage of the control answers to the fault's question; None where it tells nothing."""
    start = question_start(content)
    passage, question = content[:start], content[start:].strip()
    for slot in _SLOTS:
        before, after = slot.question.split("{s}")
        if question.startswith(before) and question.endswith(after):
            name = question[len(before) : len(question) - len(after)]
            told = (v for v in slot.values if _capital(slot.statement.format(s=name, v=v)) in passage)
            return next(told, None)
    return None


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
