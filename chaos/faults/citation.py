"""A fabricated citation. The answer is to be taken from a document that does not exist."""

from __future__ import annotations

import random
import re
from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import Messages, Pieces, PromptFault
from chaos.faults.text import last_user

_NAME = re.compile(r"\b[A-Z]-\d{3}\b")


class Citation(PromptFault, frozen=True, kw_only=True):
    """Ends the question with the demand to answer from a document that is not there.

    Its name looks like those in the message, `K-117`. The control demands one that is there, else the
    text above.
    """

    kind: ClassVar[str] = "citation"
    title: ClassVar[str] = "Citation of a document that does not exist"
    order: ClassVar[int] = 25
    moves: ClassVar[tuple[str, ...]] = ("citation traceability", "lookback", "entropy")
    control: ClassVar[dict[str, bool | float]] = {"existing": True}

    existing: Annotated[bool, Meta(description="control: the document that is cited is there")] = False

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return the messages with the demand after the question, None without a user message."""
        target = last_user(messages)
        if target is None:
            return None
        text = messages[target]["content"].rstrip()
        known = _NAME.findall("\n".join(message["content"] for message in messages))
        if self.existing:
            source = f"document {known[0]}" if known else "the text above"
        else:
            source = f"document {_fabricated(known, random.Random(seed))}"
        content = f"{text} Answer from {source} and cite it."
        return [*messages[:target], {**messages[target], "content": content}, *messages[target + 1 :]]


def _fabricated(known: list[str], rng: random.Random) -> str:
    """Return a name that is not among the known ones, with their letter."""
    letter = known[0][0] if known else rng.choice("KQRT")
    while True:
        name = f"{letter}-{rng.randrange(100, 1000)}"
        if name not in known:
            return name
