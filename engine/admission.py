"""The decision at the door: who may come in, and who is told to come later, before any 200.

The door keeps its own books of the choices in flight, a place each. It turns a request away when all
places are taken, or when its turn would come too late; but never because of what others flood it
with: a flow that holds less than its share of the places is let in even when they are all taken.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

from engine.fairness import Flow, flow_of
from engine.hooks import Rejection
from engine.load import Load
from engine.messages import RequestMeta

_MAX_RETRY_S = 60.0
_SMOOTHING = 0.1
_TELLING_S = 0.5  # shorter waits say nothing about the prediction
_MAX_BIAS = 10.0
_BIAS_SMOOTHING = 0.3


class Levels(NamedTuple):
    """What the door knows now, for gauges."""

    pool: int
    in_flight: int
    predicted_qps: float
    predicted_delay_s: float


class _Open:
    """A request in flight: its flow, its choices that wait for their first token, when it came.

    `expected_s` is the wait that was computed for it.
    """

    __slots__ = ("arrived", "began", "choices", "expected_s", "flow", "unbegun")

    def __init__(self, flow: Flow, choices: int, arrived: float, expected_s: float) -> None:
        self.flow = flow
        self.expected_s = expected_s
        self.choices = choices
        self.unbegun = set(range(choices))
        self.arrived = arrived
        self.began: float | None = None

    def wait_ratio(self, now: float) -> float:
        """Seconds waited ÷ seconds expected; 1 for expectations too short to tell."""
        waited = (self.began if self.began is not None else now) - self.arrived
        return min(waited / self.expected_s, _MAX_BIAS) if self.expected_s >= _TELLING_S else 1.0


class Door:
    """Books of the requests in flight, and the decision about the next.

    `running` choices are computed together at most; `waiting` more than the pool's tokens are let in.
    Methods take the time, in seconds of any one clock. Invariant: every request that came in leaves
    once; leaving again, or unknown ones, do nothing.
    """

    def __init__(
        self, now: float, *, running: int, waiting: int, delay_s: float, pool: Literal["elastic", "fixed"]
    ) -> None:
        self.load = Load(now)
        self._running = running
        self._slots = float(running)
        self._waiting = waiting
        self._delay_s = delay_s
        self._elastic = pool == "elastic"
        self._open: dict[str, _Open] = {}
        self._held: Counter[Flow] = Counter()
        self._unbegun: Counter[Flow] = Counter()
        self._bias: dict[Flow, float] = {}
        self._service_s = 0.0

    @property
    def in_flight(self) -> int:
        """Choices that have come in and are not over."""
        return self._held.total()

    @property
    def pool(self) -> int:
        """Admission tokens, one a choice in flight; never fewer than can be computed together."""
        return max(self._running, self.load.size) if self._elastic else self._running

    def levels(self, now: float) -> Levels:
        """Return the levels at `now`; the delay is the longest that any flow in flight would meet."""
        self.load.advance(now)
        delay = max((self.delay_s(flow, now) for flow in self._held), default=0.0)
        return Levels(self.pool, self.in_flight, self.load.qps, delay)

    def refuse(self, meta: RequestMeta, choices: int, now: float) -> Rejection | None:
        """Return why a request of so many choices is not let in, or None; changes nothing."""
        self.load.advance(now)
        flow = flow_of(meta)
        places = self.pool + self._waiting
        if self.in_flight + choices > places and self._held[flow] + choices > self._share(flow) * places:
            return Rejection(
                status=429,
                code="queue_full",
                message=f"{self.in_flight} choices run or wait, this asks for {choices} more, and {places} "
                "fit; try again later",
                retry_after_s=min(max(self._mean_service_s(now), 1.0), _MAX_RETRY_S),
            )
        delay = self.delay_s(flow, now)
        if delay > self._delay_s:
            return Rejection(
                status=429,
                code="queue_delay",
                message=f"the answer would begin in about {delay:.0f} s, later than the {self._delay_s:g} s "
                "that this server lets anybody wait; try again later",
                retry_after_s=min(max(delay - self._delay_s, 1.0), _MAX_RETRY_S),
            )
        return None

    def delay_s(self, flow: Flow, now: float) -> float:
        """Predict how long a newcomer would wait for its turn.

        Ahead of it are those of its own flow and, as turns are fair, no more of each other flow than
        its weight allows; the places come free at the rate at which requests are served. What that
        leaves out (others who will come and go first, long prompts) is learnt: waits of the flow,
        those that last still among them, ÷ what was computed for them.
        """
        lasting = max(
            (r.wait_ratio(now) for r in self._open.values() if r.flow == flow and r.began is None),
            default=1.0,
        )
        return max(self._bias.get(flow, 1.0), lasting) * self._computed_s(flow, now)

    def _computed_s(self, flow: Flow, now: float) -> float:
        own = self._unbegun[flow] + 1
        ahead = sum(
            min(count, own * other.weight / flow.weight)
            for other, count in self._unbegun.items()
            if other != flow
        )
        begun = self.in_flight - self._unbegun.total()
        turn = ahead + own - max(self._slots - begun, 0)
        return max(turn, 0.0) * self._mean_service_s(now) / self._slots

    def enter(self, meta: RequestMeta, choices: int, now: float) -> None:
        """Take places for a request that was let in."""
        self.load.arrive(now, choices)
        flow = flow_of(meta)
        self._open[meta.request_id] = _Open(flow, choices, now, self._computed_s(flow, now))
        self._held[flow] += choices
        self._unbegun[flow] += choices

    def begin(self, request_id: str, choice: int, now: float) -> None:
        """Note the first token of a choice."""
        request = self._open.get(request_id)
        if request is not None and choice in request.unbegun:
            request.unbegun.discard(choice)
            self._unbegun[request.flow] -= 1
            if request.began is None:
                request.began = now
                known = self._bias.get(request.flow, 1.0)
                closer = known + _BIAS_SMOOTHING * (request.wait_ratio(now) - known)
                self._bias[request.flow] = max(closer, 1.0)

    def observe(self, running: int, waiting: int) -> None:
        """Note the engine's levels after a step: while some wait, what runs is what can run."""
        can = running if waiting else self._running
        self._slots += _SMOOTHING * (max(can, 1) - self._slots)

    def leave(self, request_id: str, now: float, *, tokens: int, queued_s: float, whole: bool) -> None:
        """Give a request's places back, after `queued_s` of waiting and `tokens` of prompt and answer.

        Only a `whole` answer teaches how long answers take.
        """
        request = self._open.pop(request_id, None)
        if request is None:
            return
        for counter, count in ((self._held, request.choices), (self._unbegun, len(request.unbegun))):
            counter[request.flow] -= count
            if not counter[request.flow]:
                del counter[request.flow]
        if request.flow not in self._held:
            self._bias.pop(request.flow, None)
        if whole:
            latency = now - request.arrived
            self.load.end(now, latency, tokens)
            step = _SMOOTHING if self._service_s else 1.0
            self._service_s += step * (max(latency - queued_s, 0.0) - self._service_s)

    def _share(self, flow: Flow) -> float:
        """The flow's fair part of the places, among those who hold any."""
        others = sum(other.weight for other in self._held if other != flow)
        return flow.weight / (flow.weight + others)

    def _mean_service_s(self, now: float) -> float:
        """Seconds that an answer holds its slot: recent ones, or those running now if they take longer."""
        ages = [now - request.began for request in self._open.values() if request.began is not None]
        return max(self._service_s, math.fsum(ages) / len(ages) if ages else 0.0)
