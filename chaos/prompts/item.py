"""One prompt with a known answer, and the splits it may come from."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Split = Literal["calibration", "demo", "test"]
SPLITS: tuple[Split, ...] = ("calibration", "demo", "test")
SYSTEM = "Answer the question from the passage in one short sentence."
PREFILL = "According to the passage,"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what is known of it.

    `sentences` are the passage's; `answer_at` indexes the one that holds the answer, `distractor_at` one
    that the question does not need. `answers` are all strings a correct reply contains, `check` says how
    `chaos.probes` judges it. The last message is an assistant prefill: the reply continues it.
    """

    id: str
    family: str
    split: Split
    slot: str
    route: str
    check: Literal["slot", "list", "format"]
    messages: list[dict[str, Any]]
    answers: tuple[str, ...]
    sentences: tuple[str, ...]
    answer_at: int
    distractor_at: int
    max_tokens: int = 24


def third(values: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """Return the split's own third of the values."""
    return values[SPLITS.index(split) :: 3]


def upper_first(text: str) -> str:
    """Return the text with a capital first letter, for a sentence that begins with a value."""
    return text[:1].upper() + text[1:]
