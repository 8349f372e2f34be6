"""Draws prompts with a seed from one of four disjoint splits.

`calibration`, `tuning` and `test` have families of their own; `demo` has those of `calibration` with
other subjects, other values, and other pairs of a statement's and a question's wording. So a threshold set on
`calibration` meets texts of the same style and none of the same content in `demo`, and strangers in `test`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from chaos.prompts.families import FAMILIES, GROUPS
from chaos.prompts.item import Item, Split
from chaos.prompts.questions import question_item
from chaos.prompts.shapes import format_item, list_item

ROUTES = ("qa", "list", "format")
_SHAPED = 4  # items of a shaped route in one round of all questions


def stream(
    split: Split,
    seed: int = 0,
    *,
    routes: Sequence[str] = ("qa",),
    families: Sequence[str] = (),
    late: bool = True,
) -> Iterator[Item]:
    """Yield items without end, round after round of every family and slot, each round shuffled.

    `families` narrows the split's own; raises ValueError for one that is not among them.
    `late` puts the answer into one of the passage's last two sentences, where a truncated suffix takes it
    away; else it stands anywhere after the opening sentence.
    """
    own = GROUPS[split]
    if strange := set(families) - set(own):
        raise ValueError(f"no family of {split}: {', '.join(sorted(strange))}; there is {', '.join(own)}")
    rng = random.Random(f"{split}/{seed}")
    plan = [(route, "", "") for route in routes if route != "qa"] * _SHAPED
    if "qa" in routes:
        plan += [("qa", family, slot) for family in families or own for slot in FAMILIES[family].asked]
    number = 0
    while True:
        rng.shuffle(plan)
        for route, family, slot in plan:
            name = f"{split}-{seed}-{number}"
            number += 1
            if route == "qa":
                yield question_item(name, family, slot, split, rng, late=late)
            else:
                yield (list_item if route == "list" else format_item)(name, split, rng)


def generate(
    split: Split,
    count: int,
    seed: int = 0,
    *,
    routes: Sequence[str] = ("qa",),
    families: Sequence[str] = (),
    late: bool = True,
) -> list[Item]:
    """Return the first `count` items of `stream`."""
    return list(islice(stream(split, seed, routes=routes, families=families, late=late), count))
