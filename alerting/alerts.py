"""Alerts and their lives: raised once, shown while they fire, kept as history."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from alerting.rules import AlertRule

HISTORY = 200


class Alert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One condition on one route. Times are RFC 3339 in UTC."""

    name: str
    level: Literal["L1", "L2", "info"]
    route: str
    severity: str
    team: str
    summary: str
    state: Literal["firing", "resolved"]
    starts_at: str
    ends_at: str | None = None
    evidence: dict[str, Any] = {}

    @property
    def labels(self) -> dict[str, str]:
        """The labels that identify the alert, as Alertmanager has them."""
        return {
            "alertname": self.name,
            "level": self.level,
            "route": self.route,
            "severity": self.severity,
            "team": self.team,
            "source": "evaluator",
        }

    @property
    def fingerprint(self) -> str:
        """A stable id of the label set."""
        text = "\xff".join(f"{k}\xff{v}" for k, v in sorted(self.labels.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def annotations(self) -> dict[str, str]:
        """The summary and the evidence as text."""
        return {"summary": self.summary} | {key: _text(value) for key, value in self.evidence.items()}


class AlertBook:
    """The alerts that fire now, at most one per condition and route, and those that did."""

    def __init__(self, listener: Callable[[Alert], None]) -> None:
        """`listener` hears every change: an alert firing, its new evidence, its end."""
        self._listener = listener
        self.active: dict[tuple[str, str], Alert] = {}
        self.history: deque[Alert] = deque(maxlen=HISTORY)

    def raise_alert(self, rule: AlertRule, route: str, now: float, evidence: dict[str, Any]) -> Alert | None:
        """Start an alert; None when it fires already."""
        key = (rule.name, route)
        if key in self.active:
            return None
        alert = Alert(
            name=rule.name,
            level=rule.level,
            route=route,
            severity=rule.severity,
            team=rule.team,
            summary=rule.summary,
            state="firing",
            starts_at=rfc3339(now),
            evidence=evidence,
        )
        self.active[key] = alert
        self._listener(alert)
        return alert

    def resolve(self, rule: AlertRule, route: str, now: float, reason: str) -> Alert | None:
        """End an alert; None when it does not fire."""
        alert = self.active.pop((rule.name, route), None)
        if alert is None:
            return None
        ended = msgspec.structs.replace(
            alert,
            state="resolved",
            ends_at=rfc3339(now),
            evidence=alert.evidence | {"resolved_because": reason},
        )
        self.history.append(ended)
        self._listener(ended)
        return ended

    def firing(self, rule: AlertRule, route: str) -> bool:
        """Return whether this condition fires on this route."""
        return (rule.name, route) in self.active


def rfc3339(time: float) -> str:
    """Return unix seconds as RFC 3339 with milliseconds, in UTC."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
