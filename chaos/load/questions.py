"""An endless supply of questions with known answers, in a seeded order, and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from chaos.load.readers import Question
from chaos.load.reading import Reading
from chaos.probes import judge
from chaos.prompts import Split, stream


def supply(
    split: Split, *, max_tokens: int, seed: int = 0, temperatures: Sequence[float] = (0.0,)
) -> Iterator[Question]:
    """Yield questions of a split for ever, at each temperature in turn; the item goes along as tag."""
    for item, temperature in zip(stream(split, seed), cycle(temperatures), strict=False):
        yield Question(
            messages=tuple(item.messages),
            tag=item,
            route=item.route,
            max_tokens=max_tokens,
            temperature=temperature,
        )


def right(question: Question, reading: Reading) -> bool:
    """Tell whether a reading got the right answer to a question of `supply`."""
    return judge(question.tag, reading.text).correct
