"""The demo's result: the JSON, the table, and what it means in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from quaver.demo.control import Alert
from quaver.demo.plan import Experiment


@dataclass(kw_only=True)
class FaultResult:
    """What one fault and its control did. `probe_*` are fractions of right answers, None without answers."""

    experiment: Experiment
    touched: int
    probe_clean: float | None
    probe_control: float | None
    probe_faulted: float | None
    alerts: list[Alert]
    control_alerts: list[Alert]
    time_to_detect_s: float | None
    recovered: bool

    @property
    def detected(self) -> bool:
        """True when an alert fired under the fault."""
        return bool(self.alerts)


@dataclass(kw_only=True)
class CleanWindows:
    """All clean windows together."""

    responses: int = 0
    alerts: list[Alert] = field(default_factory=list)


@dataclass(kw_only=True)
class FinaleResult:
    """The joint alert from end to end. Seconds count from the fault's start, closing from its end."""

    paged: bool = False
    breaker_opened: bool = False
    breaker_closed: bool = False
    page_s: float | None = None
    open_s: float | None = None
    closed_s: float | None = None
    left: int = 0
    shed: int = 0


@dataclass(kw_only=True)
class DemoResult:
    """Everything the demo found out. `webhook` is None when it was not part of the run."""

    model: str
    faults: list[FaultResult]
    clean: CleanWindows
    finale: FinaleResult
    seconds: float
    webhook: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `--json`: fractions, seconds, names; null where there is nothing."""
        return {
            "model": self.model,
            "faults": [
                {
                    "name": fault.experiment.name,
                    "touched": fault.touched,
                    "probe_clean": fault.probe_clean,
                    "probe_faulted": fault.probe_faulted,
                    "alerts": _names(fault.alerts),
                    "control_alerts": _names(fault.control_alerts),
                    "time_to_detect_s": fault.time_to_detect_s,
                    "recovered": fault.recovered,
                }
                for fault in self.faults
            ],
            "clean_windows": {"responses": self.clean.responses, "alerts": _names(self.clean.alerts)},
            "l2": {
                "paged": self.finale.paged,
                "breaker_opened": self.finale.breaker_opened,
                "breaker_closed": self.finale.breaker_closed,
                "seconds": self.finale.page_s,
            },
        }


def _names(alerts: list[Alert]) -> list[str]:
    return [alert.name for alert in alerts]


def _labels(alerts: list[Alert]) -> str:
    return "\n".join(dict.fromkeys(f"{alert.level} {alert.name}" for alert in alerts)) or "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def table(result: DemoResult) -> Table:
    """Return the scorecard."""
    out = Table(title=f"{result.model}: what was broken, what was caught", title_justify="left")
    out.add_column("fault")
    out.add_column("requests\ntouched", justify="right")
    out.add_column("right answers\nclean → faulted", justify="right")
    out.add_column("alerts and level", overflow="fold")
    out.add_column("time to\ndetect", justify="right")
    out.add_column("false alarms\nin its control", overflow="fold")
    out.add_column("recovered")
    for fault in result.faults:
        out.add_row(
            fault.experiment.name,
            str(fault.touched),
            f"{_share(fault.probe_clean)} → {_share(fault.probe_faulted)}",
            _labels(fault.alerts),
            _seconds(fault.time_to_detect_s),
            _labels(fault.control_alerts),
            "yes" if fault.recovered else "no",
        )
    finale = result.finale
    out.add_section()
    out.add_row(
        "L2, end to end",
        "",
        f"{finale.left} readers left",
        "page" + ", breaker opened" * finale.breaker_opened if finale.paged else "–",
        _seconds(finale.page_s),
        "",
        "yes" if finale.breaker_closed else "no",
    )
    return out


def verdicts(result: DemoResult) -> list[str]:
    """Return what came out, in sentences: caught, missed and why, false alarms, the breaker."""
    lines = [_verdict(fault) for fault in result.faults]
    alarms = len(result.clean.alerts)
    which = f": {', '.join(_names(result.clean.alerts))}" if alarms else ""
    lines.append(f"Clean windows: {alarms} false alarm(s) in {result.clean.responses} responses{which}.")
    lines.append(_finale(result.finale))
    if result.webhook:
        lines.append(result.webhook)
    return lines


def _verdict(fault: FaultResult) -> str:
    experiment = fault.experiment
    name = f"{experiment.name} ({experiment.title})"
    hurt = ""
    if fault.probe_clean is not None and fault.probe_faulted is not None:
        hurt = f" Right answers went from {fault.probe_clean:.0%} to {fault.probe_faulted:.0%}."
    if not fault.touched:
        return f"{name}: touched no request, so nothing could be seen."
    if not fault.detected:
        return f"{name}: NOT caught: {experiment.why_missed}.{hurt}"
    text = f"{name}: caught in {_seconds(fault.time_to_detect_s)}.{hurt}"
    if fault.control_alerts:
        text += " Its harmless control raised the alarm too, so this tells of a changed prompt, not of harm."
    return text


def _finale(finale: FinaleResult) -> str:
    if not finale.paged:
        return f"L2: no page; {finale.left} readers left in mid-answer."
    text = f"L2: {finale.left} readers left, the page came after {_seconds(finale.page_s)}"
    if not finale.breaker_opened:
        return text + "; the breaker did not open."
    text += f", the breaker opened after {_seconds(finale.open_s)} and shed {finale.shed} requests"
    if not finale.breaker_closed:
        return text + "; it had not closed when the demo stopped waiting."
    return text + f"; {_seconds(finale.closed_s)} after the fault's end it was closed again."
