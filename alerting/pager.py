"""When alerts begin and end: turns the evidence of a route into alerts and trips the breaker."""

from __future__ import annotations

from alerting.alerts import AlertBook
from alerting.breaker import Breaker
from alerting.route import Condition, RouteEvidence
from alerting.rules import AlertRule, Rules


class Pager:
    """Holds the conditions; the evidence is the evaluator's."""

    def __init__(self, rules: Rules, book: AlertBook, breaker: Breaker) -> None:
        self._rate = rules.rate
        self._conditions: dict[Condition, AlertRule] = {
            "l1_rate": rules.alerts.l1_rate,
            "joint": rules.alerts.joint_evidence,
            "leaving": rules.alerts.users_leaving,
        }
        self._book = book
        self._breaker = breaker

    @property
    def rules(self) -> list[AlertRule]:
        """The conditions, as they are named."""
        return list(self._conditions.values())

    def firing(self, rule: AlertRule, route: str) -> bool:
        """Return whether an alert fires on a route."""
        return self._book.firing(rule, route)

    def fires(self, condition: Condition, route: str) -> bool:
        """Return whether a condition's alert fires; its detectors rest meanwhile."""
        return self._book.firing(self._conditions[condition], route)

    def check(self, e: RouteEvidence, now: float, interruption_rate: float) -> None:
        """Raise what became true, end what is over."""
        if e.l1.value >= self._rate.threshold:
            self._raise("l1_rate", e, now)
        if e.mixture() >= self._rate.threshold:
            self._raise("joint", e, now)
        if e.users_leave(now, interruption_rate) and self._raise("leaving", e, now):
            self._breaker.trip(e.name, f"{e.live_interruptions} of {e.live_responses} responses broken off")
        if e.recovered("l1_rate"):
            self._end("l1_rate", e, now, "the L1 rate is back within the healthy range")
        if e.recovered("joint"):
            self._end("joint", e, now, "all inputs are back within the healthy range")
        if e.recovered("leaving") and self._breaker.state(e.name) == "closed":
            self._end("leaving", e, now, "interruptions are back within the healthy range")

    def check_quiet(self, e: RouteEvidence, now: float) -> None:
        """End the alerts of a route that has had no response for `quiet_s`."""
        if now - e.last_response > self._rate.quiet_s:
            self.end_all(e, now, "no responses on this route")

    def end_all(self, e: RouteEvidence, now: float, reason: str) -> None:
        """End every alert of a route."""
        for condition in self._conditions:
            self._end(condition, e, now, reason)

    def breaker_closed(self, e: RouteEvidence, now: float) -> None:
        """A breaker that closed ends its L2, so that the same trouble can trip it again."""
        self._end("leaving", e, now, "the breaker closed")

    def _raise(self, condition: Condition, e: RouteEvidence, now: float) -> bool:
        if self._book.raise_alert(self._conditions[condition], e.name, now, e.evidence()) is None:
            return False
        e.began(condition)
        return True

    def _end(self, condition: Condition, e: RouteEvidence, now: float, reason: str) -> None:
        if self._book.resolve(self._conditions[condition], e.name, now, reason) is not None:
            e.restart(condition)
