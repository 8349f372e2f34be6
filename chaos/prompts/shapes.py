"""Prompts whose answer has a shape: lists of three things, and cards of `key: value` lines."""

from __future__ import annotations

import random

from chaos.prompts.families import FAMILIES, POOLS
from chaos.prompts.item import PREFILL, Item, Split, document, prompt, third, wording

_PERSON = FAMILIES["person"]
_OWNERS = ("shop", "garden", "kitchen", "workshop", "museum", "market", "bakery", "theatre", "hotel")
_THINGS = (
    "apples", "rope", "candles", "bread", "paint", "honey", "nails", "soap", "rice", "paper", "lamps", "tea",
    "brushes", "salt", "boots", "clocks", "cheese", "maps", "spoons", "wool", "jars", "pears", "hats",
    "seeds",
    "plates", "glue", "onions",
)  # fmt: skip
_STATEMENTS = (
    "The {o} in {c} needs {a}, {b} and {d}.",
    "Today the {o} in {c} needs {a}, {b} and {d}.",
    "This week the {o} in {c} needs {a}, {b} and {d}.",
)
_QUESTIONS = (
    "Which three things does the {o} need?",
    "What three things does the {o} need?",
    "What are the three things that the {o} needs?",
)


def list_item(name: str, split: Split, rng: random.Random) -> Item:
    """Return an item that asks for the three things a passage lists."""
    owner = rng.choice(third(_OWNERS, split))
    city, keeper = rng.choice(third(POOLS["cities"], split)), rng.choice(third(POOLS["persons"], split))
    things = tuple(rng.sample(third(_THINGS, split), 3))
    words = rng.randrange(3)
    fact = _STATEMENTS[words].format(o=owner, c=city, a=things[0], b=things[1], d=things[2])
    sentences = (
        f"{keeper} runs the {owner} in {city}.",
        f"The {owner} opens at {rng.randrange(7, 11)} in the morning.",
        f"On Sundays the {owner} is closed.",
        fact,
    )
    question = _QUESTIONS[wording(words, split)].format(o=owner)
    return Item(
        id=name,
        family="list",
        split=split,
        slot="things",
        route="list",
        check="list",
        messages=prompt(" ".join(sentences), question, f"{PREFILL} the {owner} in {city} needs"),
        question=question,
        answers=things,
        sentences=sentences,
        answer_at=3,
        distractor_at=1,
        document=document(name),
    )


def format_item(name: str, split: Split, rng: random.Random) -> Item:
    """Return an item that asks for a card of two `key: value` lines, after one worked example."""
    cards = []
    for _ in range(2):
        subject = rng.choice(third(POOLS["persons"], split))
        job, city = (
            rng.choice(third(_PERSON.slots["job"].values, split)),
            rng.choice(third(POOLS["cities"], split)),
        )
        age = rng.choice(third(_PERSON.slots["age"].values, split))
        sentences = (
            f"{subject} is {age} years old.",
            f"{subject} works as a {job}.",
            f"{subject} lives in {city}.",
        )
        cards.append((sentences, (job, city)))
    (example, shown), (sentences, answers) = cards
    ask = "Write a card with job and city."
    return Item(
        id=name,
        family="format",
        split=split,
        slot="card",
        route="format",
        check="format",
        messages=[
            {"role": "user", "content": f"{' '.join(example)}\n\n{ask}"},
            {"role": "assistant", "content": "job: {}\ncity: {}".format(*shown)},
            {"role": "user", "content": f"{' '.join(sentences)}\n\n{ask}"},
            {"role": "assistant", "content": "job:"},
        ],
        question=ask,
        answers=answers,
        sentences=sentences,
        answer_at=2,
        distractor_at=0,
        document=document(name),
    )
