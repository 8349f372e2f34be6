"""What healthy responses look like, per route and temperature band, as a versioned JSON file.

Half of the healthy responses sets the limits, the other half counts how often they are passed:
the false-alarm bounds rest on the second half alone. Route `*` pools all routes of a band.
"""

from __future__ import annotations

import bisect
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from alerting.rules import QuantilePreset, RawPreset, Rules, Statistic
from alerting.sequential import rate_upper_bound
from engine.api.body import decode

FORMAT_VERSION = 1
POOLED = "*"
L1 = "l1"  # the test of the strongest tail of all
_TAIL = 0.1  # share of the healthy values from which on a tail is taken to be exponential
_SCALE_FLOOR = 0.002  # in nats and in probability: finer differences carry no meaning


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

    events: Annotated[int, msgspec.Meta(ge=0)]
    trials: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.events > self.trials:
            raise ValueError("more events than trials")

    def upper(self, confidence: float) -> float:
        """Return the Clopper–Pearson upper bound of the rate."""
        return rate_upper_bound(self.events, self.trials, confidence)


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a statistic under health.

    `values` are sorted, negated for the low side: larger is always more suspicious. Beyond `start`,
    their 90th percentile, the tail is exponential with `scale`.
    """

    values: list[float]
    start: float
    scale: Annotated[float, msgspec.Meta(gt=0)]

    def score(self, value: float) -> float:
        """Return −ln of the healthy tail probability at a value (negated for the low side)."""
        if value > self.start:
            return (value - self.start) / self.scale - math.log(_TAIL)
        size = len(self.values)
        beyond = size - bisect.bisect_left(self.values, value)
        return -math.log(max(_TAIL, (beyond + 1) / (size + 1)))


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one quantile preset in one stratum, and how often health passes them.

    Tests are named `<statistic>:<side>@<level>`, and `l1` for the strongest tail of all.
    """

    tails: dict[str, Tail]
    thresholds: dict[str, float]
    counts: dict[str, Count]  # empty while they are being counted

    def __post_init__(self) -> None:
        if L1 not in self.thresholds or (self.counts and self.counts.keys() != self.thresholds.keys()):
            raise ValueError("limits without their L1, or without their counts")

    def judge(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> dict[str, bool]:
        """Return, for each test, whether a response passes its limit. Absent statistics do not speak."""
        scores = tail_scores(statistics, listed, self.tails)
        if not scores:
            return {}
        tests = {name: scores[key] > limit for name, key, limit in self._tests(listed) if key in scores}
        return tests | {L1: max(scores.values()) > self.thresholds[L1]}

    def strongest(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> str:
        """Return the statistic and side that lie furthest out."""
        scores = tail_scores(statistics, listed, self.tails)
        return max(scores, key=scores.__getitem__)

    def _tests(self, listed: Iterable[Statistic]) -> Iterator[tuple[str, str, float]]:
        for statistic in listed:
            for level in statistic.levels:
                name = name_of_test(statistic, level)
                if name in self.thresholds:
                    yield name, statistic.key, self.thresholds[name]


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one route and temperature band."""

    route: str
    band: str
    limits: dict[str, Limits]  # by quantile preset
    raw: dict[str, Count]  # by raw preset

    def l1(self) -> dict[str, Count]:
        """Return how many healthy responses raised an L1, by preset."""
        return {name: limits.counts[L1] for name, limits in self.limits.items()} | self.raw


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
        quantile = {name for name, p in rules.presets.items() if isinstance(p, QuantilePreset)}
        if any(stratum.limits.keys() != quantile for stratum in self.strata):
            return "the baseline lacks limits of a preset; run `quaver calibrate` again"
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
    write(path, msgspec.json.format(msgspec.json.encode(baseline)))


def write(path: Path, content: bytes) -> None:
    """Write a file, synced; readers see the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def load(path: Path) -> Baseline:
    """Read a baseline; raises BaselineError when it is damaged or of another version."""
    try:
        baseline = decode(path.read_bytes(), Baseline)
    except OSError as error:
        raise BaselineError(f"cannot read the baseline {path}: {error.strerror}") from error
    except ValueError as error:
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
    listed = preset.statistics
    tails = {s.key: tail for s in listed if (tail := _tail([x.statistics for x in fit], s)) is not None}
    scores = [tail_scores(s.statistics, listed, tails) for s in fit]
    thresholds = {L1: conformal_threshold([max(s.values()) for s in scores if s], preset.alpha)}
    for statistic in listed:
        own = [s[statistic.key] for s in scores if statistic.key in s]
        for level in statistic.levels if own else ():
            thresholds[name_of_test(statistic, level)] = conformal_threshold(own, level)
    unused = Limits(tails=tails, thresholds=thresholds, counts={})
    verdicts = [unused.judge(s.statistics, listed) for s in rate]
    counts = {
        name: Count(sum(v.get(name, False) for v in verdicts), sum(name in v for v in verdicts))
        for name in thresholds
    }
    return Limits(tails=tails, thresholds=thresholds, counts=counts)


def name_of_test(statistic: Statistic, level: float) -> str:
    """Return the name of the test of a statistic at a level."""
    return f"{statistic.key}@{level:g}"


def conformal_threshold(scores: list[float], alpha: float) -> float:
    """Return the ⌈(n + 1)(1 − α)⌉-th smallest score, the largest where n is too small for α."""
    rank = min(len(scores), math.ceil((len(scores) + 1) * (1 - alpha)))
    return sorted(scores)[rank - 1]


def tail_scores(
    statistics: Mapping[str, float], listed: Iterable[Statistic], tails: Mapping[str, Tail]
) -> dict[str, float]:
    """Return −ln of the healthy tail probability of each statistic and side that is present."""
    return {
        s.key: tails[s.key].score(_signed(statistics[s.name], s))
        for s in listed
        if s.name in statistics and s.key in tails
    }


def _tail(healthy: list[dict[str, float]], statistic: Statistic) -> Tail | None:
    values = sorted(_signed(h[statistic.name], statistic) for h in healthy if statistic.name in h)
    if not values:
        return None
    start = float(np.quantile(values, 1 - _TAIL))
    beyond = [value - start for value in values if value > start]
    scale = sum(beyond) / len(beyond) if beyond else 0.0
    return Tail(values=values, start=start, scale=max(scale, _SCALE_FLOOR))


def _signed(value: float, statistic: Statistic) -> float:
    return -value if statistic.side == "low" else value
