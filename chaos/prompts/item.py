"""One prompt with a known answer, and the splits it may come from."""

from __future__ import annotations

from typing import Any, Literal
from zlib import crc32

import msgspec

Split = Literal["calibration", "demo", "tuning", "test"]
SPLITS: tuple[Split, ...] = ("calibration", "demo", "tuning", "test")
SYSTEM = "Answer the question from the passage in one short sentence."
PREFILL = "According to the passage,"

# Whose third of names and values a split takes. `demo` and `tuning` share one: their families differ.
_THIRDS: dict[Split, int] = {"calibration": 0, "demo": 1, "tuning": 1, "test": 2}


class Absent(msgspec.Struct, frozen=True):
    """A question that the passage does not answer, and the `sentence` with the `answer` that would."""

    slot: str
    question: str
    sentence: str
    answer: str


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what is known of it.

    `sentences` are the passage's; `answer_at` indexes the one that holds the answer (the needle),
    `distractor_at` one that the question does not need. `answers` are all strings a correct reply
    contains, `check` says how `chaos.probes` judges it; `abstain` has none: the reply should say that
    the passage does not tell. `document` is the name by which a citation refers to the passage. The
    last message is an assistant prefill: the reply continues it. `chaos.prompts.twins` makes the
    item's twins.
    """

    id: str
    family: str
    split: Split
    slot: str
    route: str
    check: Literal["slot", "list", "format", "abstain"]
    messages: list[dict[str, Any]]
    question: str
    answers: tuple[str, ...]
    sentences: tuple[str, ...]
    answer_at: int
    distractor_at: int
    document: str
    absent: Absent | None = None
    max_tokens: int = 24

    @property
    def passage(self) -> str:
        """Return the passage's sentences in one paragraph."""
        return " ".join(self.sentences)


def prompt(passage: str, question: str, prefill: str = PREFILL) -> list[dict[str, Any]]:
    """Return the messages that ask a question about a passage and begin the reply."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{passage}\n\n{question}"},
        {"role": "assistant", "content": prefill},
    ]


def third(values: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """Return the split's own third of the values."""
    return values[_THIRDS[split] :: 3]


def wording(statement: int, split: Split) -> int:
    """Return which of three wordings a question has beside a statement's: no pair occurs in two thirds."""
    return (statement + _THIRDS[split]) % 3


def document(name: str) -> str:
    """Return what citations call the passage of the item of this name, such as `K-117`."""
    return f"K-{100 + crc32(name.encode()) % 900}"


def upper_first(text: str) -> str:
    """Return the text with a capital first letter, for a sentence that begins with a value."""
    return text[:1].upper() + text[1:]
