"""When faults were in force and alerts fired, as stretches of one time axis, and which met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from dashboards.shapes import Alert, Alerts, Chaos, Entry

AFTERMATH_S = 60.0


@dataclass(frozen=True)
class Interval:
    """A stretch of time; `end` None means it goes on. Seconds are unix time."""

    kind: Literal["fault", "L1", "L2"]
    label: str
    start: float
    end: float | None
    note: str = ""

    def clip(self, low: float, high: float) -> tuple[float, float] | None:
        """Return the part inside [low, high], or None when nothing of it is."""
        start, end = max(self.start, low), min(high if self.end is None else self.end, high)
        return (start, end) if start < end else None


@dataclass(frozen=True)
class Fired:
    """What a fault set off. `after_s` counts from the fault's start; None when nothing fired."""

    fault: Interval
    alert: Alert | None
    after_s: float | None


def fault_intervals(chaos: Chaos) -> list[Interval]:
    """Return one interval a fault, from the journal's starts and ends, oldest first."""
    starts: dict[str, Entry] = {}
    ends: dict[str, float] = {}
    for entry in sorted(chaos.journal, key=lambda e: e.time):
        if entry.id is None:
            continue
        if entry.event == "start":
            starts.setdefault(entry.id, entry)
        elif entry.event == "end":
            ends.setdefault(entry.id, entry.time)
    alive = {lease.id for lease in chaos.faults}
    found = []
    for fault, entry in starts.items():
        end = None if fault in alive else ends.get(fault, entry.time + (entry.ttl_s or 0.0))
        note = ", ".join(filter(None, (describe(entry.params), reach(entry.selector))))
        found.append(Interval("fault", entry.kind or fault, entry.time, end, note))
    return found


def alert_intervals(alerts: Alerts) -> list[Interval]:
    """Return one interval an alert, oldest first."""
    return [
        Interval("L2" if a.level == "L2" else "L1", a.name, a.starts_at, a.ends_at, f"route {a.route}")
        for a in _begun(alerts)
        if a.starts_at is not None
    ]


def what_fired(faults: Sequence[Interval], alerts: Alerts) -> list[Fired]:
    """Pair each fault, newest first, with the alerts that began during it or within a minute after."""
    rows = []
    for fault in reversed(faults):
        until = (fault.end if fault.end is not None else float("inf")) + AFTERMATH_S
        met = [a for a in _begun(alerts) if fault.start <= (a.starts_at or 0.0) <= until]
        rows += [Fired(fault, a, (a.starts_at or 0.0) - fault.start) for a in met]
        rows += [] if met else [Fired(fault, None, None)]
    return rows


def _begun(alerts: Alerts) -> list[Alert]:
    return sorted(alerts.all(), key=lambda alert: alert.starts_at or 0.0)


def describe(values: Mapping[str, Any]) -> str:
    """Return `name value, name value` for what is set."""
    told = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in told.items() if value not in (None, "")
    )


def reach(selector: Mapping[str, Any]) -> str:
    """Return in words which requests a selector chooses."""
    share = float(selector.get("share", 1.0))
    rest = describe({name: value for name, value in selector.items() if name != "share"})
    return ", ".join(filter(None, ("all requests" if share >= 1 else f"{share:.0%} of requests", rest)))


def clock(moment: float | None) -> str:
    """Return a time of day on this machine's clock, or a dash."""
    return "–" if moment is None else datetime.fromtimestamp(moment).strftime("%H:%M:%S")
