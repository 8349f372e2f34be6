"""An endless supply of questions with known answers, in a seeded order, and what is right."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.load.readers import Question
from chaos.load.reading import Reading
from chaos.probes import judge
from chaos.prompts import Split, stream


def supply(split: Split, *, max_tokens: int, seed: int = 0) -> Iterator[Question]:
    """Yield questions of a split for ever; the item goes along as the question's tag."""
    for item in stream(split, seed):
        yield Question(
            messages=tuple(item.messages),
            tag=item,
            route=item.route,
            max_tokens=max_tokens,
        )


def right(question: Question, reading: Reading) -> bool:
    """Tell whether a reading got the right answer to a question of `supply`."""
    return judge(question.tag, reading.text).correct
