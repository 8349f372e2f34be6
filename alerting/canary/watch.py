"""The evidence that canaries give against what they stand for, and the alert it raises."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from alerting.alerts import AlertBook
from alerting.canary.baseline import CanaryBaseline, Comparison
from alerting.canary.prompt import Guarded
from alerting.rules import Rules
from alerting.sequential import Bank, BankRecovery

MAX_GUARDED = 256
_CAP = 10.0  # of the threshold, as for traffic
_RECOVER = 10  # canaries in a row that must be healthy again
_SHOWN = 100

Key = tuple[str, str]  # tenant, route


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One canary that was answered, as the API shows it. `time` is unix seconds."""

    time: float
    request_id: str
    canary: str
    tenant: str
    route: str
    cached: bool
    right: bool
    score: float
    tests: dict[str, bool]
    distances: dict[str, float]
    cause: str


class _Evidence:
    """One tenant on one route. The bound holds for each alone: a canary counts for one of them."""

    def __init__(self, rules: Rules) -> None:
        self.bank = Bank(rules.rate.powers, _CAP * rules.rate.threshold)
        self.recovery = BankRecovery(_RECOVER)
        self.firing = False
        self.causes: deque[str] = deque(maxlen=_RECOVER)


class Watch:
    """Raises `rules.alerts.canary` on a route while canaries of any of its tenants fail."""

    def __init__(self, rules: Rules, book: AlertBook) -> None:
        self._rules = rules
        self._book = book
        self._evidence: dict[Key, _Evidence] = {}
        self._rates: dict[str, float] = {}
        self.seen: deque[Seen] = deque(maxlen=_SHOWN)

    def use(self, baseline: CanaryBaseline | None, now: float) -> None:
        """Put a baseline in force; evidence so far is dropped, its alerts end."""
        for route in {route for (_, route), e in self._evidence.items() if e.firing}:
            self._book.resolve(self._rules.alerts.canary, route, now, "another baseline is in force")
        self._evidence.clear()
        rate = self._rules.rate
        self._rates = baseline.rates(rate.confidence, rate.drift) if baseline is not None else {}

    def add(
        self,
        request_id: str,
        canary: str,
        guarded: Guarded,
        comparison: Comparison,
        *,
        cached: bool,
        right: bool,
        now: float,
    ) -> Seen:
        """Take in a canary that was answered; raise or end the alert of its route."""
        evidence = self._of((guarded.tenant, guarded.route))
        rates = {name: rate for name, rate in self._rates.items() if name in comparison.tests}
        if evidence.firing:
            evidence.recovery.add(comparison.tests, rates)
        else:
            evidence.bank.update(comparison.tests, rates)
        if any(comparison.tests.values()):
            evidence.causes.append(comparison.cause)
        seen = Seen(
            time=now,
            request_id=request_id,
            canary=canary,
            tenant=guarded.tenant,
            route=guarded.route,
            cached=cached,
            right=right,
            score=round(comparison.score, 4),
            tests=comparison.tests,
            distances={name: round(value, 5) for name, value in comparison.distances.items()},
            cause=comparison.cause,
        )
        self.seen.append(seen)
        self._check(evidence, guarded.route, now)
        return seen

    def logs(self) -> dict[str, float]:
        """Return ln of the evidence by route: that of the tenant with the most."""
        found: dict[str, float] = {}
        for (_, route), evidence in self._evidence.items():
            found[route] = max(found.get(route, 0.0), evidence.bank.log)
        return found

    def report(self) -> list[dict[str, Any]]:
        """Return the evidence of every tenant and route that canaries stood for."""
        return [
            {"tenant": tenant, "route": route, "evidence_log": e.bank.log, "firing": e.firing}
            for (tenant, route), e in self._evidence.items()
        ]

    def _of(self, key: Key) -> _Evidence:
        evidence = self._evidence.pop(key, None) or _Evidence(self._rules)
        self._evidence[key] = evidence  # the newest last
        if len(self._evidence) > MAX_GUARDED:
            quiet = next((k for k, e in self._evidence.items() if not e.firing), None)
            if quiet is not None:
                del self._evidence[quiet]
        return evidence

    def _check(self, evidence: _Evidence, route: str, now: float) -> None:
        rule, rate = self._rules.alerts.canary, self._rules.rate
        if not evidence.firing and evidence.bank.value >= rate.threshold:
            evidence.firing = True
            evidence.recovery.clear()
            facts = {"evidence_log": evidence.bank.log, "signals": sorted(set(evidence.causes))}
            self._book.raise_alert(rule, route, now, facts)
        elif evidence.firing and evidence.recovery.full and evidence.recovery.healthy(rate.recover_level):
            evidence.firing = False
            evidence.bank.reset()
            evidence.causes.clear()
            if not any(e.firing for (_, r), e in self._evidence.items() if r == route):
                self._book.resolve(rule, route, now, "known prompts are answered as in health again")
