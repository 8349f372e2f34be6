"""Twins of an item: the same passage, asked for what it does not have, or asked where the answer stands."""

from __future__ import annotations

import msgspec

from chaos.prompts.item import Absent, Item, prompt


def absent(item: Item) -> Item:
    """Return the twin that asks for a slot the passage does not have: the right reply abstains.

    Raises ValueError for an item without such a slot (routes other than `qa`).
    """
    slot = _absent(item)
    return msgspec.structs.replace(
        item,
        id=f"{item.id}-absent",
        slot=slot.slot,
        check="abstain",
        messages=prompt(item.passage, slot.question),
        question=slot.question,
        answers=(),
    )


def answered(item: Item) -> Item:
    """Return the control of `absent`: the same question, and the answer in the place of the item's own."""
    slot = _absent(item)
    sentences = (*item.sentences[: item.answer_at], slot.sentence, *item.sentences[item.answer_at + 1 :])
    return msgspec.structs.replace(
        item,
        id=f"{item.id}-answered",
        slot=slot.slot,
        messages=prompt(" ".join(sentences), slot.question),
        question=slot.question,
        answers=(slot.answer,),
        sentences=sentences,
    )


def lacking(item: Item) -> Item:
    """Return the twin whose passage has lost the sentence that answers: the right reply abstains."""
    return _without(item, item.answer_at, "lacking")


def sparing(item: Item) -> Item:
    """Return the control of `lacking`: the passage has lost a sentence that the question does not need."""
    return _without(item, item.distractor_at, "sparing")


def cited(item: Item) -> Item:
    """Return the twin whose passage has a name, and whose reply begins to cite it.

    The right reply holds the name and the answer. Raises ValueError for routes other than `qa`.
    """
    _absent(item)
    return msgspec.structs.replace(
        item,
        id=f"{item.id}-cited",
        messages=prompt(f"Document {item.document}: {item.passage}", item.question, "According to document"),
        answers=(item.document, *item.answers),
    )


def _absent(item: Item) -> Absent:
    if item.absent is None:
        raise ValueError(f"item {item.id} ({item.route}) has no twins; take one of the route qa")
    return item.absent


def _without(item: Item, gone: int, name: str) -> Item:
    sentences = tuple(sentence for at, sentence in enumerate(item.sentences) if at != gone)
    lacks = gone == item.answer_at
    return msgspec.structs.replace(
        item,
        id=f"{item.id}-{name}",
        check="abstain" if lacks else item.check,
        messages=prompt(" ".join(sentences), item.question),
        answers=() if lacks else item.answers,
        sentences=sentences,
    )
