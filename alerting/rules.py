"""The alert rules: one YAML file, validated, with errors that name the line of thought to mend."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PACKAGED = Path(__file__).with_name("rules.yaml")

Share = Annotated[float, Field(gt=0, lt=1)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
StatisticName = Literal[
    "sentence_confidence",
    "sentence_entropy",
    "sentence_excess",
    "sentence_entropy_post",
    "response_confidence",
    "response_entropy",
    "response_excess",
    "response_entropy_post",
    "window_excess",
    "cusum",
    "heads",
    "heads_residual",
    "heads_onset",
    "contrast",
    "combined",
]


#: Statistics that need what calibration fitted (`alerting.scores`).
FITTED = ("cusum", "heads", "heads_residual", "heads_onset", "contrast", "combined")


class RulesError(ValueError):
    """The rules file cannot be used; the message says where and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LeavingRule(_Strict):
    """L2: interruptions while an L1 is live."""

    live_s: Seconds
    min_responses: Count
    min_interruptions: Count
    tenant_share: Annotated[float, Field(gt=0, le=0.5)]


class RawLeavingRule(LeavingRule):
    """L2 by a multiple of the baseline within a window."""

    window_s: Seconds
    ratio: Annotated[float, Field(gt=1)]


class QuantileLeavingRule(LeavingRule):
    """L2 by a sequential test, with evidence from the model too."""

    model_evidence: Annotated[float, Field(ge=1)]


class RawPreset(_Strict):
    """L1 by fixed numbers: a run of low confidence and a high running mean entropy."""

    kind: Literal["raw"]
    run: Count
    confidence: Share
    entropy: Annotated[float, Field(ge=0)]
    l2: RawLeavingRule


class Statistic(_Strict):
    """One number per response, and the side on which it is suspicious.

    What is `tolerated` raises no L1: it counts once more than that share of responses is beyond the strictest
    limit.
    """

    name: StatisticName
    signal: Literal["confidence", "entropy"]
    side: Literal["low", "high"]
    tolerated: Share | None = None

    @property
    def key(self) -> str:
        """The statistic and its side, in one word."""
        return f"{self.name}:{self.side}"

    def test(self, level: float) -> str:
        """Return the name of its test at a level."""
        return f"{self.key}@{level:g}"


class Mixture(_Strict):
    """Weights of the three joint inputs; they sum to 1."""

    confidence: Share
    entropy: Share
    interruption: Share

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        total = self.confidence + self.entropy + self.interruption
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the weights sum to {total:g}; they must sum to 1")
        return self


class QuantilePreset(_Strict):
    """L1 by limits from healthy responses."""

    kind: Literal["quantile"]
    alpha: Share
    min_samples: Annotated[int, Field(ge=5)]
    pooled_drift: Annotated[float, Field(ge=1)]
    levels: Annotated[list[Share], Field(min_length=1)]
    statistics: Annotated[list[Statistic], Field(min_length=1)]
    mixture: Mixture
    l2: QuantileLeavingRule

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [s.key for s in self.statistics]
        if len(set(names)) < len(names):
            raise ValueError("a statistic is listed twice")
        if {s.signal for s in self.statistics} != {"confidence", "entropy"}:
            raise ValueError("list at least one statistic of each signal, confidence and entropy")
        if all(s.tolerated is not None for s in self.statistics):
            raise ValueError("all statistics are tolerated: nothing could raise an L1")
        if len(set(self.levels)) < len(self.levels):
            raise ValueError("a level is listed twice")
        return self

    def tests(self) -> Iterator[tuple[str, Statistic, float]]:
        """Yield every test, with its statistic and the share of healthy responses beyond its limit."""
        for statistic in self.statistics:
            for level in self.levels if statistic.tolerated is None else [min(self.levels)]:
                yield statistic.test(level), statistic, level


Preset = Annotated[RawPreset | QuantilePreset, Field(discriminator="kind")]


class RateRule(_Strict):
    """The sequential test over responses."""

    threshold: Annotated[float, Field(ge=10)]
    powers: Annotated[list[Share], Field(min_length=1)]
    confidence: Share
    drift: Annotated[float, Field(ge=1)]
    recover_responses: Annotated[int, Field(ge=5)]
    recover_level: Share
    quiet_s: Seconds


