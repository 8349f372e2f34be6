"""Judges one response against the rules and the baseline: which signals left their healthy range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from alerting.baseline import Baseline
from alerting.limits import L1, Count, Limits
from alerting.rules import QuantilePreset, RawPreset, Rules

Basis = Literal["route", "pooled", "none"]
_FREQUENT = 0.25  # level of a test that many healthy responses pass


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The tests of one response, and the upper bounds of the healthy rates of all tests.

    Of a `partial` one statistics are absent that need what was lost; the test of the strongest of all rests.

    `rates` is empty where none is known. `calm` bounds the healthy rates of *not* passing the frequent
    tests: answers that pass them too seldom are surer than healthy ones, or the baseline is old. `basis`
    tells whose limits were used: the route's own, or other routes' (wider: healthy rates are taken to be
    `pooled_drift` times theirs).
    """

    tests: dict[str, bool]
    rates: dict[str, float]
    calm: dict[str, float] = {}
    basis: Basis
    l1: bool
    partial: bool = False
    cause: str = ""


class _Known(NamedTuple):
    limits: Limits | None
    rates: dict[str, float]
    calm: dict[str, float]
    basis: Basis


_UNKNOWN = _Known(None, {}, {}, "none")


class Judge:
    """One preset, with the baseline in force."""

    def __init__(self, name: str, rules: Rules) -> None:
        self.name = name
        self._rules = rules
        self._preset = rules.preset(name)
        self._baseline: Baseline | None = None
        self._rates: dict[tuple[str, str], _Known] = {}

    def use(self, baseline: Baseline | None) -> None:
        """Put a baseline in force."""
        self._baseline = baseline
        self._rates.clear()

    def verdict(
        self,
        route: str,
        band: str,
        statistics: Mapping[str, float],
        raw_l1: Iterable[str],
        *,
        partial: bool = False,
    ) -> Verdict | None:
        """Judge a response by what is known of it; None when this preset cannot (no limits).

        `partial`: telemetry lost something that belongs to its statistics.
        """
        limits, rates, calm, basis = self._known(route, band)
        if isinstance(self._preset, RawPreset):
            l1 = self.name in raw_l1
            return Verdict(tests={L1: l1}, rates=rates, basis=basis, l1=l1, cause="run_and_entropy")
        if limits is None:
            return None
        tests = limits.judge(statistics, self._preset)
        if not tests:
            return None
        l1 = tests.pop(L1) if partial else tests[L1]
        cause = limits.strongest(statistics, self._preset.statistics) if l1 else ""
        return Verdict(tests=tests, rates=rates, calm=calm, basis=basis, l1=l1, partial=partial, cause=cause)

    def reaches_l1(self, route: str, band: str, key: str) -> float:
        """Return the value beyond which a statistic alone raises an L1; infinite where nothing is known."""
        limits = self._known(route, band).limits
        return math.inf if limits is None else limits.reaches_l1(key)

    def _known(self, route: str, band: str) -> _Known:
        if (route, band) not in self._rates:
            self._rates[route, band] = self._look_up(route, band)
        return self._rates[route, band]

    def _look_up(self, route: str, band: str) -> _Known:
        stratum = self._baseline.stratum(route, band) if self._baseline else None
        if stratum is None:
            return _UNKNOWN
        own = stratum.route == route
        basis: Basis = "route" if own else "pooled"
        drift = self._rules.rate.drift
        if isinstance(self._preset, QuantilePreset):
            limits = stratum.limits[self.name]
            drift *= 1.0 if own else self._preset.pooled_drift
            rates = {name: self._bound(count, drift) for name, count in limits.counts.items()}
            calm, often = {}, max(self._preset.levels)
            for name, statistic, level in self._preset.tests():
                if name in rates and statistic.tolerated is not None:
                    rates[name] = max(rates[name], statistic.tolerated)
                elif name in rates and level == often >= _FREQUENT:
                    calm[name] = self._bound(limits.counts[name].others(), drift)
            return _Known(limits, rates, calm, basis)
        return _Known(None, {L1: self._bound(stratum.raw[self.name], drift)}, {}, basis)

    def _bound(self, count: Count, drift: float) -> float:
        return min(1.0, drift * count.upper(self._rules.rate.confidence))
