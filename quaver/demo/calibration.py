"""Calibration on healthy traffic: limits are fixed here, before any fault, and put in force in the server."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from chaos.load.questions import supply
from chaos.load.readers import Readers
from chaos.load.reading import Patience
from quaver.demo.control import Control, DemoError
from quaver.demo.plan import MAX_TOKENS, STREAMS, calibration_size
from quaver.demo.show import Show
from quaver.demo.traffic import Traffic

WARM_UP = STREAMS
FIRST = 24  # responses after which the speed is known well enough
LIMIT_S = 300.0

#: Machines that ask: they read to the end, whatever comes.
STEADY = Patience(median_s=3600.0, reaction_s=3600.0)
#: People who ask stay several times as long as an answer usually takes. Fixed here, before any fault.
LEAST_PATIENCE_S = 20.0
USED_TO = 5.0


@dataclass(frozen=True)
class Pace:
    """How fast this machine answers, and how long its readers are used to stay."""

    rate: float  # responses a second
    people: Patience


async def calibrate(control: Control, url: str, key: str, show: Show) -> Pace:
    """Send healthy traffic of the calibration prompts and put the baseline in force.

    The readers are those of the finale, so that the healthy rate of interruptions is theirs.
    """
    questions = supply("calibration", max_tokens=MAX_TOKENS)
    async with Readers(url, key, patience=STEADY) as readers, Traffic(readers, questions, STREAMS) as traffic:
        with show.phase(f"Warm-up ({WARM_UP} responses)", WARM_UP) as progress:
            window = await traffic.window(WARM_UP, LIMIT_S, progress)
        seconds = [reading.duration_s for _, reading in window.completed()]
        if not seconds:
            raise DemoError(f"no request got an answer: {traffic.why_not()}")
    people = Patience(median_s=max(LEAST_PATIENCE_S, USED_TO * statistics.median(seconds)))
    async with Readers(url, key, patience=people) as readers, Traffic(readers, questions, STREAMS) as traffic:
        await control.calibration("start")
        began = time.monotonic()
        before = len(traffic.since(0.0))
        with show.phase(f"Measuring the speed ({FIRST} responses)", FIRST) as progress:
            await traffic.window(FIRST, LIMIT_S, progress, fresh=False)
        speed = (len(traffic.since(0.0)) - before) / (time.monotonic() - began)
        more = calibration_size(speed) - FIRST
        with show.phase(f"Calibrating on healthy traffic ({more} more responses)", more) as progress:
            await traffic.window(more, LIMIT_S, progress, fresh=False)
        rate = (len(traffic.since(0.0)) - before) / (time.monotonic() - began)
    await control.calibration("finish")
    state = (await control.alert_state())["evaluator"]
    if state.get("baseline_problem"):
        raise DemoError(f"the baseline is not in force: {state['baseline_problem']}")
    show.say("  limits are fixed from now on: no fault has been started yet")
    return Pace(rate, people)
