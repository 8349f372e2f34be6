"""What the probes ask: prompts with a check of the reply, the same for the same seed.

A task belongs to a family; intervals are drawn over families, as replies to one family resemble each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args
from zlib import crc32

from chaos.load.readers import Message, Question
from chaos.probes import judge
from chaos.prompts import Item, absent, cited, stream
from chaos.quality.constraints import CONSTRAINTS, Check, Constraint, includes
from chaos.quality.roles import ASKED, PERSONAS

Probe = Literal["facts", "absent", "citation", "instruction", "role", "format"]
PROBES: tuple[Probe, ...] = get_args(Probe)
ROUTE = "quality"
_DOCUMENT = re.compile(r"\bK-\d+\b")


@dataclass(frozen=True)
class Task:
    """One prompt of a probe. `part` names what of the probe it is, `check` tells whether a reply is good."""

    id: str
    probe: Probe
    family: str
    part: str
    question: Question
    check: Check


def tasks(count: int, seed: int = 0, *, probes: tuple[Probe, ...] = PROBES, route: str = ROUTE) -> list[Task]:
    """Return `count` tasks of each probe, from the prompts for live traffic, fixed by the seed."""
    makers: dict[Probe, Callable[[int, str], Iterator[Task]]] = {
        "facts": lambda s, r: (
            _of_item("facts", item, r) for item in stream("demo", s, routes=("qa", "list"))
        ),
        "absent": lambda s, r: (_of_item("absent", absent(item), r) for item in stream("demo", s)),
        "citation": lambda s, r: (_citation(item, r) for item in stream("demo", s)),
        "instruction": _instructions,
        "role": _roles,
        "format": lambda s, r: (_of_item("format", i, r) for i in stream("demo", s, routes=("format",))),
    }
    found = [task for probe in probes for task in islice(makers[probe](seed, route), count)]
    assert len({task.id for task in found}) == len(found)
    return found


def traceable(reply: str, documents: set[str]) -> bool:
    """Tell whether a reply cites a document, and none that the prompt does not have."""
    found = set(_DOCUMENT.findall(reply))
    return bool(found) and found <= documents


def _of_item(probe: Probe, item: Item, route: str) -> Task:
    question = _question(item.id, tuple(item.messages), route, item.max_tokens)
    family = item.family if probe != "format" else item.answers[0]
    return Task(
        f"{probe}/{item.id}", probe, family, item.slot, question, lambda reply: judge(item, reply).correct
    )


def _citation(item: Item, route: str) -> Task:
    twin = cited(item)
    question = _question(twin.id, tuple(twin.messages), route, twin.max_tokens)
    return Task(
        f"citation/{twin.id}",
        "citation",
        item.family,
        item.slot,
        question,
        lambda reply: traceable(reply, {item.document}),
    )


def _instructions(seed: int, route: str) -> Iterator[Task]:
    """Yield questions with an instruction each, after an exchange in which it was followed."""
    items = stream("demo", seed)
    for number, (shown, item) in enumerate(zip(items, items, strict=False)):
        constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        name = f"{item.id}-{constraint.name}"
        messages = (
            {"role": "user", "content": _instructed(shown, constraint)},
            {"role": "assistant", "content": constraint.example(shown)},
            {"role": "user", "content": _instructed(item, constraint)},
        )
        question = _question(name, messages, route, 48)
        yield Task(
            f"instruction/{name}", "instruction", item.family, constraint.name, question, constraint.check
        )


def _instructed(item: Item, constraint: Constraint) -> str:
    return f"{item.passage}\n\n{item.question} {constraint.instruction}"


def _roles(seed: int, route: str) -> Iterator[Task]:
    """Yield, in turn, a question for the persona's name and one that the persona turns away.

    Before it the persona has done both once; what is asked then is another question of the same sort.
    """
    rng = random.Random(f"role/{seed}")
    number = 0
    while True:
        for persona in rng.sample(PERSONAS, len(PERSONAS)):
            stays = number % 2 == 0
            greeted, named = rng.sample(ASKED, 2)
            turned_away, aside = rng.sample(persona.asides, 2)
            name = f"{seed}-{number}"
            messages = (
                {"role": "system", "content": persona.system},
                {"role": "user", "content": greeted},
                {"role": "assistant", "content": persona.greeting},
                {"role": "user", "content": turned_away},
                {"role": "assistant", "content": persona.refusal},
                {"role": "user", "content": named if stays else aside},
            )
            check = includes(persona.name) if stays else includes(persona.refusal.rstrip("."))
            question = _question(name, messages, route, 32)
            yield Task(f"role/{name}", "role", persona.name, "stays" if stays else "refuses", question, check)
            number += 1


def _question(name: str, messages: tuple[Message, ...], route: str, max_tokens: int) -> Question:
    return Question(messages=messages, route=route, max_tokens=max_tokens, seed=crc32(name.encode()))
