"""What healthy responses look like, per route and temperature band, as a versioned JSON file.

Half of the healthy responses sets the limits, the other half counts how often they are passed:
the false-alarm bounds rest on the second half alone. Route `*` pools all routes of a band.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from alerting.rules import QuantilePreset, RawPreset, Rules, Statistic
from alerting.sequential import rate_upper_bound

FORMAT_VERSION = 1
POOLED = "*"
_SPREAD_FLOOR = 0.02  # in nats and in probability: finer differences carry no meaning

Signal = Literal["l1", "confidence", "entropy"]
SIGNALS: tuple[Signal, ...] = ("l1", "confidence", "entropy")


class BaselineError(ValueError):
    """The baseline cannot be built, read or used; the message tells the mend."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One healthy response: its statistics, and the raw presets that called it an L1."""

    route: str
    band: str
    statistics: dict[str, float]
    raw_l1: list[str] = []


class Count(msgspec.Struct, frozen=True):
    """Events among trials."""

    events: int
    trials: int

    def upper(self, confidence: float) -> float:
        """Return the Clopper–Pearson upper bound of the rate."""
        return rate_upper_bound(self.events, self.trials, confidence)


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """A statistic under health: its median, and the distances to its 10th and 90th percentiles."""

    median: float
    below: float
    above: float
    values: list[float]  # sorted

    def score(self, value: float, side: Literal["low", "high", "both"]) -> float:
        """Return how many healthy spreads `value` lies out on its suspicious side."""
        low, high = (self.median - value) / self.below, (value - self.median) / self.above
        return {"low": low, "high": high, "both": max(low, high)}[side]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one quantile preset in one stratum, and how often health passes them."""

    tails: dict[str, Tail]
    thresholds: dict[Signal, float]
    counts: dict[Signal, Count]
    grade_thresholds: list[float] = []  # of the L1 score, one per grade of the preset
    grade_counts: list[Count] = []

    def judge(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> dict[Signal, bool]:
        """Return, for each signal, whether a response passes its limit. Absent statistics do not speak."""
        scores = _scores(statistics, listed, self.tails)
        return {signal: scores[signal] > self.thresholds[signal] for signal in SIGNALS}

    def passed(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> list[bool]:
        """Return, for each grade, whether a response passes its limit."""
        score = _scores(statistics, listed, self.tails)["l1"]
        return [score > threshold for threshold in self.grade_thresholds]

    def strongest(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> str:
        """Return the name of the statistic that lies furthest out."""
        present = [s for s in listed if s.name in statistics and s.name in self.tails]
        return max(present, key=lambda s: self.tails[s.name].score(statistics[s.name], s.side)).name


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one route and temperature band."""

    route: str
    band: str
    limits: dict[str, Limits]  # by quantile preset
    raw: dict[str, Count]  # by raw preset

    def l1(self) -> dict[str, Count]:
        """Return how many healthy responses raised an L1, by preset."""
        return {name: limits.counts["l1"] for name, limits in self.limits.items()} | self.raw


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `interruptions` counts responses broken off by their users, per route and pooled."""

    version: int
    created: str
    model: str
    quantization: str
    rules: str  # Rules.digest
    strata: list[Stratum]
    interruptions: dict[str, Count]

    def stratum(self, route: str, band: str) -> Stratum | None:
        """Return a route's own stratum, else the pooled one of its band, else None."""
        own = pooled = None
        for stratum in self.strata:
            if stratum.band == band:
                own = stratum if stratum.route == route else own
                pooled = stratum if stratum.route == POOLED else pooled
        return own or pooled

    def interruption_rate(self, route: str, rules: Rules) -> float:
        """Return the upper bound of the healthy interruption rate, at least the rules' floor."""
        count = self.interruptions.get(route) or self.interruptions.get(POOLED)
        if count is None or count.trials == 0:
            return rules.interruptions.floor
        return max(rules.interruptions.floor, count.upper(rules.rate.confidence))

    def mismatch(self, rules: Rules, model: str | None, quantization: str | None) -> str | None:
        """Return why this baseline does not hold for what runs now, or None."""
        if self.rules != rules.digest():
            return "the baseline was made with other limits in the rules; run `quaver calibrate` again"
        if model and model != self.model:
            return f"the baseline is of model {self.model}, {model} runs; run `quaver calibrate` again"
        if quantization and quantization != self.quantization:
            return (
                f"the baseline is of quantisation {self.quantization}, {quantization} runs; calibrate again"
            )
        return None

    def summary(self) -> dict[str, Any]:
        """Return what the file is of and, per stratum, how many healthy responses raised an L1."""
        return {
            "created": self.created,
            "model": self.model,
            "quantization": self.quantization,
            "strata": [
                {
                    "route": s.route,
                    "band": s.band,
                    "l1": {name: [c.events, c.trials] for name, c in s.l1().items()},
                }
                for s in self.strata
            ],
            "interruptions": {route: [c.events, c.trials] for route, c in self.interruptions.items()},
        }


