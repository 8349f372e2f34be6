"""What is asked as a canary, and the ways it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, kw_only=True)
class Canary:
    """A prompt that is asked again and again. `right` judges the text of an answer."""

    id: str
    messages: list[dict[str, Any]]
    max_tokens: int
    right: Callable[[str], bool]


class Guarded(msgspec.Struct, frozen=True):
    """Traffic that a canary stands for: it is sent as that tenant, on that route, with these headers."""

    tenant: str = "default"
    route: str = "default"
    headers: tuple[tuple[str, str], ...] = ()


class Port(Protocol):
    """The way to the engine that a user's request takes. The event loop's."""

    def guarded(self) -> list[Guarded]:
        """Return the newest request of every tenant and route that was asked lately."""
        ...

    async def ask(self, request_id: str, canary: Canary, guarded: Guarded, *, cached: bool) -> str | None:
        """Return the answer's text, decoded greedily with all layer detail; None when it was refused or
        failed. `cached`: the tenant's prefix cache is read and written, else neither."""
        ...


def digest(canaries: Iterable[Canary]) -> str:
    """Return a short hash of what is asked: a baseline holds for these prompts only."""
    asked = [(canary.id, canary.messages, canary.max_tokens) for canary in canaries]
    return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:16]
