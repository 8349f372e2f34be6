"""The front's side of the model process: start it, talk to it, watch it, start it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import zmq.asyncio

from engine.hooks import Observer
from engine.messages import (
    Abort,
    AttachFault,
    DetachFault,
    EngineStats,
    FaultsActive,
    Ping,
    Ready,
    Shutdown,
    StepOutput,
    Submit,
    ToModel,
)
from engine.process.channel import Channel, deliver
from engine.process.child import ModelProcess
from engine.process.spawn import EngineStartError, Spawned, spawn
from engine.settings import EngineSettings

PING_S = 0.5
_ANSWER_S = 10.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0  # a process that lived this long starts the backoff anew

_MAX_COMPLAINTS = 100
_complaints: set[tuple[str, str, str]] = set()

log = logging.getLogger("quaver.engine")


class EngineLostError(RuntimeError):
    """There is no model process to talk to right now."""


class EngineClient:
    """Owns the model process and the streams of requests in it. Lives on one event loop.

    `observers` hear every StepOutput once, before the requests it belongs to do. `fault_listeners`
    hear the ids in force whenever the model process reports them. `spawned`, with the same settings and
    hook, is loading already and becomes the first process. Invariant: every channel that
    `submit` returned gets a Finish for each of its choices, whatever happens to the process.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        hook: str | None = None,
        spawned: Spawned | None = None,
        observers: Iterable[Observer] = (),
        ready_timeout_s: float = 120.0,
        hung_s: float = 60.0,
    ) -> None:
        self.settings = settings
        self.observers = list(observers)
        self.fault_listeners: list[Callable[[list[str]], None]] = []
        self.step_listeners: list[Callable[[EngineStats], None]] = []
        self.signals_s: Callable[[], float] = lambda: 0.0  # what they took in this process so far
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self.faults_active: list[str] = []
        self.restarts = 0
        self.last_error: str | None = None
        self._hook = hook
        self._spawned = spawned
        self._ready_timeout_s = ready_timeout_s
        self._hung_s = hung_s
        self._channels: dict[str, Channel] = {}
        self._context = zmq.asyncio.Context()
        self._process: ModelProcess | None = None
        self._connection: list[asyncio.Task[None]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._heard = time.monotonic()
        self._asked = 0
        self._answers: deque[tuple[int, asyncio.Future[list[str]]]] = deque()
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id of the model process, if there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def open_choices(self) -> int:
        """Choices handed to the engine that have not ended."""
        return sum(len(channel.open) for channel in self._channels.values())

    async def start(self, wait: bool = True) -> None:
        """Start the model process; with `wait`, return when it is ready.

        Raises EngineStartError when the first start fails (with `wait`; without, it is tried again
        with growing pauses, and `last_error` says why).
        """
        self._first = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._first, retry_first=not wait))
        if wait:
            try:
                await self._first
            except BaseException:
                await self.stop(grace_s=0)
                raise

    async def stop(self, grace_s: float = 10.0) -> None:
        """Give running requests `grace_s` to finish, end the rest with `abort`, end the process."""
        self._stopping = True
        await self._quiet(grace_s)
        if self._process is not None:
            if self.ready is not None:
                self._process.send(Shutdown())
            else:
                self._process.terminate()
            await self._process.ended(5)
            await self._quiet(0.2)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._clear("abort", "the server is shutting down")
        self._context.destroy(linger=0)
        self._tell("stopped")

    def submit(self, *requests: Submit) -> Channel:
        """Hand the choices of one request to the engine and return its channel.

        Raises EngineLostError while the model process is not ready.
        """
        if self.ready is None or self._stopping:
            raise EngineLostError(self.last_error or "the model process is not ready")
        request_id = requests[0].meta.request_id
        if not self.open_choices:
            self._heard = time.monotonic()
        channel = Channel(request_id, [request.choice for request in requests])
        self._channels[request_id] = channel
        for request in requests:
            self._send(request)
        return channel

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a choice of a request, or every one, in whatever state; the channel still gets its Finish."""
        if request_id in self._channels:
            self._send(Abort(request_id, choice))

    def release(self, request_id: str) -> None:
        """Forget a request's channel, aborting what still runs. Called once its reader is gone."""
        channel = self._channels.pop(request_id, None)
        if channel is not None and channel.open:
            self._send(Abort(request_id))

    async def attach_fault(self, fault: AttachFault) -> bool:
        """Attach a fault; True once the model process says that it is in force.

        False when it was refused there (its log says why), or when the process is gone or silent.
        """
        return fault.fault_id in await self._ask(fault)

    async def detach_fault(self, fault_id: str | None = None) -> bool:
        """End a fault, or all; True once the model process says so. A process that is gone has none."""
        left = await self._ask(DetachFault(fault_id))
        return fault_id not in left if fault_id is not None else not left

    async def _ask(self, message: AttachFault | DetachFault) -> list[str]:
        """Send, and return the ids in force once the model process has obeyed."""
        if self.ready is None:
            return []
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._send(message)  # first: one that cannot be sent is not counted, as nobody answers it
        self._asked += 1
        self._answers.append((self._asked, answer))
        try:
            return await asyncio.wait_for(answer, _ANSWER_S)
        except TimeoutError:
            return list(self.faults_active)

    async def _quiet(self, seconds: float) -> None:
        """Wait until no choice is open, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self.open_choices and self.ready is not None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _supervise(self, first: asyncio.Future[None], retry_first: bool) -> None:
        failures = 0
        while not self._stopping:
            began = time.monotonic()
            try:
                process = await self._launch()
            except EngineStartError as error:
                await self._clear("error", "the model process could not be started")
                self.last_error = str(error)
                if not first.done() and not retry_first:
                    first.set_exception(error)
                    return
                log.error("%s", error)
            else:
                if not first.done():
                    first.set_result(None)
                self._tell("ready")
                await self._watch(process)
                if self._stopping:
                    return
                self.last_error = f"the model process died ({process.cause})"
                log.error("%s; starting it again", self.last_error)
                await self._clear("error", self.last_error)
                self._tell("lost")
            failures = 1 if time.monotonic() - began > _STEADY_S else failures + 1
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])
            self.restarts += 1
            self._tell("restarting")

    async def _launch(self) -> ModelProcess:
        spawned, self._spawned = self._spawned or spawn(self.settings, self._hook), None
        process = await ModelProcess.adopt(self._context, spawned)
        self._process = process
        self.ready = await process.hello(self._ready_timeout_s)
        self.last_error = None
        self._asked = 0
        self._heard = time.monotonic()
        self._connection = [
            asyncio.create_task(self._read(process)),
            asyncio.create_task(self._ping(process)),
        ]
        return process

    async def _watch(self, process: ModelProcess) -> None:
        """Return when the process is dead or does not answer although it has work."""
        while not await process.ended(min(1.0, self._hung_s / 4)):
            silent = self.open_choices and time.monotonic() - self._heard > self._hung_s
            if silent or any(task.done() for task in self._connection):
                log.error("the model process (pid %d) does not answer: killing it", process.pid)
                await process.close()
                return

    async def _read(self, process: ModelProcess) -> None:
        while True:
            message = await process.receive()
            self._heard = time.monotonic()
            if isinstance(message, StepOutput):
                self.stats = message.stats
                for listener in self.step_listeners:
                    listener(message.stats)
                notify(self.observers, "on_step", message)
                deliver(message, self._channels)
            elif isinstance(message, FaultsActive):
                self._take_faults(message)

    async def _ping(self, process: ModelProcess) -> None:
        told = self.signals_s()
        while True:
            spent = self.signals_s()
            process.send(Ping(time.time(), spent - told))
            told = spent
            await asyncio.sleep(PING_S)

    def _take_faults(self, message: FaultsActive) -> None:
        self.faults_active = message.fault_ids
        while self._answers and self._answers[0][0] <= message.obeyed:
            answer = self._answers.popleft()[1]
            if not answer.done():
                answer.set_result(message.fault_ids)
        for listener in self.fault_listeners:
            try:
                listener(message.fault_ids)
            except Exception:
                log.exception("a fault listener failed")

    async def _clear(self, reason: Literal["error", "abort"], error: str) -> None:
        """Leave nothing of a process that is gone: end its requests, tasks, questions."""
        self.ready = None
        for task in self._connection:
            task.cancel()
        for result in await asyncio.gather(*self._connection, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("the connection to the model process failed", exc_info=result)
        self._connection = []
        if self._process is not None:
            await self._process.close()
            self._process = None
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.fail(reason, error)
        self._take_faults(FaultsActive([], self._asked))

    def _send(self, message: ToModel) -> None:
        if self._process is not None:
            self._process.send(message)

    def _tell(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        notify(self.observers, "on_engine", state)


def notify(observers: Iterable[Observer], method: str, *arguments: Any) -> None:
    """Call `method` of every observer; one that fails disturbs nobody and is logged once per error."""
    for observer in observers:
        try:
            getattr(observer, method)(*arguments)
        except Exception as error:
            complaint = (type(observer).__name__, method, repr(error))
            if complaint not in _complaints and len(_complaints) < _MAX_COMPLAINTS:
                _complaints.add(complaint)
                log.exception("observer %s failed in %s", *complaint[:2])