def build(
    samples: Iterable[Sample],
    rules: Rules,
    *,
    model: str,
    quantization: str,
    interruptions: Mapping[str, Count] | None = None,
) -> Baseline:
    """Build a baseline from healthy responses in order of arrival.

    A route and band with fewer than 2 × `min_samples` responses gets no stratum of its own; raises
    BaselineError when nothing, not even all routes together, has enough.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.route, sample.band), []).append(sample)
        groups.setdefault((POOLED, sample.band), []).append(sample)
    need = 2 * max(
        (p.min_samples for p in rules.presets.values() if isinstance(p, QuantilePreset)), default=10
    )
    strata = [
        _stratum(route, band, group, rules)
        for (route, band), group in sorted(groups.items())
        if len(group) >= need
    ]
    if not strata:
        most = max((len(group) for group in groups.values()), default=0)
        raise BaselineError(f"{most} healthy responses are too few: collect at least {need}")
    counts = dict(interruptions or {})
    counts[POOLED] = Count(sum(c.events for c in counts.values()), sum(c.trials for c in counts.values()))
    return Baseline(
        version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        quantization=quantization,
        rules=rules.digest(),
        strata=strata,
        interruptions=counts,
    )


def save(baseline: Baseline, path: Path) -> None:
    """Write a baseline; readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(msgspec.json.format(msgspec.json.encode(baseline)))
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def load(path: Path) -> Baseline:
    """Read a baseline; raises BaselineError when it is damaged or of another version."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise BaselineError(f"cannot read the baseline {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BaselineError(f"{path} is not a baseline ({error}); run `quaver calibrate`") from error
    if baseline.version != FORMAT_VERSION:
        raise BaselineError(
            f"{path} has version {baseline.version}, not {FORMAT_VERSION}; run `quaver calibrate`"
        )
    return baseline


def _stratum(route: str, band: str, samples: list[Sample], rules: Rules) -> Stratum:
    fit, rate = samples[::2], samples[1::2]
    limits, raw = {}, {}
    for name, preset in rules.presets.items():
        if isinstance(preset, RawPreset):
            raw[name] = Count(sum(name in s.raw_l1 for s in samples), len(samples))
        else:
            limits[name] = _limits(fit, rate, preset)
    return Stratum(route=route, band=band, limits=limits, raw=raw)


def _limits(fit: list[Sample], rate: list[Sample], preset: QuantilePreset) -> Limits:
    tails: dict[str, Tail] = {}
    for statistic in preset.statistics:
        values = sorted(s.statistics[statistic.name] for s in fit if statistic.name in s.statistics)
        if values:
            tails[statistic.name] = _tail(values)
    scores = [_scores(s.statistics, preset.statistics, tails) for s in fit]
    shares = {"l1": preset.alpha, "confidence": preset.alpha / 2, "entropy": preset.alpha / 2}
    thresholds: dict[Signal, float] = {
        signal: conformal_threshold([score[signal] for score in scores], shares[signal]) for signal in SIGNALS
    }
    grades = [conformal_threshold([score["l1"] for score in scores], grade) for grade in preset.grades]
    unused = Limits(tails=tails, thresholds=thresholds, counts={}, grade_thresholds=grades)
    verdicts = [unused.judge(s.statistics, preset.statistics) for s in rate]
    counts = {signal: Count(sum(v[signal] for v in verdicts), len(verdicts)) for signal in SIGNALS}
    passed = [unused.passed(s.statistics, preset.statistics) for s in rate]
    grade_counts = [Count(sum(column), len(passed)) for column in zip(*passed, strict=True)]
    return msgspec.structs.replace(unused, counts=counts, grade_counts=grade_counts)


def conformal_threshold(scores: list[float], alpha: float) -> float:
    """Return the ⌈(n + 1)(1 − α)⌉-th smallest score, the largest where n is too small for α."""
    rank = min(len(scores), math.ceil((len(scores) + 1) * (1 - alpha)))
    return sorted(scores)[rank - 1]


def _tail(values: list[float]) -> Tail:
    low, median, high = (float(q) for q in np.quantile(values, [0.1, 0.5, 0.9]))
    return Tail(
        median=median,
        below=max(median - low, _SPREAD_FLOOR),
        above=max(high - median, _SPREAD_FLOOR),
        values=values,
    )


def _scores(
    statistics: Mapping[str, float], listed: Iterable[Statistic], tails: Mapping[str, Tail]
) -> dict[Signal, float]:
    scores: dict[Signal, float] = dict.fromkeys(SIGNALS, -math.inf)
    for statistic in listed:
        if statistic.name in statistics and statistic.name in tails:
            score = tails[statistic.name].score(statistics[statistic.name], statistic.side)
            scores[statistic.signal] = max(scores[statistic.signal], score)
            scores["l1"] = max(scores["l1"], score)
    return scores
