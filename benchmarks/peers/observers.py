"""The observers of `quaver serve`, told in this process what the front process would tell them."""

from __future__ import annotations

import time
from pathlib import Path

from engine.hooks import RequestEnded, RequestStarted
from engine.messages import Finish, Ready, StepOutput, Submit
from engine.process.client import notify
from quaver.service import Service
from quaver.settings import Settings


class Observers:
    """A server without its sockets and without its model process: an engine in this one takes its place."""

    def __init__(self, state: Path, ready: Ready) -> None:
        self._service = Service(Settings(state_dir=state))
        self._service.client.ready = ready
        self._open: dict[str, RequestStarted] = {}
        notify(self._service.api.observers, "on_engine", "ready")

    async def start(self) -> None:
        """Begin the periodic work: evaluator, joint windows, leases."""
        self._service.telemetry.start()
        await self._service.alerting.start()
        await self._service.chaos.start()

    def started(self, request: Submit) -> None:
        """A request was handed to the engine."""
        event = RequestStarted(
            meta=request.meta,
            time=time.time(),
            endpoint="completions",
            stream=True,
            model=self._service.api.model,
            prompt_tokens=len(request.token_ids),
            choices=1,
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            faults=[],
            prompt=None,
        )
        self._open[request.meta.request_id] = event
        notify(self._service.api.observers, "on_started", event)

    def heard(self, output: StepOutput) -> None:
        """The engine took a step."""
        notify(self._service.api.observers, "on_step", output)
        for finish in output.finished:
            self._ended(finish)

    def background_s(self) -> float:
        """Processor seconds of the thread that observers have: the records' writer."""
        return self._service.telemetry.writer.cpu_s()

    def spent_s(self) -> float:
        """Processor seconds of all that observers do, as the front tells the engine."""
        return self._service.client.signals_s()

    def settle(self) -> None:
        """Have everything written that was told so far."""
        self._service.telemetry.catch_up()
        self._service.telemetry.writer.flush()

    def _ended(self, finish: Finish) -> None:
        started = self._open.pop(finish.request_id)
        now = time.time()
        duration = now - started.time
        tokens = finish.completion_tokens
        first = finish.queued_s + finish.prefill_s
        event = RequestEnded(
            meta=started.meta,
            time=now,
            reason=finish.reason,
            disconnected=False,
            error=finish.error,
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=tokens,
            queued_s=finish.queued_s,
            prefill_s=finish.prefill_s,
            first_token_s=first if tokens else None,
            duration_s=duration,
            token_times_s=[max(0.0, duration - first) / tokens] * (tokens - 1) if tokens else [],
            faults=[],
            aggregates=finish.aggregates,
            output=None,
        )
        notify(self._service.api.observers, "on_ended", event)