class InterruptionRule(_Strict):
    """What is taken for a healthy interruption rate."""

    floor: Share


class BreakerRule(_Strict):
    """Timing and probes of the breaker."""

    cool_down_s: Seconds
    cool_down_max_s: Seconds
    probes: Count
    probes_unhealthy: Annotated[int, Field(ge=0)]
    probe_timeout_s: Seconds

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.probes_unhealthy >= self.probes:
            raise ValueError("probes_unhealthy must be below probes, or the breaker always closes")
        if self.cool_down_max_s < self.cool_down_s:
            raise ValueError("cool_down_max_s must not be below cool_down_s")
        return self


class AlertRule(_Strict):
    """How one condition is named and who hears of it."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$")]
    level: Literal["L1", "L2", "info"]
    severity: Literal["info", "warning", "critical"]
    team: Literal["prompt-eng", "mlops", "sre"]
    summary: str


class AlertRules(_Strict):
    """The conditions of the evaluator."""

    l1_rate: AlertRule
    users_leaving: AlertRule
    joint_evidence: AlertRule
    canary: AlertRule = AlertRule(
        name="QuaverCanary",
        level="L2",
        severity="critical",
        team="mlops",
        summary="Known prompts are no longer answered as in health",
    )
    traffic_changed: AlertRule = AlertRule(
        name="QuaverTrafficChanged",
        level="info",
        severity="info",
        team="prompt-eng",
        summary="Routes or prompt lengths are no longer the usual ones",
    )


class TrafficRule(_Strict):
    """When the mix of routes and prompt lengths counts as another one."""

    reference: Annotated[int, Field(ge=50, le=100_000)] = 300
    drift: Annotated[float, Field(ge=1)] = 1.5


class SloRule(_Strict):
    """Service levels that only Prometheus watches."""

    latency_metric: Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")]
    latency_p95_s: Seconds
    availability: Share
    min_failures: Count
    accuracy: Share
    evaluator_stale_s: Seconds


class Rules(_Strict):
    """Everything in the rules file."""

    version: Literal[1]
    default: str
    presets: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], Preset]
    rate: RateRule
    interruptions: InterruptionRule
    traffic: TrafficRule = TrafficRule()
    breaker: BreakerRule
    alerts: AlertRules
    slo: SloRule

    @model_validator(mode="after")
    def _default_exists(self) -> Self:
        self.preset(self.default)
        return self

    def preset(self, name: str) -> RawPreset | QuantilePreset:
        """Return a preset by name; raises RulesError listing the known names."""
        if name not in self.presets:
            raise RulesError(f"no preset {name!r}; the rules have: {', '.join(sorted(self.presets))}")
        return self.presets[name]

    def digest(self) -> str:
        """Return a short hash of what decides an L1: a baseline holds for these limits only."""
        parts = []
        for name, preset in sorted(self.presets.items()):
            parts.append(
                f"{name}={preset.model_dump_json(exclude={'l2', 'mixture', 'pooled_drift', 'min_samples'})}"
            )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_rules(path: Path | None = None) -> Rules:
    """Read and validate a rules file (the packaged one when None); raises RulesError."""
    path = path or PACKAGED
    raw = read_yaml(path, "rules file")
    if not isinstance(raw, dict):
        raise RulesError(f"{path} must hold a mapping with the keys of the packaged rules.yaml")
    try:
        return Rules.model_validate(raw)
    except ValidationError as error:
        raise RulesError(f"{path}: {in_words(error)}") from error


def read_yaml(path: Path, what: str) -> Any:
    """Return what a file of YAML holds; raises RulesError, which calls it `what`."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RulesError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RulesError(f"{path} is not valid YAML: {error}") from error


def in_words(error: ValidationError) -> str:
    """Return what is wrong with a file, each fault with its place."""
    return "; ".join(
        f"{'.'.join(_place(e['loc'])) or 'the whole file'}: "
        f"{_WORDS.get(e['type'], e['msg']).removeprefix('Value error, ')}"
        for e in error.errors()
    )


_WORDS = {"extra_forbidden": "there is no such key", "missing": "the key is missing"}


def _place(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that lead to a fault, without the kind of a preset, which is no key."""
    parts = [str(part) for part in location]
    return [*parts[:2], *parts[3:]] if parts[:1] == ["presets"] else parts
