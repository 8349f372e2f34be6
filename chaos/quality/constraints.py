"""Instructions whose keeping can be checked by a program, and the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from chaos.prompts import Item

Check = Callable[[str], bool]


@dataclass(frozen=True)
class Constraint:
    """One instruction, word for word, what a reply must be to have followed it, and a reply that has."""

    name: str
    instruction: str
    check: Check
    example: Callable[[Item], str]


def words_at_most(count: int) -> Check:
    """Check that a reply has words, but no more than `count`."""
    return lambda reply: 0 < len(reply.split()) <= count


def lower_case(reply: str) -> bool:
    """Check that a reply has letters and no capital among them."""
    return reply == reply.lower() and reply != reply.upper()


def upper_case(reply: str) -> bool:
    """Check that a reply has letters and all are capitals."""
    return reply == reply.upper() and reply != reply.lower()


def includes(word: str) -> Check:
    """Check that a reply holds a word, in whatever case."""
    pattern = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    return lambda reply: bool(pattern.search(reply))


def starts_with(text: str) -> Check:
    """Check how a reply begins, in whatever case."""
    return lambda reply: reply.strip().casefold().startswith(text.casefold())


def ends_with(text: str) -> Check:
    """Check how a reply ends, marks and case aside."""
    return lambda reply: reply.strip().rstrip(".!\"'").casefold().endswith(text.casefold())


def bullets(count: int) -> Check:
    """Check that every line of a reply is a bullet, and that there are `count`."""

    def check(reply: str) -> bool:
        lines = [line.strip() for line in reply.splitlines() if line.strip()]
        return len(lines) == count and all(re.match(r"[-*•] ?\S", line) for line in lines)

    return check


def json_with(key: str) -> Check:
    """Check that a reply is one JSON object with `key`, and nothing around it but a code fence."""

    def check(reply: str) -> bool:
        inner = re.sub(r"^```(?:json)?\s*|\s*```$", "", reply.strip())
        try:
            value = json.loads(inner)
        except ValueError:
            return False
        return isinstance(value, dict) and key in value

    return check


CONSTRAINTS = (
    Constraint("words", "Answer with at most four words.", words_at_most(4), lambda item: item.answers[0]),
    Constraint(
        "lower",
        "Write your whole answer in lower case letters, without any capitals.",
        lower_case,
        lambda item: _fact(item).lower(),
    ),
    Constraint(
        "upper", "Write your whole answer in CAPITAL LETTERS.", upper_case, lambda item: _fact(item).upper()
    ),
    Constraint(
        "include",
        "Use the word passage in your answer.",
        includes("passage"),
        lambda item: f"The passage says: {_fact(item)}",
    ),
    Constraint(
        "begin",
        "Begin your answer with the word Answer.",
        starts_with("answer"),
        lambda item: f"Answer: {item.answers[0]}.",
    ),
    Constraint(
        "end",
        "End your answer with the words THE END.",
        ends_with("the end"),
        lambda item: f"{_fact(item)} THE END.",
    ),
    Constraint(
        "bullets",
        "Answer with exactly two bullet points, each beginning with a dash.",
        bullets(2),
        lambda item: f"- {item.answers[0]}\n- {_fact(item)}",
    ),
    Constraint(
        "json",
        'Answer with a JSON object that has the one key "answer".',
        json_with("answer"),
        lambda item: json.dumps({"answer": item.answers[0]}),
    ),
)


def _fact(item: Item) -> str:
    return item.sentences[item.answer_at]
