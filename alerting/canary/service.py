"""Asks canaries at a low rate, judges them, and builds their baseline; `GET/POST /quaver/canaries`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from alerting.alerts import AlertBook
from alerting.baseline import BaselineError
from alerting.canary import baseline as baselines
from alerting.canary.baseline import Answer, CanaryBaseline, Judge
from alerting.canary.prompt import Canary, Guarded, Port, digest
from alerting.canary.reading import Reader, Reading
from alerting.canary.watch import Watch
from alerting.rules import Rules
from alerting.settings import AlertingSettings
from alerting.tasks import end
from engine.api.body import body_of, decode
from engine.api.errors import ApiError

_LOG = logging.getLogger("quaver.alerting")

_MAX_ROUNDS = 60
BUSY = "a calibration is running already: wait until it ends, or `quaver calibrate --cancel`"
CHANGED = "that calibration is over: it was cancelled, or another one took its place"
_MAX_BODY = 4096


class Canaries:
    """Owns the asking. `reader` goes to telemetry as a sink; `port` sends, `book` takes the alert.

    Nothing is asked before `start`, nor on a schedule without a baseline that holds for what runs.
    """

    def __init__(
        self,
        settings: AlertingSettings,
        rules: Rules,
        book: AlertBook,
        registry: CollectorRegistry,
        *,
        path: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.reader = Reader()
        self.watch = Watch(rules, book)
        self._settings = settings
        self._clock = clock
        self._port: Port | None = None
        self._canaries: list[Canary] = []
        self._judge: Judge | None = None
        self._baseline: CanaryBaseline | None = None
        self._why: str | None = "no canaries yet"
        self._model: tuple[str | None, str | None] = (None, None)
        self._turn = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._making: asyncio.Task[None] | None = None
        self._calibration = ""  # id of the newest
        self._progress = (0, 0)
        self._failure: str | None = None
        self._answers = Counter(
            "quaver_canary_answers",
            "Canaries by what came back: healthy, suspicious, wrong, failed",
            ["route", "result"],
            registry=registry,
        )
        self._evidence = Gauge(
            "quaver_canary_evidence_log",
            "ln of the evidence of canaries against health",
            ["route"],
            registry=registry,
        )
        self._usable = Gauge(
            "quaver_canaries_usable", "1 while canaries have a baseline that holds", registry=registry
        )

    def ask(self, canaries: Sequence[Canary], port: Port) -> None:
        """Tell what to ask, and the way to send it."""
        self._canaries, self._port = list(canaries), port
        self._load()

    def set_model(self, model: str, quantization: str) -> None:
        """Tell which model runs; a baseline of another one is not used."""
        if self._model != (model, quantization):
            self._model = (model, quantization)
            self._load()

    async def start(self) -> None:
        """Begin to ask on schedule."""
        if self._settings.canary_every_s > 0:
            self._task = asyncio.create_task(self._run(), name="canaries")

    async def stop(self) -> None:
        """Ask no more."""
        for task in (self._task, self._making):
            if task is not None:
                await end(task)
        self._task = self._making = None

    def routes(self) -> list[Route]:
        """Return the HTTP routes; the server's middleware checks keys."""
        return [
            Route("/quaver/canaries", self._get, methods=["GET"]),
            Route("/quaver/canaries", self._post, methods=["POST"]),
        ]

    @property
    def calibrating(self) -> bool:
        """Whether a baseline is being made."""
        return self._making is not None and not self._making.done()

    def state(self) -> dict[str, Any]:
        """Return what `GET /quaver/canaries` answers."""
        done, total = self._progress
        baseline = self._baseline
        return {
            "every_s": self._settings.canary_every_s,
            "canaries": [canary.id for canary in self._canaries],
            "usable": self._judge is not None,
            "why_not": self._why,
            "baseline": None
            if baseline is None
            else {
                "created": baseline.created,
                "model": baseline.model,
                "quantization": baseline.quantization,
                "failed_in_health": {n: [c.events, c.trials] for n, c in baseline.counts.items()},
                "limits": baseline.limits(0.05),
            },
            "calibration": {
                "id": self._calibration,
                "running": self.calibrating,
                "asked": done,
                "of": total,
                "error": self._failure,
            },
            "guarded": self.watch.report(),
            "recent": [msgspec.to_builtins(seen) for seen in reversed(self.watch.seen)],
        }

    async def ask_next(self) -> bool:
        """Ask one canary and judge its answer; False when there was none to judge."""
        port, judge = self._port, self._judge
        if port is None or judge is None:
            return False
        turn = next(self._turn)
        # Every guarded pair gets every canary, cached and not, before anything is asked twice.
        guarded = port.guarded() or [Guarded()]
        one = guarded[turn % len(guarded)]
        turn //= len(guarded)
        cached = turn % 2 == 0
        canary = self._canaries[turn // 2 % len(self._canaries)]
        request_id = f"canary-{uuid.uuid4().hex}"
        text, reading = await self._answer(request_id, canary, one, cached=cached)
        if judge is not self._judge:  # another baseline came meanwhile
            return False
        right = text is not None and canary.right(text)
        comparison = None if reading is None else judge.compare(canary.id, reading, right)
        if text is None or comparison is None:
            self._answers.labels(one.route, "failed").inc()
            return False
        self.watch.add(request_id, canary.id, one, comparison, cached=cached, right=right, now=self._clock())
        failed = any(comparison.tests.values())
        wrong = comparison.tests.get(baselines.ANSWER, False)
        result = "wrong" if wrong else "suspicious" if failed else "healthy"
        self._answers.labels(one.route, result).inc()
        for route, log in self.watch.logs().items():
            self._evidence.labels(route).set(log)
        return True

    async def calibrate(self, rounds: int) -> CanaryBaseline:
        """Ask every canary `rounds` times in health and put the baseline in force; raises BaselineError."""
        port = self._port
        if port is None or not self._canaries:
            raise BaselineError("this server has no canaries")
        model, quantization = self._model
        if model is None or quantization is None:
            raise BaselineError("the model is not ready yet; try again soon")
        self._progress = (0, rounds * len(self._canaries))
        answered: list[list[Answer]] = []
        for number in range(rounds):
            at_once, cached = baselines.CONDITIONS[number % len(baselines.CONDITIONS)]
            together = asyncio.Semaphore(at_once)
            found = await asyncio.gather(*(self._healthy(c, together, cached) for c in self._canaries))
            answered.append([answer for answer in found if answer is not None])
        made = baselines.build(
            answered, model=model, quantization=quantization, prompts=digest(self._canaries)
        )
        await asyncio.to_thread(baselines.save, made, self.path)
        self._load()
        return made

    async def _healthy(self, canary: Canary, together: asyncio.Semaphore, cached: bool) -> Answer | None:
        async with together:
            request_id = f"canary-{uuid.uuid4().hex}"
            text, reading = await self._answer(request_id, canary, Guarded(), cached=cached)
        self._progress = (self._progress[0] + 1, self._progress[1])
        return None if text is None or reading is None else Answer(canary.id, reading, canary.right(text))

    async def _answer(
        self, request_id: str, canary: Canary, guarded: Guarded, *, cached: bool
    ) -> tuple[str | None, Reading | None]:
        """Return the text, and what the signals left, which sinks have heard once the port returns."""
        assert self._port is not None
        self.reader.expect(request_id)
        try:
            text = await self._port.ask(request_id, canary, guarded, cached=cached)
        finally:
            reading = self.reader.take(request_id)
        return text, reading

    def _load(self) -> None:
        """Put the baseline file in force, if there is one that holds for what runs."""
        baseline: CanaryBaseline | None = None
        why: str | None = "no baseline of canaries; run `quaver calibrate`"
        if self.path.exists():
            try:
                baseline = baselines.load(self.path)
                why = baseline.mismatch(*self._model, digest(self._canaries))
            except BaselineError as error:
                why = str(error)
                _LOG.warning("%s", error)
        holds = baseline if why is None else None
        self._baseline, self._why = baseline, why
        self._judge = Judge(holds) if holds is not None else None
        self.watch.use(holds, self._clock())
        self._usable.set(holds is not None)

    async def _run(self) -> None:
        """Ask for ever; the first only after a whole period, so that a start is not slowed."""
        while True:
            await asyncio.sleep(self._settings.canary_every_s)
            if not self.calibrating:
                try:
                    await self.ask_next()
                except Exception:
                    _LOG.exception("a canary failed")

    async def _make(self, rounds: int) -> None:
        self._failure = None
        try:
            await self.calibrate(rounds)
        except (BaselineError, OSError) as error:
            self._failure = str(error)
        except Exception as error:
            _LOG.exception("the canaries' baseline was not made")
            self._failure = f"{type(error).__name__}: {error}"

    async def _get(self, request: Request) -> JSONResponse:
        return JSONResponse(self.state())

    async def _post(self, request: Request) -> Response:
        """Body {"action": "calibrate", "rounds": 24} or {"action": "cancel"}; answers at once.

        409: they are being asked already, or "id" names an earlier calibration than that to cancel.
        """
        try:
            body = decode(await body_of(request, _MAX_BODY))
            action, rounds, named = body["action"], body.get("rounds", 24), body.get("id")
        except ApiError as error:
            return error.response()
        except (ValueError, KeyError, TypeError, AttributeError):
            action, rounds, named = None, 0, None
        if action == "calibrate" and type(rounds) is int and baselines.ROUNDS <= rounds <= _MAX_ROUNDS:
            if self.calibrating:
                return ApiError(409, "calibration", BUSY).response()
            self._calibration = uuid.uuid4().hex
            self._making = asyncio.create_task(self._make(rounds), name="canaries' baseline")
        elif action == "cancel":
            if named is not None and named != self._calibration:
                return ApiError(409, "calibration", CHANGED).response()
            if self._making is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await end(self._making)
        else:
            limits = f"rounds from {baselines.ROUNDS} to {_MAX_ROUNDS}"
            message = f'send {{"action": "calibrate", "rounds": 24}} ({limits}) or {{"action": "cancel"}}'
            return ApiError(400, "bad_action", message).response()
        return JSONResponse(self.state())
