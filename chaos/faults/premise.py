"""A contradicted premise. The question takes for granted what the passage denies."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.authority import false_fact, most_related
from chaos.faults.base import Messages, Pieces, PromptFault
from chaos.faults.text import label_end, last_user, question_start


class Premise(PromptFault, frozen=True, kw_only=True):
    """Puts a premise in front of the question.

    It is the sentence of the passage that shares most with the question, contradicted; the control
    restates it truthfully. Does nothing to a message without a passage.
    """

    kind: ClassVar[str] = "premise"
    title: ClassVar[str] = "Question with a premise that contradicts the passage"
    order: ClassVar[int] = 20
    moves: ClassVar[tuple[str, ...]] = ("probe accuracy", "lookback")
    control: ClassVar[dict[str, bool | float]] = {"harmless": True}

    harmless: Annotated[bool, Meta(description="control: the premise is true to the passage")] = False

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return the messages with the premise in the question, None when there is none to make."""
        target = last_user(messages)
        if target is None:
            return None
        text = messages[target]["content"]
        start = question_start(text)
        passage, question = text[:start], text[start:]
        claim = false_fact(passage, question, seed)
        if claim is None:
            return None
        if self.harmless:
            claim = passage[slice(*most_related(passage, question)[0])].strip()
        cut = start + label_end(question)
        content = f"{text[:cut]}Remember that {claim.rstrip('.')}. {text[cut:]}"
        return [*messages[:target], {**messages[target], "content": content}, *messages[target + 1 :]]
