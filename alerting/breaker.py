"""The circuit breaker at the door, one per route.

closed → open (an L2 with evidence from the model and from users) → half-open after a cool-down,
by itself → closed when its probes are healthy, open again with a longer cool-down when not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from alerting.alerts import rfc3339
from alerting.rules import BreakerRule
from engine.hooks import Rejection
from engine.messages import RequestMeta

State = Literal["closed", "open", "half_open"]
STATE_NUMBER: dict[State, int] = {"closed": 0, "half_open": 1, "open": 2}
_TRANSITIONS_KEPT = 100


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of state. `time` is unix seconds; `enforced` tells whether requests were shed."""

    route: str
    before: State
    after: State
    reason: str
    time: float
    enforced: bool


class _Circuit:
    """State of one route. Times are of the injected monotonic clock, `entered` is unix seconds."""

    def __init__(self, cool_down_s: float) -> None:
        self.state: State = "closed"
        self.since = self.entered = 0.0
        self.cool_down_s = cool_down_s
        self.probes: dict[str, float] = {}  # request id -> admitted at
        self.healthy = 0
        self.unhealthy = 0


class Breaker:
    """An AdmissionGate. In mode `observe` it changes state and sheds nothing."""

    def __init__(
        self,
        rule: BreakerRule,
        mode: Literal["observe", "enforce"] = "observe",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self._rule = rule
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}
        self.listeners: list[Callable[[Transition], None]] = []
        self.transitions: deque[Transition] = deque(maxlen=_TRANSITIONS_KEPT)
        self.shed = 0

    def admit(self, meta: RequestMeta) -> Rejection | None:
        """Return None to admit; a 503 while the route is open or its probes are all out."""
        circuit = self._circuits.get(meta.route)
        if circuit is None or circuit.state == "closed":
            return None
        self._advance(meta.route, circuit)
        if circuit.state == "half_open" and self._free_probes(circuit) > 0 and not meta.canary:
            circuit.probes[meta.request_id] = self._clock()
            return None
        if self.mode == "observe":
            return None
        self.shed += 1
        return Rejection(
            status=503,
            code="breaker_open",
            message=f"Route {meta.route!r} is paused: its answers are doubtful and users break them off.",
            retry_after_s=max(1.0, circuit.since + circuit.cool_down_s - self._clock()),
        )

    def trip(self, route: str, reason: str) -> None:
        """Open a route. While it is open already, nothing changes."""
        circuit = self._circuits.setdefault(route, _Circuit(self._rule.cool_down_s))
        if circuit.state == "closed":
            circuit.cool_down_s = self._rule.cool_down_s
            self._enter(route, circuit, "open", reason)
        elif circuit.state == "half_open":
            self._reopen(route, circuit, reason)

    def ended(self, request_id: str, route: str, healthy: bool | None) -> None:
        """A response is over. `healthy` None: it tells nothing, its probe may be given again."""
        circuit = self._circuits.get(route)
        if circuit is None or circuit.probes.pop(request_id, None) is None or healthy is None:
            return
        circuit.healthy += healthy
        circuit.unhealthy += not healthy
        if circuit.unhealthy > self._rule.probes_unhealthy:
            self._reopen(route, circuit, f"{circuit.unhealthy} of {self._judged(circuit)} probes unhealthy")
        elif self._judged(circuit) >= self._rule.probes:
            self._enter(
                route, circuit, "closed", f"{circuit.healthy} of {self._judged(circuit)} probes healthy"
            )

    def tick(self) -> None:
        """Half-open what has cooled down; forget probes that never came back."""
        for route, circuit in self._circuits.items():
            self._advance(route, circuit)

    def state(self, route: str) -> State:
        """Return a route's state; unknown routes are closed."""
        circuit = self._circuits.get(route)
        return circuit.state if circuit else "closed"

    def report(self) -> dict[str, dict[str, Any]]:
        """Return, per route that ever tripped, its state and for how many seconds it has lasted."""
        now = self._clock()
        return {
            route: {
                "state": circuit.state,
                "mode": self.mode,
                "since": rfc3339(circuit.entered),
                "for_s": round(now - circuit.since, 3),
                "cool_down_s": circuit.cool_down_s,
                "probes": {
                    "out": len(circuit.probes),
                    "healthy": circuit.healthy,
                    "unhealthy": circuit.unhealthy,
                    "needed": self._rule.probes,
                },
            }
            for route, circuit in self._circuits.items()
        }

    def _advance(self, route: str, circuit: _Circuit) -> None:
        now = self._clock()
        if circuit.state == "open" and now >= circuit.since + circuit.cool_down_s:
            self._enter(route, circuit, "half_open", "cooled down")
        lost = [i for i, admitted in circuit.probes.items() if now - admitted > self._rule.probe_timeout_s]
        for request_id in lost:
            del circuit.probes[request_id]

    def _free_probes(self, circuit: _Circuit) -> int:
        return self._rule.probes - len(circuit.probes) - self._judged(circuit)

    def _reopen(self, route: str, circuit: _Circuit, reason: str) -> None:
        circuit.cool_down_s = min(circuit.cool_down_s * 2, self._rule.cool_down_max_s)
        self._enter(route, circuit, "open", reason)

    def _enter(self, route: str, circuit: _Circuit, state: State, reason: str) -> None:
        before, circuit.state, circuit.since = circuit.state, state, self._clock()
        circuit.entered = time.time()
        circuit.probes.clear()
        circuit.healthy = circuit.unhealthy = 0
        transition = Transition(
            route=route,
            before=before,
            after=state,
            reason=reason,
            time=circuit.entered,
            enforced=self.mode == "enforce",
        )
        self.transitions.append(transition)
        for listener in self.listeners:
            listener(transition)

    @staticmethod
    def _judged(circuit: _Circuit) -> int:
        return circuit.healthy + circuit.unhealthy
