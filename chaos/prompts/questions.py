"""Questions about one fact of a passage: the `qa` route."""

from __future__ import annotations

import random

from chaos.prompts.families import FAMILIES
from chaos.prompts.item import Absent, Item, Split, document, prompt, third, upper_first, wording

FACTS = 4  # facts in a passage, besides its opening sentence


def question_item(name: str, family: str, slot: str, split: Split, rng: random.Random, *, late: bool) -> Item:
    """Return one item: an opening sentence, up to four facts, a question for one of them."""
    kind = FAMILIES[family]
    subject = rng.choice(third(kind.names, split))
    others = [other for other in kind.slots if other != slot]
    rng.shuffle(others)
    others = others[: FACTS - 1]
    place = rng.randint(len(others) - 1 if late else 0, len(others))
    order = [*others[:place], slot, *others[place:]]
    words = {asked: rng.randrange(3) for asked in order}
    values = {asked: rng.choice(third(kind.slots[asked].values, split)) for asked in order}
    facts = [
        upper_first(kind.slots[asked].statements[words[asked]].format(s=subject, v=values[asked]))
        for asked in order
    ]
    sentences = (upper_first(rng.choice(kind.intros).format(s=subject)), *facts)
    question = kind.slots[slot].questions[wording(words[slot], split)].format(s=subject)
    return Item(
        id=name,
        family=family,
        split=split,
        slot=slot,
        route="qa",
        check="slot",
        messages=prompt(" ".join(sentences), question),
        question=question,
        answers=(values[slot],),
        sentences=sentences,
        answer_at=1 + place,
        distractor_at=1 + rng.choice([at for at in range(len(order)) if at != place]),
        document=document(name),
        absent=_absent(family, subject, " ".join(sentences), split, rng),
    )


def _absent(family: str, subject: str, passage: str, split: Split, rng: random.Random) -> Absent:
    slot, fact = rng.choice(list(FAMILIES[family].absent.items()))
    answer = rng.choice([value for value in third(fact.values, split) if f" {value}" not in passage])
    sentence = upper_first(fact.statement.format(s=subject, v=answer))
    return Absent(slot, fact.question.format(s=subject), sentence, answer)
