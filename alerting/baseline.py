"""What healthy responses look like, per route and temperature band, as a versioned JSON file.

Half of the healthy responses shapes the tails, the other half sets the limit of the L1 and counts how often
it is passed. Limits of one statistic alone do not depend on its tail and rest on all of them. Route `*` pools
all routes of a band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from alerting.files import write
from alerting.limits import L1, Count, Healthy, Limits, LimitsError, fit_limits
from alerting.rules import QuantilePreset, RawPreset, Rules
from alerting.samples import Sample, scored, to_collect
from alerting.scores import Frozen, Response
from engine.api.body import decode

FORMAT_VERSION = 3
ARCHIVED = 10  # earlier baselines that are kept
POOLED = "*"


class BaselineError(ValueError):
    """The baseline cannot be built, read or used; the message tells the mend."""


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
    """The file. `interruptions` counts responses broken off by their users, per route and pooled.

    `frozen` is what the scores know of health, by temperature band; its `tokens` are what it rests on.
    """

    version: int
    created: str
    model: str
    quantization: str
    rules: str  # Rules.digest
    strata: list[Stratum]
    interruptions: dict[str, Count]
    frozen: dict[str, Frozen] = {}

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
            "scores": {
                band: {"tokens": f.tokens, "heads": f.heads is not None, "contrast": f.contrast is not None}
                for band, f in self.frozen.items()
            },
        }


def fewest(rules: Rules) -> int:
    """Return how many healthy responses a route needs in a band of temperatures for limits of its own."""
    return 2 * max(
        (p.min_samples for p in rules.presets.values() if isinstance(p, QuantilePreset)), default=10
    )


def build(
    samples: Iterable[Sample],
    rules: Rules,
    *,
    model: str,
    quantization: str,
    interruptions: Mapping[str, Count] | None = None,
    contrast: Sequence[tuple[Response, bool]] = (),
) -> Baseline:
    """Build a baseline from healthy responses in order of arrival; `contrast` as `scores.fit` takes it.

    A route and band with less than the `fewest` responses gets no stratum of its own; raises
    BaselineError when nothing, not even all routes together, has enough.
    """
    groups: dict[tuple[str, str], list[Sample]] = {}
    samples, frozen = scored(list(samples), contrast)
    for sample in samples:
        groups.setdefault((sample.route, sample.band), []).append(sample)
        groups.setdefault((POOLED, sample.band), []).append(sample)
    need = fewest(rules)
    strata = [
        _stratum(route, band, group, rules)
        for (route, band), group in sorted(groups.items())
        if len(group) >= need
    ]
    if not strata:
        most = max((len(group) for group in groups.values()), default=0)
        raise BaselineError(
            f"{most} healthy responses are too few: a band of temperatures needs {need} beside those that "
            f"the attention heads are fitted to; collect at least {to_collect(need)}"
        )
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
        frozen=frozen,
    )


def save(baseline: Baseline, path: Path) -> None:
    """Write a baseline; readers see the old file or the whole new one."""
    write(path, msgspec.json.format(msgspec.json.encode(baseline)))


def archive(path: Path) -> Path | None:
    """Copy the baseline at `path` beside it, as `baselines/<created>.json`; the newest `ARCHIVED` stay.

    Returns the copy, None when there is nothing readable to keep.
    """
    try:
        old = load(path)
    except BaselineError:
        return None
    folder = path.parent / "baselines"
    copy = folder / f"{old.created.replace(':', '')}.json"
    save(old, copy)
    for surplus in sorted(folder.glob("*.json"))[:-ARCHIVED]:
        surplus.unlink(missing_ok=True)
    return copy


def archived(path: Path) -> list[Path]:
    """Return the kept predecessors of the baseline at `path`, oldest first."""
    return sorted((path.parent / "baselines").glob("*.json"))


def load(path: Path) -> Baseline:
    """Read a baseline; raises BaselineError when it is damaged or of another version."""
    try:
        baseline = decode(path.read_bytes(), Baseline)
    except OSError as error:
        mend = "; `quaver calibrate` makes one" if isinstance(error, FileNotFoundError) else ""
        raise BaselineError(f"cannot read the baseline {path}: {error.strerror}{mend}") from error
    except ValueError as error:
        raise BaselineError(f"{path} is not a baseline ({error}); run `quaver calibrate`") from error
    if baseline.version != FORMAT_VERSION:
        raise BaselineError(
            f"{path} has version {baseline.version}, not {FORMAT_VERSION}; run `quaver calibrate`"
        )
    return baseline


def _stratum(route: str, band: str, samples: list[Sample], rules: Rules) -> Stratum:
    healthy = [Healthy(sample.statistics, sample.group) for sample in samples]
    limits, raw = {}, {}
    for name, preset in rules.presets.items():
        if isinstance(preset, RawPreset):
            raw[name] = Count(sum(name in s.raw_l1 for s in samples), len(samples))
        else:
            try:
                limits[name] = fit_limits(healthy, preset, rules.rate.confidence)
            except LimitsError as error:
                raise BaselineError(f"preset {name}, route {route}: {error}; change its statistics") from None
    return Stratum(route=route, band=band, limits=limits, raw=raw)
