"""Canaries on this server: which prompts, and how they reach the engine by a user's way."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Literal

from alerting.canary.prompt import Canary, Guarded
from chaos.probes import judge
from chaos.prompts import generate
from engine.api.body import DisconnectedError
from engine.api.errors import ApiError
from engine.api.state import ApiState
from engine.hooks import ChoiceText, RequestEnded, RequestStarted
from engine.messages import RequestMeta, StepOutput
from quaver.ask import ask

_COUNT = 24
_SEED = 20_240  # of no other draw: prompts of `quaver calibrate` and of the demo begin at 0
_LATELY = 64  # tenants and routes
_PATIENCE_S = 30.0


def prompts() -> list[Canary]:
    """Return the canaries: passages of every family, drawn once and for all."""
    return [
        Canary(
            id=item.id,
            messages=item.messages,
            max_tokens=item.max_tokens,
            right=lambda text, item=item: judge(item, text).correct,  # type: ignore[misc]
        )
        for item in generate("calibration", _COUNT, seed=_SEED)
    ]


class Sender:
    """Implements `alerting.canary.prompt.Port`, and hears as an observer who asks.

    A canary is a request of low priority of the tenant it stands for; chaos selects it exactly as that
    tenant's own.
    """

    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._lately: OrderedDict[tuple[str, str], Guarded] = OrderedDict()

    def guarded(self) -> list[Guarded]:
        """Return the newest request of every tenant and route, in a stable order."""
        return [self._lately[key] for key in sorted(self._lately)]

    async def ask(self, request_id: str, canary: Canary, guarded: Guarded, *, cached: bool) -> str | None:
        """Generate an answer; None when it was refused, failed or took too long."""
        meta = RequestMeta(
            request_id=request_id,
            tenant=guarded.tenant,
            route=guarded.route,
            priority="low",
            canary=True,
            headers=dict(guarded.headers),
        )
        body = {
            "messages": canary.messages,
            "max_tokens": canary.max_tokens,
            "temperature": 0,
            "signals": True,
        }
        try:
            async with asyncio.timeout(_PATIENCE_S):
                _, deltas = await ask(self._state, body, meta, cached=cached)
                return "".join(delta.text for delta in deltas)
        except (ApiError, DisconnectedError, TimeoutError):
            return None

    def on_started(self, event: RequestStarted) -> None:
        """Remember whose request it is, and its headers."""
        meta = event.meta
        if not meta.canary:
            key = (meta.tenant, meta.route)
            self._lately[key] = Guarded(meta.tenant, meta.route, tuple(meta.headers.items()))
            self._lately.move_to_end(key)
            if len(self._lately) > _LATELY:
                self._lately.popitem(last=False)

    def on_step(self, output: StepOutput) -> None:
        """Nothing to learn."""

    def on_text(self, event: ChoiceText) -> None:
        """Nothing to learn."""

    def on_ended(self, event: RequestEnded) -> None:
        """Nothing to learn."""

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None:
        """Nothing to learn."""

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        """Nothing to learn."""
