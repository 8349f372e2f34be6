"""Composes alerting: rules, baseline, evaluator, breaker, notifier, webhook, and their routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alerting import baseline as baselines
from alerting.alerts import Alert, AlertBook, rfc3339
from alerting.baseline import Baseline, BaselineError
from alerting.breaker import Breaker
from alerting.canary.service import BUSY, CHANGED, Canaries
from alerting.collector import Collector
from alerting.evaluator import Evaluator
from alerting.metrics import AlertMetrics
from alerting.notifier import Notifier
from alerting.rules import load_rules
from alerting.sequential import special
from alerting.settings import AlertingSettings
from alerting.sink import EmbeddedSink
from alerting.store import NotificationStore
from alerting.tasks import end
from alerting.webhook import WebhookReceiver
from engine.api.body import body_of, decode
from engine.api.errors import ApiError
from telemetry.signals import BusinessEvent, LayerBatch, Lost, ResponseEnded, ResponseStarted, TokenBatch

_LOG = logging.getLogger("quaver.alerting")
_MAX_BODY = 4096
_ABANDONED_S = 60.0  # a calibration that hears nothing for so long may be taken over


class Alerting:
    """Everything that watches, pages and sheds. `sink` goes to telemetry, `gate` to the API.

    Raises RulesError for rules that cannot be used. A damaged or foreign baseline is no error:
    the evaluator reports itself blind and says why.
    """

    def __init__(
        self,
        settings: AlertingSettings,
        registry: CollectorRegistry,
        state_dir: Path,
        *,
        on_l1: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_l1(request_id, name)` hears which response raised an L1, and its cause."""
        self.settings = settings
        self.rules = load_rules(settings.rules_file)
        state_dir = state_dir.expanduser()
        self.baseline_path = (settings.baseline_file or state_dir / "baseline.json").expanduser()
        self._store = NotificationStore(
            state_dir / "alerts.jsonl", int(settings.alert_log_max_mb * 1024 * 1024)
        )
        self._receiver = WebhookReceiver(self._store)
        self._metrics = AlertMetrics(registry)
        self._notifier = self._make_notifier()
        self._book = AlertBook(self._on_alert)
        self.listeners: list[Callable[[Alert], None]] = []
        self.gate = Breaker(self.rules.breaker, settings.breaker)
        preset = settings.alert_preset or self.rules.default
        self.rules.preset(preset)
        self.evaluator = Evaluator(self.rules, preset, self._book, self.gate, self._metrics, on_l1=on_l1)
        self.canaries = Canaries(settings, self.rules, self._book, registry, path=state_dir / "canaries.json")
        self._collector: Collector | None = None
        self._baseline_problem: str | None = None
        self._model: tuple[str | None, str | None] = (None, None)
        self._task: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[Any] | None = None
        self.load_baseline()

    @property
    def sink(self) -> Alerting:
        """The SignalSink to hand to telemetry."""
        return self

    def set_model(self, model: str, quantization: str) -> None:
        """Tell which model runs, so that a baseline of another one is not trusted.

        The same model again, as after a restart of the model process, changes nothing.
        """
        if self._model != (model, quantization):
            self._model = (model, quantization)
            self.load_baseline()
            self.canaries.set_model(model, quantization)

    def load_baseline(self) -> None:
        """Put the baseline file in force, if there is one."""
        baseline, self._baseline_problem = None, None
        if self.baseline_path.exists():
            try:
                baseline = baselines.load(self.baseline_path)
            except BaselineError as error:
                self._baseline_problem = str(error)
                _LOG.warning("%s", error)
        self.evaluator.use(baseline, *self._model)

    def start_calibration(self) -> None:
        """Gather healthy responses from now on, from nothing; raises BaselineError while another is fed."""
        if self.canaries.calibrating:
            raise BaselineError(BUSY)
        if self._collector is not None and time.monotonic() - self._collector.heard < _ABANDONED_S:
            raise BaselineError(
                f"{BUSY}; it may be taken over once nothing has been answered for {_ABANDONED_S:g} s"
            )
        self._collector = Collector(self.rules)

    async def finish_calibration(self) -> Baseline:
        """Build, save and apply the baseline; raises BaselineError when too little was gathered.

        The fit takes seconds, on a thread: streams and the model's heartbeat go on.
        """
        collector = self._collector
        if collector is None:
            raise BaselineError("no calibration is running; start one first")
        model, quantization = self._model
        build = partial(collector.build, model=model, quantization=quantization or "unknown")
        baseline = await asyncio.to_thread(build)
        if self._collector is not collector:
            raise BaselineError("the calibration was cancelled while its baseline was built")
        baselines.archive(self.baseline_path)
        baselines.save(baseline, self.baseline_path)
        self._collector = None
        self.load_baseline()
        return baseline

    async def start(self) -> None:
        """Begin to evaluate and to deliver."""
        await self._notifier.start()
        self._preparation = asyncio.create_task(asyncio.to_thread(special))  # before any request needs it
        self._task = asyncio.create_task(self._run(), name="evaluator")
        await self.canaries.start()

    async def stop(self) -> None:
        """End the evaluator, deliver what waits."""
        await self.canaries.stop()
        if self._task is not None:
            await end(self._task)
            self._task = None
        await self._notifier.stop()

    def routes(self) -> list[Route]:
        """Return the HTTP routes; the server's middleware checks keys."""
        return [
            Route("/quaver/alerts", self._get_alerts, methods=["GET"]),
            Route("/quaver/alerts/webhook", self._receiver.handle, methods=["POST"]),
            Route("/quaver/alerts/calibration", self._get_calibration, methods=["GET"]),
            Route("/quaver/alerts/calibration", self._post_calibration, methods=["POST"]),
            *self.canaries.routes(),
        ]

    def state(self) -> dict[str, Any]:
        """Return what `GET /quaver/alerts` answers."""
        heard = self._receiver.watchdog_heard
        return {
            "active": [msgspec.to_builtins(alert) for alert in self._book.active.values()],
            "history": [msgspec.to_builtins(alert) for alert in reversed(self._book.history)],
            "events": list(reversed(self.evaluator.events)),
            "webhook": self._store.recent(),
            "rules": [rule.model_dump() for rule in self.evaluator.alert_rules()],
            "breaker": self.gate.report(),
            "transitions": [msgspec.to_builtins(t) for t in reversed(self.gate.transitions)],
            "evaluator": self.evaluator.report()
            | {
                "baseline_file": str(self.baseline_path),
                "baseline_error": self._baseline_problem,
                "delivery": self._notifier.report(),
                "watchdog_heard": None if heard is None else rfc3339(heard),
            },
        }

    def on_started(self, event: ResponseStarted) -> None:
        """Pass on to the evaluator, and to the collector while one gathers."""
        self.evaluator.on_started(event)
        if self._collector is not None:
            self._collector.on_started(event)

    def on_lost(self, request_id: str, choice: int, what: Lost) -> None:
        """Pass on."""
        self.evaluator.on_lost(request_id, choice, what)
        if self._collector is not None:
            self._collector.on_lost(request_id, choice, what)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Pass on."""
        self.evaluator.on_tokens(batch)
        if self._collector is not None:
            self._collector.on_tokens(batch)

    def on_layers(self, batch: LayerBatch) -> None:
        """Pass on."""
        self.evaluator.on_layers(batch)
        if self._collector is not None:
            self._collector.on_layers(batch)

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """Pass on."""
        self.evaluator.on_sentence(request_id, choice, tokens)
        if self._collector is not None:
            self._collector.on_sentence(request_id, choice, tokens)

    def on_ended(self, event: ResponseEnded) -> None:
        """Pass on."""
        self.evaluator.on_ended(event)
        if self._collector is not None:
            self._collector.on_ended(event)

    def on_business(self, event: BusinessEvent) -> None:
        """Pass on."""
        self.evaluator.on_business(event)
        if self._collector is not None:
            self._collector.on_business(event)

    def _make_notifier(self) -> Notifier:
        settings = self.settings
        if settings.alertmanager_url is None:
            return EmbeddedSink(self._receiver, self._metrics)
        from alerting.alertmanager import AlertmanagerClient  # noqa: PLC0415 - slow to import

        return AlertmanagerClient(
            settings.alertmanager_url,
            self._metrics,
            generator_url=settings.public_url,
            resend_s=settings.alert_resend_s,
            timeout_s=settings.alert_timeout_s,
        )

    def _on_alert(self, alert: Alert) -> None:
        _LOG.warning("%s %s on %s: %s", alert.level, alert.name, alert.route, alert.state)
        self._notifier.notify(alert)
        for listener in self.listeners:
            listener(alert)

    async def _run(self) -> None:
        """Tick for ever; a pass that fails leaves the heartbeat stale, which Prometheus pages."""
        while True:
            try:
                self.evaluator.tick()
            except Exception:
                _LOG.exception("the evaluator's pass failed")
            await asyncio.sleep(self.settings.alert_tick_s)

    async def _get_alerts(self, request: Request) -> JSONResponse:
        return JSONResponse(self.state())

    async def _get_calibration(self, request: Request) -> JSONResponse:
        return JSONResponse(self._calibration())

    async def _post_calibration(self, request: Request) -> Response:
        """Body {"action": "start" | "finish" | "cancel"}; 409: one runs already, or has too little.

        With the "id" that `start` told, the others refuse to act on a later calibration than that.
        """
        try:
            body = decode(await body_of(request, _MAX_BODY))
            action, named = body["action"], body.get("id")
        except ApiError as error:
            return error.response()
        except (ValueError, KeyError, TypeError, AttributeError):
            action = named = None
        try:
            if action == "start":
                self.start_calibration()
            elif action == "finish":
                self._check_calibration(named)
                await self.finish_calibration()
            elif action == "cancel":
                self._check_calibration(named)
                self._collector = None
            else:
                return _error(400, "bad_action", 'send {"action": "start"}, "finish" or "cancel"')
        except BaselineError as error:
            return _error(409, "calibration", str(error))
        except OSError as error:
            return _error(507, "not_saved", f"the baseline could not be written: {error.strerror}")
        return JSONResponse(self._calibration())

    def _check_calibration(self, named: object) -> None:
        if named is not None and (self._collector is None or self._collector.id != named):
            raise BaselineError(CHANGED)

    def _calibration(self) -> dict[str, Any]:
        gathered: dict[str, int] = {}
        if self._collector is not None:
            for sample in self._collector.samples:
                key = f"{sample.route}/{sample.band}"
                gathered[key] = gathered.get(key, 0) + 1
        return {
            "running": self._collector is not None,
            "id": None if self._collector is None else self._collector.id,
            "responses": sum(gathered.values()),
            "by_stratum": gathered,
            "baseline": self.evaluator.baseline_summary(),
        }


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}},
        status_code=status,
    )
