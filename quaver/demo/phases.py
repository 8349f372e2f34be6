"""Clean window, harmless control, fault, recovery: one experiment after the other.

What fired and when is read from `/quaver/alerts` alone. The chaos side is asked only for what the
scorecard needs: the lease, and how many requests it touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from chaos.load.readers import Question
from chaos.load.reading import Reading
from quaver.demo.control import Alert, Control, DemoError, Lease
from quaver.demo.plan import EXPERIMENTS, Experiment, Plan
from quaver.demo.report import CleanWindows, FaultResult
from quaver.demo.show import Show
from quaver.demo.traffic import Traffic, Window

SETTLE_S = 60.0
DRAIN_S = 10.0
LEVELS = ("L1", "L2")

Probe = Callable[[Question, Reading], bool]


def between(alerts: list[Alert], start: float, end: float) -> list[Alert]:
    """Return the model-quality alerts that began in a stretch of time (unix seconds)."""
    return [alert for alert in alerts if alert.level in LEVELS and start <= alert.starts_at < end]


def quality(window: Window, probe: Probe) -> float | None:
    """Return the fraction of completed answers that are right, None without answers."""
    scores = [probe(question, reading) for question, reading in window.completed()]
    return sum(scores) / len(scores) if scores else None


class Phases:
    """Runs the experiments over steady traffic. `leases` holds what is in force, for whoever cleans up."""

    def __init__(self, control: Control, traffic: Traffic, plan: Plan, probe: Probe, show: Show) -> None:
        self.leases: list[Lease] = []
        self.clean = CleanWindows()
        self._control = control
        self._traffic = traffic
        self._plan = plan
        self._probe = probe
        self._show = show

    async def run(self) -> list[FaultResult]:
        """Run every experiment; each group begins with its clean window."""
        results = []
        for group in EXPERIMENTS:
            clean = await self.clean_window()
            probe_clean = quality(clean, self._probe)
            results += [await self._experiment(experiment, probe_clean) for experiment in group]
        return results

    async def clean_window(self) -> Window:
        """Watch healthy traffic; every alert in it is a false alarm."""
        window = await self._watch("Clean window", self._plan.clean, fresh=False)
        false = between(await self._control.alerts(), window.started, time.time())
        self.clean.responses += window.count("read") + window.count("left")
        self.clean.alerts += false
        right = quality(window, self._probe)
        self._show.say(f"  {_answers(window, right)}; alerts: {_list(false)}")
        return window

    async def _experiment(self, experiment: Experiment, probe_clean: float | None) -> FaultResult:
        name = experiment.name
        control, _, control_alerts = await self._under(
            experiment, experiment.control, f"{name}: harmless control"
        )
        await settle(self._control)
        faulted, touched, alerts = await self._under(
            experiment, experiment.params, f"[bold]{name}: {experiment.title}[/bold]"
        )
        recovered = await self._recover()
        first = min((alert.starts_at for alert in alerts), default=None)
        return FaultResult(
            experiment=experiment,
            touched=touched,
            probe_clean=probe_clean,
            probe_control=quality(control, self._probe),
            probe_faulted=quality(faulted, self._probe),
            alerts=alerts,
            control_alerts=control_alerts,
            time_to_detect_s=None if first is None else max(0.0, first - faulted.started),
            recovered=recovered,
        )

    async def _under(
        self, experiment: Experiment, params: dict[str, Any], title: str
    ) -> tuple[Window, int, list[Alert]]:
        """Watch a window under a fault; the answers it touched are waited for before alerts are read."""
        limit_s = self._plan.limit_s(self._plan.fault)
        started = time.time()
        async with self._control.fault(self.leases, experiment.kind, params, limit_s + 30.0, 1) as lease:
            window = await self._watch(title, self._plan.fault)
            touched = await self._control.touched(lease) or 0
        await self._traffic.drained(time.time(), DRAIN_S)
        window = Window(started, window.ended, window.answers)
        alerts = between(await self._control.alerts(), started, time.time())
        self._show.say(
            f"  {_answers(window, quality(window, self._probe))}; touched {touched}; alerts: {_list(alerts)}"
        )
        return window, touched, alerts

    async def _recover(self) -> bool:
        """Wait for quiet; True when it came and fresh answers came with it."""
        quiet = await settle(self._control)
        window = await self._watch("Recovery", self._plan.recovery, fresh=False)
        return quiet and window.count("read") > 0

    async def _watch(self, title: str, responses: int, *, fresh: bool = True) -> Window:
        limit_s = self._plan.limit_s(responses)
        with self._show.phase(f"{title} ({responses} responses)", responses) as progress:
            return await self._traffic.window(responses, limit_s, progress, fresh=fresh)


async def settle(control: Control) -> bool:
    """Wait until no alert fires and no breaker is open; False when that takes too long."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        with suppress(DemoError):
            firing = [a for a in await control.alerts() if a.ends_at is None and a.level in LEVELS]
            states = await control.breaker_states()
            if not firing and all(state == "closed" for state in states.values()):
                return True
        await asyncio.sleep(0.5)
    return False


def _list(alerts: list[Alert]) -> str:
    return ", ".join(dict.fromkeys(alert.label for alert in alerts)) or "none"


def _answers(window: Window, right: float | None) -> str:
    share = "" if right is None else f", {right:.0%} right"
    shed = window.count("shed")
    return f"{window.count('read')} answers{share}" + (f", {shed} shed" if shed else "")
