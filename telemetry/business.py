"""What users did with an answer: interruption, completion, rating.

Feedback counts once per request and kind, and only from the tenant that asked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

import msgspec

FeedbackKind = Literal["completed", "abandoned", "rating"]
Outcome = Literal["completed", "interrupted", "rejected", "failed"]


class Feedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback`. `rating` is −1…1 and belongs to the kind `rating` alone."""

    request_id: str
    kind: FeedbackKind
    rating: float | None = None

    def __post_init__(self) -> None:
        if (self.kind == "rating") != (self.rating is not None):
            raise ValueError("`rating` goes with kind `rating`, and only with it")
        if self.rating is not None and not -1 <= self.rating <= 1:
            raise ValueError("`rating` is a number from -1 to 1")


@dataclass(slots=True)
class Asked:
    """Who asked, and what they have said since."""

    tenant: str
    route: str
    canary: bool
    said: dict[str, float | None] = field(default_factory=dict)


class Business:
    """Remembers the last `kept` requests, so that their owners can give feedback."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    def open(self, request_id: str, asked: Asked) -> None:
        """Remember a request."""
        self._asked[request_id] = asked
        while len(self._asked) > self.kept:
            self._asked.popitem(last=False)

    def find(self, request_id: str) -> Asked | None:
        """Return who made a request, if that is still known."""
        return self._asked.get(request_id)

    def give(self, feedback: Feedback, tenant: str) -> tuple[Asked, float | None, bool] | None:
        """Take feedback of a tenant: (request, value that counts, whether it is new).

        None when the request is not known or not this tenant's; the two look alike on purpose.
        """
        asked = self._asked.get(feedback.request_id)
        if asked is None or asked.tenant != tenant:
            return None
        new = feedback.kind not in asked.said
        if new:
            asked.said[feedback.kind] = feedback.rating
        return asked, asked.said[feedback.kind], new


def outcome_of(reason: str, disconnected: bool) -> Outcome:
    """Return how a response ended for its user."""
    if disconnected:
        return "interrupted"
    if reason in ("stop", "length"):
        return "completed"
    return "rejected" if reason == "shed" else "failed"
