"""Judges one response against the rules and the baseline: which signals left their healthy range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from alerting.baseline import SIGNALS, Baseline, Limits, Signal
from alerting.rules import QuantilePreset, RawPreset, Rules

Basis = Literal["route", "pooled", "none"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one response, and the upper bounds of their healthy rates.

    `rates` is empty where no rate is known. `basis` tells whose limits were used: the route's own,
    or other routes' (wider: their healthy L1 rate is taken to be at least the preset's `pooled_rate`).
    """

    signals: dict[Signal, bool]
    rates: dict[Signal, float]
    grades: list[tuple[bool, float]]  # whether each grade's limit was passed, and its healthy rate
    basis: Basis
    cause: str = ""


class Judge:
    """One preset, with the baseline in force."""

    def __init__(self, name: str, rules: Rules) -> None:
        self.name = name
        self._rules = rules
        self._preset = rules.preset(name)
        self._baseline: Baseline | None = None
        self._rates: dict[tuple[str, str], tuple[Limits | None, dict[Signal, float], Basis]] = {}

    def use(self, baseline: Baseline | None) -> None:
        """Put a baseline in force."""
        self._baseline = baseline
        self._rates.clear()

    def verdict(
        self, route: str, band: str, statistics: Mapping[str, float], raw_l1: Iterable[str]
    ) -> Verdict | None:
        """Judge a response by what is known of it; None when this preset cannot (no limits)."""
        limits, rates, basis = self._known(route, band)
        if isinstance(self._preset, RawPreset):
            raised = self.name in raw_l1
            return Verdict(
                signals={"l1": raised},
                rates=rates,
                grades=[(raised, rate) for rate in rates.values()],
                basis=basis,
                cause="run_and_entropy",
            )
        if limits is None or not statistics:
            return None
        signals = limits.judge(statistics, self._preset.statistics)
        cause = limits.strongest(statistics, self._preset.statistics) if signals["l1"] else ""
        passed = limits.passed(statistics, self._preset.statistics)
        grades = list(zip(passed, self._grade_rates(limits, basis), strict=True))
        return Verdict(signals=signals, rates=rates, grades=grades, basis=basis, cause=cause)

    def _grade_rates(self, limits: Limits, basis: Basis) -> list[float]:
        """Upper bounds of the grades' healthy rates; widened for another route's limits as for an L1."""
        assert isinstance(self._preset, QuantilePreset)
        widening = self._preset.pooled_rate / self._preset.alpha if basis == "pooled" else 0.0
        return [
            max(min(0.95, grade * widening), count.upper(self._rules.rate.confidence))
            for grade, count in zip(self._preset.grades, limits.grade_counts, strict=True)
        ]

    def _known(self, route: str, band: str) -> tuple[Limits | None, dict[Signal, float], Basis]:
        if (route, band) not in self._rates:
            self._rates[route, band] = self._look_up(route, band)
        return self._rates[route, band]

    def _look_up(self, route: str, band: str) -> tuple[Limits | None, dict[Signal, float], Basis]:
        stratum = self._baseline.stratum(route, band) if self._baseline else None
        if stratum is None:
            return None, {}, "none"
        own = stratum.route == route
        basis: Basis = "route" if own else "pooled"
        confidence = self._rules.rate.confidence
        if isinstance(self._preset, QuantilePreset):
            limits = stratum.limits[self.name]
            floor = 0.0 if own else self._preset.pooled_rate
            rates = {signal: max(floor, limits.counts[signal].upper(confidence)) for signal in SIGNALS}
            return limits, rates, basis
        return None, {"l1": stratum.raw[self.name].upper(confidence)}, basis
