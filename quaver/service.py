"""Everything that runs in the front process, put together: engine client, telemetry, alerting, chaos, API."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from alerting.rules import RulesError
from alerting.service import Alerting
from chaos import MODEL_HOOK
from chaos.journal import JournalError
from chaos.quality.reported import Reported
from chaos.service import Chaos
from chaos.tokens import token_pieces
from engine.api.app import ApiState, create_app
from engine.api.auth import Keys, KeysError
from engine.api.salts import Salts
from engine.hooks import ChoiceText, Observer, RequestEnded, RequestStarted
from engine.messages import RequestMeta, StepOutput
from engine.models import loader, store
from engine.models.config import ModelError
from engine.process.client import EngineClient
from engine.process.spawn import Spawned
from quaver.ask import ask_as_canary
from quaver.canaries import Sender, prompts
from quaver.settings import Settings
from telemetry.hub import Telemetry

log = logging.getLogger("quaver")

_VERSIONS = ("quaver", "torch", "starlette", "opentelemetry-sdk", "pyarrow", "duckdb")


class StartError(Exception):
    """The server cannot start, and would not on a second try; the message says what to do."""


class Service:
    """The front process. `app` is its ASGI application; its lifespan starts and stops the rest.

    `spawned` is the model process, which loads meanwhile; without one it is started with the rest. Raises
    StartError when the model, the keys, the rules or the journal cannot be used.
    """

    def __init__(self, settings: Settings, spawned: Spawned | None = None) -> None:
        self.settings = settings
        self.client = EngineClient(settings, hook=MODEL_HOOK, spawned=spawned)
        self.started = time.time()
        self._draining = False
        try:
            self._build()
        except (ModelError, KeysError, RulesError, JournalError) as error:
            raise StartError(str(error)) from error

    def _build(self) -> None:
        settings = self.settings
        tokenizer = loader.load_tokenizer(store.resolve(settings.model, settings.model_cache))
        keys = Keys.load_or_create(settings.keys_dir)
        salts = Salts.load_or_create(settings.keys_dir)
        self.telemetry = Telemetry(settings, tokenizer.token_bytes)
        self.alerting = Alerting(
            settings, self.telemetry.registry, settings.state_dir, on_l1=self.telemetry.alert_raised
        )
        self.chaos = Chaos(
            settings,
            self.client,
            settings.state_dir / "chaos" / "journal.jsonl",
            token_pieces(tokenizer),
            ask=lambda body: ask_as_canary(self.api, body),
            exact=settings.deterministic,
            alert_names=lambda: [rule["name"] for rule in self.alerting.rules.alerts.model_dump().values()],
            tiers=lambda: None if self.client.ready is None else self.client.ready.kv_tiers,
        )
        self.alerting.listeners.append(self.chaos.on_alert)
        self.telemetry.detail_hook = self.chaos.detail_hook
        self.telemetry.add_sink(self.alerting.sink)
        self.telemetry.add_sink(self.alerting.canaries.reader)
        self.client.signals_s = self.telemetry.spent_s
        observers: list[Observer] = [_Introductions(self), self.telemetry, self.chaos]
        self.api = ApiState(
            self.client,
            tokenizer,
            settings,
            gate=self.alerting.gate,
            prompt_hook=self.chaos.prompt_hook,
            stream_hook=self.chaos.stream_hook,
            observers=observers,
            record_encoder=self.telemetry.records,
            salts=salts,
        )
        sender = Sender(self.api)
        observers.append(sender)
        self.alerting.canaries.ask(prompts(), sender)
        self.telemetry.watch_admission(lambda: self.api.door.levels(time.monotonic()))
        routes: list[BaseRoute] = [
            *self.telemetry.routes(),
            *self.alerting.routes(),
            *self.chaos.routes(),
            *Reported(self.telemetry.registry, settings.env).routes(),
            Route("/quaver/status", self._status, methods=["GET"]),
        ]
        self.app = create_app(self.api, keys, routes, metrics_open=settings.metrics_open)
        self.app.router.lifespan_context = self._lifespan

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.telemetry.start()
        await self.alerting.start()
        await self.chaos.start()
        await self.client.start(wait=False)
        try:
            yield
        finally:
            await self.drain()
            await self.client.stop(grace_s=0)
            await self.alerting.stop()
            self.telemetry.close()

    async def drain(self) -> None:
        """End every fault, let running answers finish within the grace, mark the rest as aborted.

        New requests are refused from here on. Harmless twice.
        """
        if self._draining:
            return
        self._draining = True
        await self.chaos.stop()
        await self.api.drain(self.settings.shutdown_grace_s)

    async def _status(self, request: Request) -> JSONResponse:
        ready = self.client.ready
        return JSONResponse(
            {
                "model": self.api.model,
                "ready": ready is not None,
                "uptime_s": round(time.time() - self.started, 3),
                "engine": {
                    "pid": self.client.pid,
                    "restarts": self.client.restarts,
                    "last_error": self.client.last_error,
                    "description": None if ready is None else msgspec.to_builtins(ready),
                    "stats": None if self.client.stats is None else msgspec.to_builtins(self.client.stats),
                },
                "breaker": {"mode": self.settings.breaker, "routes": self.alerting.gate.report()},
                "chaos": {
                    "enabled": self.settings.chaos,
                    "faults": self.chaos.controller.in_force,
                },
                "versions": _versions(),
            }
        )


class _Introductions:
    """An observer that tells telemetry and alerting which model runs, whenever one becomes ready."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        ready = self._service.client.ready
        if state == "ready" and ready is not None:
            # The name it is served under, not the one its author left in the file.
            model = self._service.api.model
            self._service.telemetry.engine_ready(msgspec.structs.replace(ready, model=model))
            self._service.alerting.set_model(model, ready.quantization)
            log.info("the model %s is ready (%s)", model, ready.quantization)

    def on_started(self, event: RequestStarted) -> None: ...

    def on_step(self, output: StepOutput) -> None: ...

    def on_text(self, event: ChoiceText) -> None: ...

    def on_ended(self, event: RequestEnded) -> None: ...

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None: ...


def _versions() -> dict[str, Any]:
    return {name: version(name) for name in _VERSIONS}
