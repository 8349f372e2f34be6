"""Stop conditions: what must not happen while something is broken on purpose.

Each start may name some, and the server's settings may name some for every start. Any of them halts all of
chaos. They read what a user of the server could read: alerts that fire, Prometheus, how many readers
leave. None knows which fault is in force.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from alerting.alerts import Alert
from chaos.prometheus import Prometheus, PrometheusError

WINDOW_S = 60.0
LEAST_RESPONSES = 10
PATIENCE_S = 10.0  # how long Prometheus may be silent
LEVELS = ("L1", "L2")


class StopWhen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conditions of which any one is enough."""

    alert: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    promql: Annotated[str, Meta(min_length=1, max_length=2000)] | None = None
    interruptions: Annotated[float, Meta(gt=0, lt=1)] | None = None

    def to_wire(self) -> dict[str, float | str]:
        """Return the conditions that are set."""
        pairs = msgspec.structs.asdict(self).items()
        return {name: value for name, value in pairs if value is not None}


class Stops:
    """Watches stop conditions. Event loop; only `look_up` waits.

    `interruptions` is the share of the responses of the last `WINDOW_S` seconds that their readers
    broke off, canaries left out; it says nothing before `LEAST_RESPONSES`. A PromQL expression holds
    as an alerting rule does: when it returns any series, or a scalar that is not 0.
    """

    def __init__(
        self,
        always: StopWhen,
        prometheus: Prometheus | None = None,
        alert_names: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`always` holds for every fault; `alert_names` returns the alerts that this server may raise."""
        self.always = always
        self._alert_names = alert_names
        self._firing: dict[tuple[str, str], Alert] = {}
        self._prometheus = prometheus
        self._clock = clock
        self._endings: deque[tuple[float, bool]] = deque(maxlen=10_000)
        self._silent_since: dict[str, float] = {}

    def on_alert(self, alert: Alert) -> None:
        """Hear that an alert began or ended."""
        if alert.state == "firing":
            self._firing[alert.name, alert.route] = alert
        else:
            self._firing.pop((alert.name, alert.route), None)

    def ended(self, interrupted: bool) -> None:
        """Count the end of a real user's response."""
        self._endings.append((self._clock(), interrupted))

    def flaw(self, stop: StopWhen) -> str | None:
        """Return why a condition cannot be watched here, in words; None when it can."""
        known = (*LEVELS, *self._alert_names())
        if stop.alert is not None and stop.alert not in known:
            return f"there is no alert {stop.alert!r}; give a level or a name: {', '.join(known)}"
        if stop.promql is not None and self._prometheus is None:
            return "a PromQL stop condition needs QUAVER_PROMETHEUS_URL on the server"
        return None

    def holds(self, *stops: StopWhen) -> str | None:
        """Return which condition holds now, in words, by alerts and interruptions."""
        for stop in stops:
            for alert in self._firing.values() if stop.alert is not None else ():
                if stop.alert in (alert.name, alert.level):
                    return f"alert {alert.name} ({alert.level}) fires on route {alert.route}"
            if stop.interruptions is not None:
                left, ended = self._rate()
                if ended >= LEAST_RESPONSES and left / ended > stop.interruptions:
                    return (
                        f"readers broke off {left} of {ended} responses within {WINDOW_S:g} s, "
                        f"more than {stop.interruptions:g} of them"
                    )
        return None

    async def look_up(self, *stops: StopWhen, patience_s: float = PATIENCE_S) -> str | None:
        """Return which PromQL condition holds, in words. Silence longer than `patience_s` is one, too."""
        for expression in {stop.promql for stop in stops if stop.promql is not None}:
            assert self._prometheus is not None, "admitted without a Prometheus"
            try:
                answer = await self._prometheus.query(expression)
            except PrometheusError as error:
                since = self._silent_since.setdefault(expression, self._clock())
                if self._clock() - since >= patience_s:
                    return f"PromQL {expression!r} cannot be watched: {error}"
                continue
            self._silent_since.pop(expression, None)
            if answer.holds:
                return f"PromQL {expression!r} holds: {answer.text}"
        return None

    def forget(self) -> None:
        """Nothing is in force: an earlier silence of Prometheus counts no more."""
        self._silent_since.clear()

    async def close(self) -> None:
        """Close the connections."""
        if self._prometheus is not None:
            await self._prometheus.close()

    def _rate(self) -> tuple[int, int]:
        """Return (broken off, ended) within the window."""
        while self._endings and self._endings[0][0] < self._clock() - WINDOW_S:
            self._endings.popleft()
        return sum(interrupted for _, interrupted in self._endings), len(self._endings)
