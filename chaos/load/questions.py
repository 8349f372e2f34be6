"""An endless supply of questions with known answers, in a seeded order, and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

from chaos.load.readers import Question
from chaos.load.reading import Reading
from chaos.probes import judge
from chaos.prompts import Split, stream

TOKENS_PER_WORD = 1.45  # of our prompts, by SmolLM2's tokenizer


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
            headers={"x-quaver-group": item.family},
        )


def sized(question: Question, prompt_tokens: int | None, output_tokens: int | None) -> Question:
    """Return a question of about the lengths that a trace asks for; those it does not know stay as they are.

    The prompt repeats the question's own words up to the length, the answer goes on to its length even
    where the model would have stopped.
    """
    if prompt_tokens is not None:
        words = islice(cycle(question.text.split()), max(1, round(prompt_tokens / TOKENS_PER_WORD)))
        question = replace(question, messages=({"role": "user", "content": " ".join(words)},))
    if output_tokens is not None:
        question = replace(question, max_tokens=output_tokens, ignore_eos=True)
    return question


def right(question: Question, reading: Reading) -> bool:
    """Tell whether a reading got the right answer to a question of `supply`."""
    return judge(question.tag, reading.text).correct
