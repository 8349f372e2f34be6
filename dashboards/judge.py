"""What the tiles say: one value, one word. Quality is judged by the alerts, the engine by limits.

A raw limit on confidence or entropy has no error meaning, so those tiles take their state from
the alert rules, which know their false-alarm rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from dashboards.shapes import Alerts, Live

State = Literal["steady", "watch", "alarm", "none"]
Series = Sequence[float | None]
WINDOW_S = 30


@dataclass(frozen=True)
class Tile:
    """`state` is a colour, `word` says the same in text; `value` is ready to print."""

    label: str
    value: str
    unit: str
    state: State
    word: str
    trend: list[float | None]
    help: str


@dataclass(frozen=True)
class Gauge:
    """How one series becomes a tile. Limits are inclusive, in the series' unit; None is unjudged."""

    key: str
    label: str
    show: Callable[[float], tuple[str, str]]  # value → (text, unit)
    fold: Literal["mean", "last", "sum"]
    help: str
    watch: float | None = None
    alarm: float | None = None
    by_alerts: bool = False


def _plain(digits: int, unit: str = "") -> Callable[[float], tuple[str, str]]:
    return lambda value: (f"{value:.{digits}f}", unit)


def _percent(value: float) -> tuple[str, str]:
    return f"{100 * value:.1f}", "%"


def _seconds(value: float) -> tuple[str, str]:
    return (f"{1000 * value:.0f}", "ms") if value < 1 else (f"{value:.2f}", "s")


QUALITY = (
    Gauge(
        "mean_confidence",
        "Mean confidence",
        _plain(2),
        "mean",
        "Probability of the emitted tokens",
        by_alerts=True,
    ),
    Gauge(
        "response_entropy",
        "Response entropy",
        _plain(2, "nats"),
        "mean",
        "Running mean of token entropies",
        by_alerts=True,
    ),
    Gauge("l1_rate", "L1 rate", _percent, "mean", "Responses with an L1 event", by_alerts=True),
)
BUSINESS = (
    Gauge(
        "interruption_rate",
        "Interruptions",
        _percent,
        "mean",
        "Users who hung up in mid-answer",
        by_alerts=True,
    ),
)
ENGINE = (
    Gauge(
        "first_token_p95", "First token p95", _seconds, "last", "From arrival; limits 0.8 s and 2 s", 0.8, 2.0
    ),
    Gauge("errors", "Errors", _plain(0), "sum", f"In the last {WINDOW_S} s; limits 1 and 5", 1, 5),
    Gauge("waiting", "Waiting", _plain(0), "last", "Requests in the queue; limits 4 and 16", 4, 16),
    Gauge("running", "Running", _plain(0), "last", "Requests being generated"),
    Gauge("kv_used", "KV cache used", _percent, "last", "Pages in use; limits 85 % and 97 %", 0.85, 0.97),
)


def tiles(gauges: Sequence[Gauge], live: Live, alerts: Alerts) -> list[Tile]:
    """Return one tile a gauge over the last `WINDOW_S` seconds of `live`."""
    return [_tile(gauge, live.series.get(gauge.key, []), alerts) for gauge in gauges]


def breaker(alerts: Alerts) -> Tile:
    """Return the tile of the breaker that is furthest from closed."""
    about = "Opens when model evidence and interruptions come together"
    order = {"open": 2, "half_open": 1}
    worst = max(alerts.breaker.items(), key=lambda item: order.get(item[1].state, 0), default=None)
    if worst is None:
        return Tile("Breaker", "closed", "", "steady", "never tripped", [], about)
    route, now = worst
    states: dict[str, State] = {"open": "alarm", "half_open": "watch"}
    text = now.state.replace("_", "-")
    return Tile("Breaker", text, "", states.get(now.state, "steady"), f"{route}, {now.mode}", [], about)


def _tile(gauge: Gauge, series: Series, alerts: Alerts) -> Tile:
    recent = [value for value in series[-WINDOW_S:] if value is not None]
    trend = list(series[-120:])
    if not recent:
        return Tile(gauge.label, "–", "", "none", "no traffic", trend, gauge.help)
    folds: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "sum": sum, "last": lambda v: v[-1]}
    value = folds[gauge.fold](recent)
    text, unit = gauge.show(value)
    state, word = _by_alerts(alerts) if gauge.by_alerts else _by_limits(gauge, value)
    return Tile(gauge.label, text, unit, state, word, trend, gauge.help)


def _by_alerts(alerts: Alerts) -> tuple[State, str]:
    levels = {alert.level for alert in alerts.active}
    if "L2" in levels:
        return "alarm", "L2 firing"
    if "L1" in levels:
        return "watch", "L1 rate firing"
    return ("none", "no baseline") if alerts.blind else ("steady", "no alert")


def _by_limits(gauge: Gauge, value: float) -> tuple[State, str]:
    if gauge.alarm is None or gauge.watch is None:
        return "none", ""
    if value >= gauge.alarm:
        return "alarm", f"over {' '.join(gauge.show(gauge.alarm)).strip()}"
    if value >= gauge.watch:
        return "watch", f"over {' '.join(gauge.show(gauge.watch)).strip()}"
    return "steady", "within limits"
