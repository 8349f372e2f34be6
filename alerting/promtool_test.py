"""Unit tests for the generated Prometheus rules, in promtool's format."""

from __future__ import annotations

from typing import Any

from alerting.rules import AlertRule, Rules

_FOR = 90  # samples


def rules_test(rules: Rules) -> dict[str, Any]:
    """Return tests that every alert fires when it must, and none by one error on low traffic."""
    return {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            _stale(rules),
            _fresh(rules),
            _users_leave(rules),
            _outage(),
            _single_error(),
            _accuracy(rules),
            _telemetry(),
            _kv(),
        ],
    }


def _stale(rules: Rules) -> dict[str, Any]:
    """A hung evaluator: its heartbeat stands still, and its last evidence pages from Prometheus."""
    alerts = rules.alerts
    return {
        "name": "stale evaluator",
        "interval": "1m",
        "input_series": [
            _series("quaver_evaluator_heartbeat_seconds", "0+0"),
            _series('quaver_edetector_log{route="qa",signal="l1"}', "12+0"),
            _series('quaver_edetector_log{route="qa",signal="leaving"}', "12+0"),
            _series('quaver_edetector_log{route="qa",signal="mixture"}', "1+0"),
            _series('quaver_canary_evidence_log{route="qa"}', "12+0"),
        ],
        "alert_rule_test": [
            _fires(alerts.l1_rate),
            _fires(alerts.users_leaving),
            _fires(alerts.canary),
            _quiet(alerts.joint_evidence.name),
        ],
    }


def _fresh(rules: Rules) -> dict[str, Any]:
    """A live evaluator pages by itself; Prometheus keeps still."""
    alerts = rules.alerts
    names = [
        alerts.l1_rate.name,
        alerts.users_leaving.name,
        alerts.joint_evidence.name,
        alerts.canary.name,
        "QuaverEvaluatorStale",
    ]
    return {
        "name": "live evaluator",
        "interval": "1m",
        "input_series": [
            _series("quaver_evaluator_heartbeat_seconds", "0+60"),
            _series('quaver_edetector_log{route="qa",signal="l1"}', "12+0"),
            _series('quaver_edetector_log{route="qa",signal="leaving"}', "12+0"),
            _series('quaver_edetector_log{route="qa",signal="mixture"}', "12+0"),
            _series('quaver_canary_evidence_log{route="qa"}', "12+0"),
        ],
        "alert_rule_test": [_quiet(name) for name in names],
    }


def _users_leave(rules: Rules) -> dict[str, Any]:
    """No evaluator at all: the raw numbers on telemetry's own series page. Healthy `chat` stays still."""
    alerts = rules.alerts
    return {
        "name": "absent evaluator",
        "interval": "15s",
        "input_series": [
            *_route("qa", confidence=0.3, entropy=5, interrupted=5),
            *_route("chat", confidence=0.9, entropy=1, interrupted=0),
        ],
        "alert_rule_test": [
            _fires(alerts.l1_rate),
            _fires(alerts.users_leaving),
            _quiet(alerts.joint_evidence.name),
        ],
    }


def _outage() -> dict[str, Any]:
    """Half of the responses fail: every burn rate pages."""
    ratio = "job:quaver_responses_bad:ratio_5m"
    return {
        "name": "outage",
        "interval": "1m",
        "input_series": [
            _series('quaver_responses_total{outcome="failed",reason="error"}', "0+30"),
            _series('quaver_responses_total{outcome="completed"}', "0+30"),
        ],
        "promql_expr_test": [
            _value(ratio, ratio, 0.5),
            _value('count(ALERTS{alertname="QuaverErrorBudgetBurn",alertstate="firing"})', "{}", 4),
        ],
    }


def _single_error() -> dict[str, Any]:
    """One error among few responses is above every burn rate, and pages nobody."""
    return {
        "name": "one error on low traffic",
        "interval": "1m",
        "input_series": [
            {"series": 'quaver_responses_total{outcome="failed",reason="error"}', "values": f"0x55 1x{_FOR}"},
            _series('quaver_responses_total{outcome="completed"}', "0+0.2"),
        ],
        "alert_rule_test": [_quiet("QuaverErrorBudgetBurn", "58m"), _quiet("QuaverErrorBudgetBurn", "60m")],
    }


