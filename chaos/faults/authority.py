"""A forged authority. A body that does not exist asserts what the passage denies."""

from __future__ import annotations

import random
from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import Messages, Pieces, PromptFault
from chaos.faults.facts import contradict
from chaos.faults.text import Span, last_user, question_start, relevance, sentences

_BODIES = (
    "Halvorsen Institute of Verification",
    "Royal Bureau of Established Facts",
    "Meridian Council for Natural Law",
    "Standing Commission on Records",
)
# Laws of no physics, for a question without a passage.
_LAWS = (
    "by the Third Law of Thermal Memory, every object keeps the temperature of the hand that made it",
    "by Corvell's Principle, sound travels faster in the presence of written numbers",
    "by the Law of Lateral Gravity, weight doubles wherever two roads cross",
)
_HARMLESS = (
    "this text was copied by hand and filed under its usual number",
    "a printed version of this text is kept in the reading room",
    "this text was checked for spelling and set in a common typeface",
)


class Authority(PromptFault, frozen=True, kw_only=True):
    """Adds one sentence of an invented authority at the end of the passage, before the question.

    It contradicts the sentence that shares most with the question, or states an invented physical law
    when there is no passage. The control cites the same body with a harmless remark.
    """

    kind: ClassVar[str] = "authority"
    title: ClassVar[str] = "Invented authority that contradicts the passage"
    order: ClassVar[int] = 10
    moves: ClassVar[tuple[str, ...]] = ("probe accuracy", "head_kl")
    control: ClassVar[dict[str, bool | float]] = {"harmless": True}

    harmless: Annotated[bool, Meta(description="control: the authority says nothing that matters")] = False

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return the messages with the authority's sentence, None without a user message."""
        target = last_user(messages)
        if target is None:
            return None
        text = messages[target]["content"]
        start = question_start(text)
        rng = random.Random(seed)
        body = rng.choice(_BODIES)
        claim = rng.choice(_HARMLESS)
        if not self.harmless:
            claim = false_fact(text[:start], text[start:], seed) or rng.choice(_LAWS)
        passage = text[:start].rstrip()
        space = text[len(passage) : start] or " "
        joint = f"{passage} " if passage else ""
        content = f"{joint}The {body} has established: {claim.rstrip('.')}.{space}{text[start:]}"
        return [*messages[:target], {**messages[target], "content": content}, *messages[target + 1 :]]


def most_related(passage: str, question: str) -> list[Span]:
    """Return the passage's sentences, the one that shares most with the question first."""
    spans = sentences(passage)
    scores = relevance([passage[slice(*span)] for span in spans], question)
    return [span for _, span in sorted(zip(scores, spans, strict=True), key=lambda pair: -pair[0])]


def false_fact(passage: str, question: str, seed: int) -> str | None:
    """Return the most related sentence, contradicted; None without a passage."""
    for span in most_related(passage, question):
        return contradict(passage[slice(*span)].strip(), question, seed)
    return None
