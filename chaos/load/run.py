"""Runs a plan with our own readers, in one event loop; Locust runs the same plan in `chaos.load.headless`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from typing import Any

from chaos.load.plan import Plan
from chaos.load.readers import Question, Readers, closed_loop, open_loop
from chaos.load.reading import Reading, now
from chaos.load.recorder import Recorder

FINISH_S = 30  # for answers that still run when the time is over
_ROUND_S = 0.2
Watch = Callable[[Recorder], None]


def run(plan: Plan, url: str, key: str, watch: Watch | None = None) -> dict[str, Any]:
    """Run a plan to its end and return the report, which lies in the plan's folder on every way out.

    Answers that still run at the end get `FINISH_S` more; what is cut then has the outcome `ended`. SIGINT
    and SIGTERM cut at once; `state` in the report says so. `watch` is called often, with the figures so far.
    Raises PlanError, SloError, TraceError, OSError before anything is sent.
    """
    plan.check()
    return asyncio.run(_run(plan, url, key, watch or (lambda _: None)))


async def _run(plan: Plan, url: str, key: str, watch: Watch) -> dict[str, Any]:
    began = now()
    recorder = Recorder(plan, url, began)
    recorder.save()
    state = "stopped by an error in the load itself"
    try:
        async with Readers(url, key, patience=plan.patience, seed=plan.seed) as readers:
            run_ = _Run(plan, readers, recorder, began)
            with run_.told_by_signals():
                keeper = asyncio.create_task(_keep(recorder, watch))
                try:
                    state = await run_.to_the_end()
                finally:
                    keeper.cancel()
    finally:
        recorder.close(state)
        watch(recorder)
    return recorder.summary() | {"trouble": recorder.trouble}


async def _keep(recorder: Recorder, watch: Watch) -> None:
    while True:
        await asyncio.sleep(_ROUND_S)
        recorder.save_if_due()
        watch(recorder)


class _Run:
    """One run: it ends when its time or count is over, or when a signal says so."""

    def __init__(self, plan: Plan, readers: Readers, recorder: Recorder, began: float) -> None:
        self._plan, self._readers, self._recorder, self._began = plan, readers, recorder, began
        self._stopped: str | None = None

    @contextlib.contextmanager
    def told_by_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the run, and nothing else."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number.name)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def to_the_end(self) -> str:
        """Ask, read, and return how it ended."""
        loop = asyncio.get_running_loop()
        last = loop.call_later(self._plan.seconds + FINISH_S, self._readers.hang_up)
        try:
            async with contextlib.aclosing(self._flow()) as flow:
                async for _, reading in flow:
                    self._recorder.add(reading)
        finally:
            last.cancel()
        return self._stopped or "finished"

    def _flow(self) -> AsyncGenerator[tuple[Question, Reading], None]:
        plan = self._plan
        if plan.loop == "closed":
            questions = islice(plan.questions(), plan.count)
            end = self._began + plan.seconds
            until = lambda: self._stopped is not None or now() >= end  # noqa: E731
            return closed_loop(self._readers, questions, plan.users, until)
        due = ((question, self._began + at_s) for question, at_s in plan.due())
        return open_loop(self._readers, due, lambda: self._stopped is not None, at_once=plan.at_once)

    def _stop(self, name: str) -> None:
        self._stopped = f"stopped by {name}"
        self._readers.hang_up()
