"""One known question, asked before a fault and after it: is the server again as it was?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

TIMEOUT_S = 5.0
#: Nats by which an emitted token's log-probability may move where answers are not bit-identical. In a crowd
#: SmolLM2-135M moved by up to 0.10, as other prompts in a batch change how numbers are rounded.
LOGPROB_ERROR = 0.25
QUESTION: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Red, green, blue, white, black, brown, grey, pink. Repeat this list."},
        {"role": "assistant", "content": "Red, green,"},
    ],
    "temperature": 0,
    "max_tokens": 12,
    "logprobs": True,
    "top_logprobs": 5,
}

#: Sends a body to this server's chat endpoint as a canary, returns the JSON answer, raises on an error.
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer after a fault compares with the one before it.

    `error` is the largest difference of an emitted token's log-probability, in nats.
    """

    state: Literal["pending", "verified", "differs", "not checked"]
    why: str | None = None
    error: float | None = None


PENDING = Verdict(state="pending")


class Answer(msgspec.Struct, frozen=True):
    """Tokens with their log-probabilities and alternatives, as the API gives them; or why there is none."""

    tokens: list[dict[str, Any]]
    why_not: str | None = None


class Canary:
    """Asks the question. `exact`: the server computes deterministically, so answers agree bit for bit."""

    def __init__(self, ask: Ask, *, exact: bool, timeout_s: float = TIMEOUT_S) -> None:
        self._ask = ask
        self._exact = exact
        self._timeout_s = timeout_s

    async def answer(self) -> Answer:
        """Ask now. Never raises: an answer that did not come says why."""
        try:
            body = await asyncio.wait_for(self._ask(QUESTION), self._timeout_s)
            return Answer(body["choices"][0]["logprobs"]["content"])
        except TimeoutError:
            return Answer([], f"the canary had no answer within {self._timeout_s:g} s")
        except Exception as error:
            return Answer([], f"the canary had no answer: {error}")

    def compare(self, before: Answer, after: Answer) -> Verdict:
        """Say whether two answers agree."""
        for answer, when in ((before, "before"), (after, "after")):
            if answer.why_not is not None:
                return Verdict(state="not checked", why=f"{when} the fault {answer.why_not}")
        if _words(before) != _words(after):
            return Verdict(state="differs", why=f"{_text(before)!r} became {_text(after)!r}")
        pairs = zip(before.tokens, after.tokens, strict=True)
        moved = [abs(a["logprob"] - b["logprob"]) for a, b in pairs]
        error = max(moved, default=0.0) if all(map(math.isfinite, moved)) else None
        if self._exact and before.tokens != after.tokens:
            return Verdict(state="differs", why="the same words with other log-probabilities", error=error)
        if error is None or error > LOGPROB_ERROR:
            return Verdict(
                state="differs", why=f"log-probabilities moved by up to {max(moved):.3g}", error=error
            )
        return Verdict(state="verified", error=error)


def _words(answer: Answer) -> list[list[int]]:
    return [token["bytes"] for token in answer.tokens]


def _text(answer: Answer) -> str:
    return b"".join(map(bytes, _words(answer))).decode(errors="replace")
