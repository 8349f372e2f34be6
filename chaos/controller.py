"""The chaos controller: journals, starts, ends and watches faults. Front process, event loop.

It owns the list of faults; the leases themselves live where the faults act and end there by themselves.
A fault is journalled before it takes effect. Ending comes first and is journalled after, so that it
works on a full disk and with a hung model process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from chaos.admission import Admission, chain
from chaos.contract import ChaosError, Ended, ModelPort, Running, Stage, StartFault
from chaos.leases import Leases
from chaos.reverts import Reverts
from chaos.scribe import Scribe
from chaos.stops import Stops

log = logging.getLogger("quaver.chaos")

CONFIRM_S = 2.0  # how long ending waits for the model process to say so
REMEMBERED = 50  # faults that have ended


class Controller:
    """Faults of one server. Every method is called on the front's event loop.

    `fronts` are the places in this process where faults act; what has none of them acts in the
    model process.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        fronts: Mapping[str, Leases[Any]],
        model: ModelPort,
        scribe: Scribe,
        stops: Stops,
        reverts: Reverts,
    ) -> None:
        self.admission = admission
        self.halted = scribe.journal.halted
        self._fronts = fronts
        self._model = model
        self._scribe = scribe
        self._stops = stops
        self.reverts = reverts
        self._running: dict[str, Running] = {}
        self._ended: deque[Ended] = deque(maxlen=REMEMBERED)
        self._tasks: set[asyncio.Task[Any]] = set()
        model.fault_listeners.append(self.on_faults)
        scribe.journal.recover()

    @property
    def in_force(self) -> int:
        """How many faults are on the list."""
        return len(self._running)

    async def start(self, request: StartFault, by: str = "operator") -> dict[str, Any]:
        """Start a fault and return its listing; raises ChaosError when it is refused.

        Returns once the fault is in force where it acts.
        """
        running = self._admit(request, by)
        self._running[running.fault_id] = running
        try:
            await self._begin(running)
        except BaseException as error:
            if running.stage >= Stage.ATTACHED:
                self._spawn(self._detach(running))
            self._drop(running, f"never started: {error or type(error).__name__}")
            raise
        return running.listing(chain(running, self._running.values()))

    def preview(self, request: StartFault, by: str = "operator") -> dict[str, Any]:
        """Return whom a fault would reach and what it would act with; raises as `start` would."""
        running = self._admit(request, by)
        beside = [*self._running.values(), running]
        reached = self.admission.preview(request.selector)
        return reached | {"fault": running.facts(), "chain": chain(running, beside)}

    def _admit(self, request: StartFault, by: str) -> Running:
        if self.halted is not None and self.admission.settings.chaos:
            raise ChaosError(
                409, "chaos_halted", f"chaos is halted ({self.halted}); unblock it before starting a fault"
            )
        return self.admission.admit(request, by, self._running.values())

    async def _begin(self, running: Running) -> None:
        """Take an admitted fault into force, step by step; a halt in between wins."""
        stops = (self._stops.always, running.stop)
        held = self._stops.holds(*stops) or await self._stops.look_up(*stops, patience_s=0)
        if held is not None:
            raise ChaosError(409, "stop_condition", f"nothing was started, as a stop condition holds: {held}")
        async with self.reverts.turn:
            if all(other.stage < Stage.CLEARED for other in self._running.values()):
                await self.reverts.remember()
            running.stage = Stage.CLEARED
        self._expect(running)
        running.stage = Stage.JOURNALLED
        error = await self._scribe.write_ahead("start", **running.facts())
        if error is not None:
            raise ChaosError(503, "journal_unavailable", f"nothing was started: {error}")
        self._expect(running)
        running.stage, running.started = Stage.ATTACHED, time.time()
        running.deadline = time.monotonic() + running.ttl_s
        if not await self._attach(running):
            raise ChaosError(503, "model_unavailable", "the model process did not take the fault; try again")
        self._expect(running)
        running.stage = Stage.ACTIVE

    def _expect(self, running: Running) -> None:
        if running.fault_id not in self._running:
            raise ChaosError(409, "chaos_halted", "the fault was ended while it was being started")

    async def _attach(self, running: Running) -> bool:
        front = self._fronts.get(running.fault.place)
        if front is not None:
            front.attach(running.message())
            return True
        try:
            return await self._model.attach_fault(running.message())
        except Exception:
            log.exception("fault %s could not be sent to the model process", running.fault_id)
            return False

    async def _detach(self, running: Running) -> bool:
        front = self._fronts.get(running.fault.place)
        if front is None:
            return await self._within(self._model.detach_fault(running.fault_id))
        front.detach(running.fault_id)
        return True

    async def end(self, fault_id: str, reason: str = "stopped", by: str = "operator") -> dict[str, Any]:
        """End a fault. Ending an unknown or ended one is harmless and says `ended: false`.

        `known` says whether this server ever had it.
        """
        running = self._running.pop(fault_id, None)
        told = {"fault_id": fault_id, "ended": running is not None, "confirmed": True}
        if running is None:
            return told | {"known": fault_id in self._scribe.journal.started}
        confirmed = await self._detach(running)
        await self._scribe.settle(self._close_books(running, reason, by=by, confirmed=confirmed))
        return told | {"known": True, "confirmed": confirmed, "touched": running.count}

    async def halt(self, by: str = "operator", reason: str | None = None) -> dict[str, Any]:
        """End every fault and refuse new ones until `unblock`. Never waits long, whatever hangs.

        Nothing acts in this process any more before the first wait.
        """
        self.halted = reason or f"by {by}"
        ended = list(self._running.values())
        self._running.clear()
        for front in self._fronts.values():
            front.detach(None)
        self._scribe.note("halt", by=by, reason=self.halted, faults=[running.fault_id for running in ended])
        confirmed = await self._within(self._model.detach_fault(None))
        note = None
        for running in ended:
            sure = confirmed or running.fault.place in self._fronts
            note = self._close_books(running, f"halted: {self.halted}", by=by, confirmed=sure)
        await self._scribe.settle(note)
        return {"blocked": True, "ended": [running.fault_id for running in ended], "confirmed": confirmed}

    async def unblock(self, by: str = "operator") -> dict[str, Any]:
        """Allow new starts again. Faults that were halted stay ended."""
        self.halted = None
        await self._scribe.settle(self._scribe.note("unblock", by=by))
        return {"blocked": False}

    async def note(self, text: str, by: str = "operator") -> dict[str, Any]:
        """Write a line of the operator's own to the journal."""
        note = self._scribe.note("note", text=text, by=by)
        await self._scribe.settle(note)
        return note.result() if note.done() else {"text": text}

    async def close(self) -> None:
        """End every fault because the server stops, and settle the journal."""
        self.reverts.give_up("the server stopped")
        for task in list(self._tasks):
            task.cancel()
        for fault_id in list(self._running):
            await self.end(fault_id, "server stopped", by="server")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stops.close()
        await self._scribe.close()

    async def _within(self, answer: Coroutine[Any, Any, bool]) -> bool:
        try:
            return bool(await asyncio.wait_for(answer, CONFIRM_S))
        except Exception:
            return False  # its lease ends by itself

    def _drop(self, running: Running, reason: str) -> None:
        """Take a fault that is over off the list."""
        if self._running.pop(running.fault_id, None) is not None:
            self._close_books(running, reason, by="server")

    def _close_books(self, running: Running, reason: str, **facts: Any) -> asyncio.Future[Any] | None:
        """Note the end of a fault that is off the list, and have its revert verified if it acted."""
        if running.stage < Stage.JOURNALLED:
            return None
        ended = Ended(
            fault_id=running.fault_id,
            kind=running.fault.kind,
            reason=reason,
            touched=running.count,
            started=running.started,
            lasted_s=round(time.time() - running.started, 3),
        )
        note = self._scribe.note("end", **ended.listing(), **facts)
        if running.stage >= Stage.ATTACHED:
            self._ended.append(ended)
            self.reverts.owe(ended)
            self._spawn(self._verify())
        return note

    async def _verify(self) -> None:
        """Ask the canary once nothing is in force any more, and note what it says."""
        async with self.reverts.turn:
            if any(running.stage >= Stage.CLEARED for running in self._running.values()):
                return  # the last of them to end asks for all
            for ended in await self.reverts.verify():
                verdict = msgspec.to_builtins(ended.reverted)
                self._scribe.note("revert", fault_id=ended.fault_id, kind=ended.kind, **verdict)

    def tick(self) -> None:
        """Take note of leases whose time is over and of stop conditions. Called a few times a second."""
        now = time.monotonic()
        for front in self._fronts.values():
            front.expire(now)
        for running in list(self._running.values()):
            if running.deadline <= now:
                self._spawn(self._detach(running))
                self._drop(running, "expired")
        self.check()

    def check(self) -> None:
        """Halt if an alert or the interruptions of the moment are a stop condition of what is in force."""
        held = self._stops.holds(*self._conditions()) if self._running else None
        if held is not None:
            self.halt_at(f"stop condition: {held}")

    async def look_up(self) -> None:
        """Halt if Prometheus says so, or is silent. Called every other second."""
        if not self._running:
            self._stops.forget()
            return
        held = await self._stops.look_up(*self._conditions())
        if held is not None:
            self.halt_at(f"stop condition: {held}")

    def _conditions(self) -> list[Any]:
        return [self._stops.always, *(running.stop for running in self._running.values())]

    def halt_at(self, why: str) -> None:
        """Halt what is in force, on nobody's order; harmless when nothing is."""
        if not self._running or self.halted is not None:
            return
        self.halted = why
        log.warning("chaos is halted, %s", self.halted)
        self._spawn(self.halt("server", self.halted))

    def on_faults(self, fault_ids: list[str]) -> None:
        """Hear what is in force in the model process. A fault it lost is over: never attached again."""
        for running in list(self._running.values()):
            here = running.fault.place not in self._fronts and running.stage is Stage.ACTIVE
            if here and running.fault_id not in fault_ids:
                over = running.deadline - time.monotonic() < 0.5
                self._drop(running, "expired" if over else "model process lost")

    def touch(self, request_id: str, fault_id: str) -> None:
        """Count a request that a fault changed."""
        running = self._running.get(fault_id)
        if running is not None:
            running.touched.add(request_id)

    def status(self) -> dict[str, Any]:
        """Return the switch, the caps, what is in force and what was, the kinds and the recent journal."""
        beside = self._running.values()
        return {
            "enabled": self.admission.settings.chaos,
            "caps": self.admission.limits(),
            "lever": {"blocked": self.halted is not None, "reason": self.halted},
            "stop": self._stops.always.to_wire(),
            "faults": [running.listing(chain(running, beside)) for running in beside],
            "ended": [ended.listing() for ended in reversed(self._ended)],
            "kinds": self.admission.caps.kinds,
            "journal": list(self._scribe.journal.recent)[::-1],
        }

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
