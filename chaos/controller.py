"""The chaos controller: validates, caps, journals, starts and ends faults. Front process, event loop.

It owns the list of faults; the leases themselves live where the faults act and end there by themselves.
A fault is journalled before it takes effect. Ending comes first and is journalled after, so that it
works on a full disk and with a hung model process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from typing import Any

from chaos.contract import ChaosError, ModelPort, Running, StartFault
from chaos.faults.noise import Noise
from chaos.faults.registry import describe, parse_fault
from chaos.prompt_hook import PromptHook
from chaos.scribe import Scribe
from chaos.selector import parse_selector
from chaos.settings import ChaosSettings
from engine.messages import RequestMeta

log = logging.getLogger("quaver.chaos")

CONFIRM_S = 2.0  # how long ending waits for the model process to say so


class Controller:
    """Faults of one server. Every method is called on the front's event loop."""

    def __init__(
        self, settings: ChaosSettings, prompt_hook: PromptHook, model: ModelPort, scribe: Scribe
    ) -> None:
        self.settings = settings
        self.blocked = scribe.journal.halted
        self._prompt = prompt_hook
        self._model = model
        self._scribe = scribe
        self._running: dict[str, Running] = {}
        self._recent: deque[RequestMeta] = deque(maxlen=500)
        self._tasks: set[asyncio.Task[Any]] = set()
        prompt_hook.applied = self.touch
        model.fault_listeners.append(self.on_faults)
        for fault_id, entry in scribe.journal.open_leases.items():
            scribe.journal.remember("end", fault_id=fault_id, kind=entry.get("kind"), reason="process lost")

    async def start(self, request: StartFault, by: str = "operator") -> dict[str, Any]:
        """Start a fault and return its listing; raises ChaosError when it is refused.

        Returns once the fault is in force where it acts.
        """
        running = self._admit(request, by)
        self._running[running.fault_id] = running
        error = await self._scribe.write_ahead("start", **running.facts())
        if error is not None:
            self._forget(running, "never started")
            raise ChaosError(503, "journal_unavailable", f"nothing was started: {error}")
        if running.fault_id in self._running:  # a halt may have come while the disk was busy
            if await self._attach(running):
                running.confirmed = True
            else:
                self._forget(running, "refused by the model process, or no answer from it")
                self._spawn(self._model.detach_fault(running.fault_id))
                raise ChaosError(
                    503, "model_unavailable", "the model process did not take the fault; try again"
                )
        if running.fault_id not in self._running:
            self._spawn(self._detach(running))
            raise ChaosError(409, "chaos_halted", "the fault was ended while it was being started")
        return self._listing(running)

    def _admit(self, request: StartFault, by: str) -> Running:
        settings = self.settings
        if not settings.chaos:
            raise ChaosError(
                403, "chaos_disabled", "chaos is switched off on this server; set QUAVER_CHAOS=1"
            )
        if self.blocked:
            raise ChaosError(409, "chaos_halted", "chaos is halted; unblock it before starting a fault")
        try:
            fault = parse_fault(request.kind, request.params)
            selector = parse_selector(request.selector)
        except ValueError as error:
            raise ChaosError(400, "invalid_fault", str(error)) from None
        limits = (
            (0 < request.ttl_s <= settings.chaos_max_ttl_s, f"ttl_s in (0, {settings.chaos_max_ttl_s:g}]"),
            (selector.share <= settings.chaos_max_share, f"share of at most {settings.chaos_max_share:g}"),
            (
                not isinstance(fault, Noise) or fault.sigma <= settings.chaos_max_sigma,
                f"sigma of at most {settings.chaos_max_sigma:g}",
            ),
            (abs(request.seed) < 2**63, "a seed of 64 bits"),
        )
        for holds, limit in limits:
            if not holds:
                raise ChaosError(400, "over_cap", f"this server allows {limit}")
        if len(self._running) >= settings.chaos_max_faults:
            raise ChaosError(
                409, "too_many_faults", f"{len(self._running)} faults are in force; end one first"
            )
        for other in self._running.values():
            if other.fault.kind == request.kind and other.selector.overlaps(selector):
                raise ChaosError(
                    409,
                    "overlap",
                    f"{other.fault_id} already acts on some of these requests; end it first, or choose "
                    "another tenant, route or header",
                )
        return Running(
            fault_id=f"{request.kind}-{secrets.token_hex(4)}",
            fault=fault,
            selector=selector,
            seed=request.seed,
            ttl_s=request.ttl_s,
            by=by,
            started=time.time(),
            deadline=time.monotonic() + request.ttl_s,
        )

    async def _attach(self, running: Running) -> bool:
        if running.fault.place == "model":
            try:
                return await self._model.attach_fault(running.message())
            except Exception:
                log.exception("fault %s could not be sent to the model process", running.fault_id)
                return False
        self._prompt.attach(running.message())
        return True

    async def end(self, fault_id: str, reason: str = "stopped", by: str = "operator") -> dict[str, Any]:
        """End a fault. Ending an unknown or ended one is harmless and says `ended: false`."""
        running = self._running.get(fault_id)
        if running is None:
            return {"fault_id": fault_id, "ended": False, "confirmed": True}
        self._running.pop(fault_id)
        confirmed = await self._detach(running)
        note = self._note_end(running, reason, by=by, confirmed=confirmed)
        await self._scribe.settle(note)
        return {"fault_id": fault_id, "ended": True, "confirmed": confirmed}

    async def halt(self, by: str = "operator", reason: str = "halted") -> dict[str, Any]:
        """End every fault and refuse new ones until `unblock`. Never waits long, whatever hangs."""
        self.blocked = True
        ended = list(self._running.values())
        self._running.clear()
        self._prompt.detach(None)
        self._scribe.note("halt", by=by, faults=[running.fault_id for running in ended])
        confirmed = await self._within(self._model.detach_fault(None))
        note = None
        for running in ended:
            note = self._note_end(
                running, reason, by=by, confirmed=confirmed or running.fault.place == "prompt"
            )
        await self._scribe.settle(note)
        return {"blocked": True, "ended": [running.fault_id for running in ended], "confirmed": confirmed}

    async def unblock(self, by: str = "operator") -> dict[str, Any]:
        """Allow new starts again. Faults that were halted stay ended."""
        self.blocked = False
        await self._scribe.settle(self._scribe.note("unblock", by=by))
        return {"blocked": False}

    async def close(self) -> None:
        """End every fault because the server stops, and settle the journal."""
        for fault_id in list(self._running):
            await self.end(fault_id, "server stopped", by="server")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scribe.close()

    async def _detach(self, running: Running) -> bool:
        if running.fault.place == "model":
            return await self._within(self._model.detach_fault(running.fault_id))
        self._prompt.detach(running.fault_id)
        return True

    async def _within(self, answer: Any) -> bool:
        try:
            return bool(await asyncio.wait_for(answer, CONFIRM_S))
        except Exception:
            return False  # its lease ends by itself

    def _forget(self, running: Running, reason: str) -> None:
        if self._running.pop(running.fault_id, None) is not None:
            self._note_end(running, reason, by="server")

    def _note_end(self, running: Running, reason: str, **facts: Any) -> asyncio.Future[Any]:
        return self._scribe.note(
            "end",
            fault_id=running.fault_id,
            kind=running.fault.kind,
            reason=reason,
            touched=len(running.touched),
            lasted_s=round(time.time() - running.started, 3),
            **facts,
        )

    def tick(self) -> None:
        """Take note of leases whose time is over. Called a few times a second."""
        now = time.monotonic()
        self._prompt.expire(now)
        for running in list(self._running.values()):
            if running.deadline <= now:
                self._forget(running, "expired")
                if running.fault.place == "model":
                    self._spawn(self._model.detach_fault(running.fault_id))

    def on_faults(self, fault_ids: list[str]) -> None:
        """Hear what is in force in the model process. A fault it lost is over: never attached again."""
        for running in list(self._running.values()):
            if running.fault.place == "model" and running.confirmed and running.fault_id not in fault_ids:
                over = running.deadline - time.monotonic() < 0.5
                self._forget(running, "expired" if over else "model process lost")

    def touch(self, request_id: str, fault_id: str) -> None:
        """Count a request that a fault changed."""
        running = self._running.get(fault_id)
        if running is not None:
            running.touched.add(request_id)

    def seen(self, meta: RequestMeta) -> None:
        """Remember a request, for previews of a selector."""
        self._recent.append(meta)

    def preview(self, selector: dict[str, float | str]) -> dict[str, Any]:
        """Return how many of the recent requests a selector would have reached.

        `admitted` satisfy tenant, route and header; `expected` is that times the share.
        """
        try:
            chosen = parse_selector(selector)
        except ValueError as error:
            raise ChaosError(400, "invalid_selector", str(error)) from None
        admitted = sum(chosen.admits(meta) for meta in self._recent)
        return {"recent": len(self._recent), "admitted": admitted, "expected": chosen.share * admitted}

    def status(self) -> dict[str, Any]:
        """Return the switch, the caps, the faults in force, the kinds there are and the recent journal."""
        return {
            "enabled": self.settings.chaos,
            "caps": {
                "ttl_s": self.settings.chaos_max_ttl_s,
                "share": self.settings.chaos_max_share,
                "faults": self.settings.chaos_max_faults,
                "sigma": self.settings.chaos_max_sigma,
            },
            "lever": {"blocked": self.blocked, "reason": "halted by an operator" if self.blocked else None},
            "faults": [self._listing(running) for running in self._running.values()],
            "kinds": describe(),
            "journal": list(self._scribe.journal.recent)[::-1],
        }

    def _listing(self, running: Running) -> dict[str, Any]:
        return {
            "id": running.fault_id,
            **running.facts(),
            "state": "active" if running.confirmed else "starting",
            "started": running.started,
            "remaining_s": round(max(0.0, running.deadline - time.monotonic()), 3),
            "touched": len(running.touched),
        }

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(self._within(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
