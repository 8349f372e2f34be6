"""Chaos as `quaver serve` composes it: hook, controller, journal, routes, and the ear on the engine."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Literal

from starlette.routing import Route

from chaos.contract import ModelPort
from chaos.controller import Controller
from chaos.faults.base import Pieces
from chaos.faults.text import pieces
from chaos.journal import Journal
from chaos.prompt_hook import PromptHook
from chaos.routes import routes
from chaos.scribe import Scribe
from chaos.settings import ChaosSettings
from engine.hooks import ChoiceText, RequestEnded, RequestStarted
from engine.messages import RequestMeta, StepOutput

_TICK_S = 0.2


class Chaos:
    """Implements `engine.hooks.Observer`: counts the requests that faults touched.

    `cut` is `chaos.tokens.token_pieces(tokenizer)`; without it tokens are estimated. Raises
    JournalError when the journal cannot be opened.
    """

    def __init__(
        self, settings: ChaosSettings, model: ModelPort, journal_path: Path, cut: Pieces = pieces
    ) -> None:
        self.prompt_hook = PromptHook(cut)
        self.controller = Controller(settings, self.prompt_hook, model, Scribe(Journal(journal_path)))
        self._ticker: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return the routes under /quaver/chaos."""
        return routes(self.controller)

    async def start(self) -> None:
        """Begin to watch the leases."""
        self._ticker = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End every fault, write the journal's last lines and release it."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        await self.controller.close()

    async def _watch(self) -> None:
        while True:
            self.controller.tick()
            await asyncio.sleep(_TICK_S)

    def on_started(self, event: RequestStarted) -> None:
        self.controller.seen(event.meta)

    def on_step(self, output: StepOutput) -> None:
        for request_id, fault_ids in output.touched.items():
            for fault_id in fault_ids:
                self.controller.touch(request_id, fault_id)

    def on_text(self, event: ChoiceText) -> None:
        """Nothing to learn from text."""

    def on_ended(self, event: RequestEnded) -> None:
        """Nothing to learn from an end."""

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None:
        """A rejected request reached no fault."""

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        if state == "lost":
            self.controller.on_faults([])
