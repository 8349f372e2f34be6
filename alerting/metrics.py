"""The evaluator's state as Prometheus series, on the registry telemetry serves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AlertMetrics:
    """Every series alerting writes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.l1_events = Counter(
            "quaver_l1_events", "Responses that raised an L1", ["route", "preset"], registry=registry
        )
        self.scored = Counter(
            "quaver_scored_responses", "Responses judged for an L1", ["route", "preset"], registry=registry
        )
        self.degraded = Counter(
            "quaver_degraded_responses",
            "Responses of which telemetry lost tokens (not judged) or layer detail (judged without)",
            ["route", "lost"],
            registry=registry,
        )
        self.l1_live = Gauge(
            "quaver_l1_live", "1 while an L1 of the route is live", ["route"], registry=registry
        )
        self.alert_active = Gauge(
            "quaver_alert_active", "1 while an alert fires", ["name", "level", "route"], registry=registry
        )
        self.l2_active = Gauge(
            "quaver_l2_active", "1 while an L2 of the route fires", ["route"], registry=registry
        )
        self.edetector_log = Gauge(
            "quaver_edetector_log",
            "ln of the evidence against health",
            ["route", "signal"],
            registry=registry,
        )
        self.heartbeat = Gauge(
            "quaver_evaluator_heartbeat_seconds", "Unix time of the evaluator's last pass", registry=registry
        )
        self.blind = Gauge(
            "quaver_evaluator_blind",
            "1 while the evaluator cannot judge the route",
            ["route"],
            registry=registry,
        )
        self.breaker = Gauge(
            "quaver_breaker_state", "0 closed, 1 half-open, 2 open", ["route"], registry=registry
        )
        self.sent = Counter(
            "quaver_alerts_sent",
            "Notifications by fate: sent, rejected, failed, inhibited, dropped",
            ["result"],
            registry=registry,
        )
        for result in ("sent", "rejected", "failed", "inhibited", "dropped"):
            self.sent.labels(result)

    def export(
        self,
        route: str,
        *,
        live: bool,
        logs: dict[str, float],
        alerts: list[tuple[str, str, bool]],
        blind: bool,
        breaker: int,
    ) -> None:
        """Set a route's gauges. `alerts` holds (name, level, firing)."""
        self.l1_live.labels(route).set(live)
        for signal, value in logs.items():
            self.edetector_log.labels(route, signal).set(value)
        for name, level, firing in alerts:
            self.alert_active.labels(name, level, route).set(firing)
        self.l2_active.labels(route).set(any(firing for _, level, firing in alerts if level == "L2"))
        self.blind.labels(route).set(blind)
        self.breaker.labels(route).set(breaker)
