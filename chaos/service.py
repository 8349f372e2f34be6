"""Chaos as `quaver serve` composes it: hook, controller, journal, routes, and the ear on the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Literal

from starlette.routing import Route

from alerting.alerts import Alert
from chaos.admission import Admission
from chaos.canary import Ask, Canary
from chaos.contract import ModelPort
from chaos.controller import Controller
from chaos.detail_hook import DetailHook
from chaos.faults.base import Pieces
from chaos.faults.text import pieces
from chaos.journal import Journal
from chaos.prometheus import Prometheus
from chaos.prompt_hook import PromptHook
from chaos.reverts import Reverts
from chaos.routes import routes
from chaos.scribe import Scribe
from chaos.settings import ChaosSettings
from chaos.stops import Stops, StopWhen
from chaos.stream_hook import StreamHook
from engine.hooks import ChoiceText, RequestEnded, RequestStarted
from engine.messages import RequestMeta, StepOutput
from telemetry.business import outcome_of

log = logging.getLogger("quaver.chaos")

_TICK_S = 0.2
_LOOK_UP_S = 2.0


class Chaos:
    """Implements `engine.hooks.Observer`: counts requests that faults touched, and readers that leave.

    `cut` is `chaos.tokens.token_pieces(tokenizer)`; without it tokens are estimated. `ask` is how the
    canary reaches this server, whose answers agree bit for bit if it is `exact`; without it no
    revert is verified. `alert_names` returns the alerts that stop conditions may name, `tiers` the tiers of
    the KV cache below the pool, None while they are not known. Raises
    JournalError when the journal cannot be opened, ValueError when a stop condition of the settings
    cannot be watched.
    """

    def __init__(
        self,
        settings: ChaosSettings,
        model: ModelPort,
        journal_path: Path,
        cut: Pieces = pieces,
        *,
        ask: Ask | None = None,
        exact: bool = False,
        alert_names: Callable[[], Iterable[str]] = tuple,
        tiers: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        always = StopWhen(
            alert=settings.chaos_stop_alert,
            promql=settings.chaos_stop_promql,
            interruptions=settings.chaos_stop_interruptions,
        )
        prometheus = Prometheus(settings.prometheus_url) if settings.prometheus_url else None
        self._stops = Stops(always, prometheus, alert_names)
        flaw = self._stops.flaw(always)
        if flaw is not None:
            raise ValueError(f"QUAVER_CHAOS_STOP_…: {flaw}")
        canary = Canary(ask, exact=exact) if ask is not None and settings.chaos_verify else None
        self._admission = Admission(settings, self._stops, tiers)
        self.prompt_hook = PromptHook(cut)
        self.stream_hook = StreamHook()
        self.detail_hook = DetailHook()
        self.controller = Controller(
            admission=self._admission,
            fronts={"prompt": self.prompt_hook, "stream": self.stream_hook, "telemetry": self.detail_hook},
            model=model,
            scribe=Scribe(Journal(journal_path)),
            stops=self._stops,
            reverts=Reverts(canary),
        )
        for hook in (self.prompt_hook, self.stream_hook, self.detail_hook):
            hook.applied = self.controller.touch
        self._watchers: list[asyncio.Task[None]] = []

    def routes(self) -> list[Route]:
        """Return the routes under /quaver/chaos."""
        return routes(self.controller)

    async def start(self) -> None:
        """Begin to watch leases and stop conditions."""
        self._watchers = [
            asyncio.create_task(self._watch(self._tick, _TICK_S)),
            asyncio.create_task(self._watch(self.controller.look_up, _LOOK_UP_S)),
        ]

    async def stop(self) -> None:
        """End every fault, write the journal's last lines and release it."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self.controller.close()

    async def _watch(self, look: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Look again and again. Who cannot look halts chaos: what nobody watches guards nothing."""
        while True:
            try:
                await look()
            except Exception as error:
                log.exception("chaos cannot be watched")
                self.controller.halt_at(f"faults cannot be watched: {error or type(error).__name__}")
                await asyncio.sleep(_LOOK_UP_S)
            await asyncio.sleep(every_s)

    async def _tick(self) -> None:
        self.controller.tick()

    def on_alert(self, alert: Alert) -> None:
        """Hear that an alert began or ended."""
        self._stops.on_alert(alert)
        self.controller.check()

    def on_started(self, event: RequestStarted) -> None:
        self._admission.seen(event.meta)

    def on_step(self, output: StepOutput) -> None:
        for request_id, fault_ids in output.touched.items():
            for fault_id in fault_ids:
                self.controller.touch(request_id, fault_id)

    def on_text(self, event: ChoiceText) -> None:
        """Nothing to learn from text."""

    def on_ended(self, event: RequestEnded) -> None:
        if not event.meta.canary:
            self._stops.ended(outcome_of(event.reason, event.disconnected) == "interrupted")

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None:
        """A rejected request reached no fault."""

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        if state == "lost":
            self.controller.on_faults([])