def _accuracy(rules: Rules) -> dict[str, Any]:
    """Accuracy below its limit for an hour fires; another environment's does not. So does the watchdog."""
    low = rules.slo.accuracy - 0.025
    return {
        "name": "accuracy and watchdog",
        "interval": "1m",
        "input_series": [
            _series('prompt_accuracy{env="prod"}', f"{low:g}+0"),
            _series('prompt_accuracy{env="test"}', "0.1+0"),
        ],
        "promql_expr_test": [
            _value(
                'ALERTS{alertname="PromptAccuracyDrop"}',
                'ALERTS{alertname="PromptAccuracyDrop",alertstate="firing",env="prod",'
                'severity="warning",team="prompt-eng"}',
                1,
            ),
            _value('count(ALERTS{alertname="QuaverWatchdog",alertstate="firing"})', "{}", 1),
        ],
    }


def _telemetry() -> dict[str, Any]:
    """Tokens that go on getting lost are told of while they are; one that was lost once is not."""
    firing = 'count(ALERTS{alertname="QuaverTelemetryLost",alertstate="firing"}) or vector(0)'
    return {
        "name": "lost telemetry",
        "interval": "1m",
        "input_series": [
            {"series": 'quaver_telemetry_dropped_total{what="tokens"}', "values": "0x5 1x20 1+9x20 181x40"},
            _series('quaver_telemetry_dropped_total{what="late_alerts"}', "0+1"),
        ],
        "promql_expr_test": [
            _value(firing, "{}", 0, "15m"),
            _value(firing, "{}", 1, "40m"),
            _value(firing, "{}", 0, "60m"),
        ],
    }


def _kv() -> dict[str, Any]:
    """One damaged block is told of for a while; a disk that failed once is not, one that fails on is."""
    firing = 'count(ALERTS{alertname="%s",alertstate="firing"}) or vector(0)'
    corrupt, failing = firing % "QuaverKvCorrupt", firing % "QuaverKvDiskFailing"
    return {
        "name": "tiers of the KV cache",
        "interval": "1m",
        "input_series": [
            {"series": 'quaver_kv_tier_corrupt_total{tier="disk"}', "values": f"0x10 1x{_FOR}"},
            {"series": 'quaver_kv_tier_corrupt_total{tier="host"}', "values": f"0x{_FOR}"},
            {"series": 'quaver_kv_tier_errors_total{tier="disk"}', "values": "0x5 1x40 1+1x30"},
            {"series": 'quaver_kv_tier_late_total{tier="disk"}', "values": f"0x{_FOR}"},
        ],
        "promql_expr_test": [
            _value(corrupt, "{}", 0, "10m"),
            _value(corrupt, "{}", 1, "20m"),
            _value(corrupt, "{}", 0, "40m"),
            _value(failing, "{}", 0, "20m"),
            _value(failing, "{}", 1, "60m"),
        ],
    }


def _route(route: str, *, confidence: float, entropy: float, interrupted: int) -> list[dict[str, str]]:
    """Return telemetry's series of a route with 600 tokens and 10 responses a sample."""
    labels = f'{{route="{route}"}}'
    return [
        _series(f"quaver_token_confidence_sum{labels}", f"0+{600 * confidence:g}"),
        _series(f"quaver_token_confidence_count{labels}", "0+600"),
        _series(f"quaver_token_entropy_sum{labels}", f"0+{600 * entropy:g}"),
        _series(f"quaver_token_entropy_count{labels}", "0+600"),
        _series(f"quaver_interruptions_total{labels}", f"0+{interrupted}"),
        _series(f'quaver_responses_total{{route="{route}",outcome="any"}}', "0+10"),
    ]


def _series(series: str, start_and_step: str) -> dict[str, str]:
    return {"series": series, "values": f"{start_and_step}x{_FOR}"}


def _fires(rule: AlertRule, at: str = "10m") -> dict[str, Any]:
    labels = {
        "route": "qa",
        "level": rule.level,
        "severity": rule.severity,
        "team": rule.team,
        "source": "prometheus",
    }
    alert = {"exp_labels": labels, "exp_annotations": {"summary": rule.summary}}
    return {"eval_time": at, "alertname": rule.name, "exp_alerts": [alert]}


def _quiet(name: str, at: str = "10m") -> dict[str, Any]:
    return {"eval_time": at, "alertname": name, "exp_alerts": []}


def _value(expression: str, labels: str, value: float, at: str = "60m") -> dict[str, Any]:
    return {"expr": expression, "eval_time": at, "exp_samples": [{"labels": labels, "value": value}]}
