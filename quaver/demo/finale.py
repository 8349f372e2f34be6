"""The joint alert end to end: text turns unreadable, readers leave, a page goes out, the breaker acts."""

from __future__ import annotations

import asyncio
import time

from quaver.demo.control import Control, Lease
from quaver.demo.phases import between, settle
from quaver.demo.plan import FINALE_BASE, FINALE_SIGMA, Plan
from quaver.demo.report import CleanWindows, FinaleResult
from quaver.demo.show import Show
from quaver.demo.traffic import Traffic

FAULT_S = 45.0  # longest time the fault stays in force
CLOSE_S = 120.0  # longest wait for the breaker to close
LOOK_S = 0.2


class Finale:
    """Impatient readers under noise. `leases` holds what is in force, for whoever cleans up."""

    def __init__(self, control: Control, traffic: Traffic, plan: Plan, show: Show) -> None:
        self.leases: list[Lease] = []
        self.clean = CleanWindows()
        self._control = control
        self._traffic = traffic
        self._plan = plan
        self._show = show

    async def run(self) -> FinaleResult:
        """Healthy readers first, then the fault until the breaker opens, then the way back."""
        await self._healthy()
        result = FinaleResult()
        started = time.time()
        async with self._control.fault(self.leases, "noise", {"sigma": FINALE_SIGMA}, FAULT_S + 15.0, seed=2):
            self._show.say(f"[bold]L2: noise of σ {FINALE_SIGMA:g} makes the text unreadable[/bold]")
            await self._until_open(result, started)
        ended = time.time()
        self._show.say("  the fault is ended; waiting for the breaker to probe and close")
        if result.breaker_opened:
            await self._until_closed(result, ended)
        if not await settle(self._control):
            self._show.say("  some alert still fires; `quaver alerts list` tells which")
        readings = self._traffic.over_since(started)
        result.left = sum(reading.outcome == "left" for reading in readings)
        result.shed = sum(reading.outcome == "shed" for reading in readings)
        return result

    async def _healthy(self) -> None:
        title = f"L2: readers with limited patience, nothing wrong yet ({FINALE_BASE} responses)"
        with self._show.phase(title, FINALE_BASE) as progress:
            window = await self._traffic.window(FINALE_BASE, self._plan.limit_s(FINALE_BASE), progress)
        false = between(await self._control.alerts(), window.started, time.time())
        self.clean.responses += window.count("read") + window.count("left")
        self.clean.alerts += false
        self._show.say(
            f"  {window.count('left')} left of {len(window.answers)}; alerts: {len(false) or 'none'}"
        )

    async def _until_open(self, result: FinaleResult, started: float) -> None:
        while time.time() - started < FAULT_S and not (result.paged and result.breaker_opened):
            await asyncio.sleep(LOOK_S)
            pages = [
                a for a in between(await self._control.alerts(), started, time.time()) if a.level == "L2"
            ]
            if pages and not result.paged:
                result.paged = True
                result.page_s = max(0.0, min(page.starts_at for page in pages) - started)
                self._show.say(f"  paged after {result.page_s:.1f} s: {pages[0].name}")
            states = await self._control.breaker_states()
            if not result.breaker_opened and any(state != "closed" for state in states.values()):
                result.breaker_opened = True
                result.open_s = time.time() - started
                self._show.say(f"  the breaker opened after {result.open_s:.1f} s: new requests are shed")

    async def _until_closed(self, result: FinaleResult, ended: float) -> None:
        before = ""
        while time.time() - ended < CLOSE_S:
            states = set((await self._control.breaker_states()).values())
            now = "open" if "open" in states else "half-open" if "half_open" in states else "closed"
            if now != before:
                self._show.say(f"  breaker: {now}")
                before = now
            if now == "closed":
                result.breaker_closed = True
                result.closed_s = time.time() - ended
                return
            await asyncio.sleep(LOOK_S)
