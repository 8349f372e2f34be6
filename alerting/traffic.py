"""Is the traffic still the usual one? The mix of routes and the lengths of prompts, apart from any fault.

The first responses heard are the reference. Later ones are tested by e-detectors, one for each route's share
and for prompts longer or shorter than most of their route's. Once the alert fires it stays until as many
responses of the new traffic have come: these are the reference from then on.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

from alerting.alerts import AlertBook
from alerting.rules import Rules
from alerting.sequential import Bank, rate_upper_bound

EVERYWHERE = "*"  # the route that the alert is about
_NEW = "new"  # every route that the reference has not
_MAX_ROUTES = 16
_FEWEST = 20  # prompts of a route from which its lengths are known
_MOST = 0.9  # a rate that is usually higher cannot rise so that it shows
_TAIL = 0.1  # share of a route's prompts that count as long, and as short


class Traffic:
    """Hears of every response that users ask for. Its alert pages nobody."""

    def __init__(self, rules: Rules, book: AlertBook) -> None:
        self._rules, self._book = rules, book
        self._seen: deque[tuple[str, int]] = deque(maxlen=rules.traffic.reference)
        self._rates: dict[
            str, float
        ] = {}  # upper bounds of the usual rates; empty until there is a reference
        self._lengths: dict[str, tuple[float, float]] = {}
        self._routes: frozenset[str] = frozenset()
        self._since = 0
        self._bank = self._fresh()

    @property
    def changed(self) -> bool:
        """Whether the alert fires."""
        return self._book.firing(self._rules.alerts.traffic_changed, EVERYWHERE)

    def add(self, route: str, prompt_tokens: int, now: float) -> None:
        """Take one response in at its start."""
        self._seen.append((route, prompt_tokens))
        full = len(self._seen) == self._seen.maxlen
        if self.changed:
            self._since += 1
            if self._since >= self._rules.traffic.reference:
                self._learn()
                reason = "the new traffic is the reference from now on"
                self._book.resolve(self._rules.alerts.traffic_changed, EVERYWHERE, now, reason)
        elif self._rates:
            tests = {name: x for name, x in self._tests(route, prompt_tokens).items() if name in self._rates}
            self._bank.update(tests, self._rates)
            if self._bank.value >= self._rules.rate.threshold:
                self._since = 0
                self._book.raise_alert(self._rules.alerts.traffic_changed, EVERYWHERE, now, self.evidence())
        elif full:
            self._learn()

    def evidence(self) -> dict[str, Any]:
        """Return what moved most, and the logarithm of the evidence, for people to read."""
        log, name = max(((d.log, test) for test, d in self._bank.members()), default=(0.0, None))
        return {
            "log_evidence": round(self._bank.log, 3),
            "strongest": None if log == 0 else name,
            "reference": bool(self._rates),
        }

    def _learn(self) -> None:
        """Take what was seen last for the usual traffic."""
        rule, total = self._rules.traffic, len(self._seen)
        shares = Counter(route for route, _ in self._seen)
        self._routes = frozenset(route for route, _ in shares.most_common(_MAX_ROUTES))
        self._lengths = {}
        for route in self._routes:
            lengths = [tokens for name, tokens in self._seen if name == route]
            if len(lengths) >= _FEWEST:
                low, high = np.quantile(lengths, [_TAIL, 1 - _TAIL])
                self._lengths[route] = float(low), float(high)
        counts, trials = Counter[str](), Counter[str]()
        for route, tokens in self._seen:
            for test, x in self._tests(route, tokens).items():
                counts[test] += x
                trials[test] += 1
        trials[f"share:{_NEW}"] = total
        bounds = {
            test: rate_upper_bound(counts[test], count, self._rules.rate.confidence)
            for test, count in trials.items()
        }
        rates = {test: rule.drift * p / (1 - p + rule.drift * p) for test, p in bounds.items()}
        self._rates = {test: rate for test, rate in rates.items() if rate <= _MOST}
        self._bank = self._fresh()

    def _tests(self, route: str, prompt_tokens: int) -> dict[str, bool]:
        tests = {f"share:{name}": name == route for name in self._routes}
        tests[f"share:{_NEW}"] = route not in self._routes
        if route in self._lengths:
            low, high = self._lengths[route]
            tests |= {f"short:{route}": prompt_tokens < low, f"long:{route}": prompt_tokens > high}
        return tests

    def _fresh(self) -> Bank:
        return Bank(self._rules.rate.powers, 10 * self._rules.rate.threshold, statistic=str)
