"""Files for Prometheus and Alertmanager, made from the same rules the evaluator uses.

One pager per condition: the evaluator pages; the rule of the same condition pages once the
evaluator's heartbeat is stale or absent. Service levels and the watchdog are Prometheus's alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from alerting.kv_rules import kv_rules
from alerting.promtool_test import rules_test
from alerting.rules import AlertRule, QuantilePreset, RawPreset, Rules, load_rules
from alerting.webhook import WATCHDOG

HEADER = "# Generated from alerting/rules.yaml by `quaver alerts generate`; change that file instead.\n"
BURN_RATES = (  # (factor, short window, long window, severity)
    (14.4, "5m", "1h", "critical"),
    (6, "30m", "6h", "critical"),
    (3, "2h", "1d", "warning"),
    (1, "6h", "3d", "warning"),
)
#: Responses the service owes; what a client got wrong is not among them.
_OWED = "error|shed|breaker_open|shutting_down|engine_.+"
_BAD = f'quaver_responses_total{{outcome=~"failed|rejected",reason=~"{_OWED}"}}'
_TEAMS = ("prompt-eng", "mlops", "sre")


class _Dumper(yaml.SafeDumper):
    """Writes block style, long expressions on one line."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def write(
    out_dir: Path,
    rules: Rules | None = None,
    *,
    webhook_url: str = "http://engine:8000/quaver/alerts/webhook",
    webhook_key_file: str = "/var/lib/quaver-keys/webhook.key",
    engine: str = "engine:8000",
    alertmanager: str = "alertmanager:9093",
) -> list[Path]:
    """Write rules.yml, rules_test.yml, alertmanager.yml and prometheus.yml; return their paths."""
    rules = rules or load_rules()
    out_dir.mkdir(parents=True, exist_ok=True)
    files = {
        "rules.yml": prometheus_rules(rules),
        "rules_test.yml": rules_test(rules),
        "alertmanager.yml": alertmanager_config(webhook_url, webhook_key_file),
        "prometheus.yml": prometheus_config(engine, alertmanager),
    }
    paths = []
    for name, content in files.items():
        path = out_dir / name
        text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
        path.write_text(HEADER + text, encoding="utf-8")
        paths.append(path)
    return paths


def prometheus_rules(rules: Rules) -> dict[str, Any]:
    """Return the recording and alert rules."""
    return {
        "groups": [
            {"name": "quaver-recording", "rules": _recording(rules)},
            {"name": "quaver-joint", "rules": _joint(rules)},
            {"name": "quaver-slo", "rules": _slo(rules)},
            {"name": "quaver-kv", "rules": kv_rules()},
            {"name": "quaver-meta", "rules": _meta(rules)},
        ]
    }


def alertmanager_config(webhook_url: str, key_file: str) -> dict[str, Any]:
    """Return Alertmanager's configuration: a receiver per team, L1 inhibited by L2, the watchdog apart."""

    def receiver(name: str, *, resolved: bool = True) -> dict[str, Any]:
        hook = {
            "url": webhook_url,
            "send_resolved": resolved,
            "http_config": {"authorization": {"type": "Bearer", "credentials_file": key_file}},
        }
        return {"name": name, "webhook_configs": [hook]}

    return {
        "global": {"resolve_timeout": "1m"},
        "route": {
            "receiver": "quaver-sre",
            "group_by": ["alertname", "route"],
            "group_wait": "1s",
            "group_interval": "5s",
            "repeat_interval": "4h",
            "routes": [
                {
                    "matchers": [f'alertname="{WATCHDOG}"'],
                    "receiver": "quaver-watchdog",
                    "group_interval": "1m",
                    "repeat_interval": "1m",
                },
                *(
                    {
                        "matchers": [f'team="{team}"'],
                        "receiver": f"quaver-{team}",
                        # What pages nobody may wait, and need not be repeated before tomorrow.
                        "routes": [
                            {
                                "matchers": ['severity="info"'],
                                "group_wait": "1m",
                                "group_interval": "15m",
                                "repeat_interval": "24h",
                            }
                        ],
                    }
                    for team in _TEAMS
                ),
            ],
        },
        "inhibit_rules": [
            {"source_matchers": ['level="L2"'], "target_matchers": ['level="L1"'], "equal": ["route"]}
        ],
        "receivers": [
            receiver("quaver-watchdog", resolved=False),
            *(receiver(f"quaver-{t}") for t in _TEAMS),
        ],
    }


def prometheus_config(engine: str, alertmanager: str) -> dict[str, Any]:
    """Return Prometheus's configuration; the rules lie beside it."""
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": "quaver", "static_configs": [{"targets": [engine]}]},
            {"job_name": "alertmanager", "static_configs": [{"targets": [alertmanager]}]},
        ],
    }


def _recording(rules: Rules) -> list[dict[str, str]]:
    windows = sorted({w for _, short, long, _ in BURN_RATES for w in (short, long)})
    ratios = [
        {
            "record": f"job:quaver_responses_bad:ratio_{window}",
            "expr": (
                f"(sum(rate({_BAD}[{window}])) or vector(0))"
                f" / (sum(rate(quaver_responses_total[{window}])) > 0)"
            ),
        }
        for window in windows
    ]
    stale = f"{rules.slo.evaluator_stale_s:g}"
    return [
        {
            "record": "job:quaver_evaluator_stale:bool",
            "expr": (
                f"(time() - max(quaver_evaluator_heartbeat_seconds) > bool {stale}) "
                "or absent(quaver_evaluator_heartbeat_seconds)"
            ),
        },
        {
            "record": "route:quaver_confidence:mean_1m",
            "expr": (
                "sum by (route) (rate(quaver_token_confidence_sum[1m]))"
                " / (sum by (route) (rate(quaver_token_confidence_count[1m])) > 0)"
            ),
        },
        {
            "record": "route:quaver_entropy:mean_1m",
            "expr": (
                "sum by (route) (rate(quaver_token_entropy_sum[1m]))"
                " / (sum by (route) (rate(quaver_token_entropy_count[1m])) > 0)"
            ),
        },
        {
            "record": "route:quaver_interruptions:ratio_1m",
            "expr": (
                "sum by (route) (rate(quaver_interruptions_total[1m]))"
                " / (sum by (route) (rate(quaver_responses_total[1m])) > 0)"
            ),
        },
        *ratios,
    ]


def _joint(rules: Rules) -> list[dict[str, Any]]:
    """The raw numbers at the pace of scrapes, and the evaluator's last evidence, while it is stale."""
    raw = next((p for p in rules.presets.values() if isinstance(p, RawPreset)), None)
    alerts, threshold = rules.alerts, f"{math.log(rules.rate.threshold):.3f}"
    when_stale = " and on () (job:quaver_evaluator_stale:bool == 1)"
    last_l1 = f'max by (route) (quaver_edetector_log{{signal="l1"}}) >= {threshold}'
    last_leaving = f'max by (route) (quaver_edetector_log{{signal="leaving"}}) >= {threshold}'
    last_mixture = f'max by (route) (quaver_edetector_log{{signal="mixture"}}) >= {threshold}'
    quantile = [p for p in rules.presets.values() if isinstance(p, QuantilePreset)]
    doubt = min((p.l2.model_evidence for p in quantile), default=1.0)
    last_doubt = f'max by (route) (quaver_edetector_log{{signal="l1"}}) >= {math.log(doubt):.3f}'
    low, leaving = last_l1, f"({last_leaving} and on (route) {last_doubt})"
    if raw is not None:
        doubtful = (
            f"(route:quaver_confidence:mean_1m < {raw.confidence:g}"
            f" and on (route) route:quaver_entropy:mean_1m > {raw.entropy:g})"
        )
        limit = f"{min(0.99, raw.l2.ratio * rules.interruptions.floor):g}"
        enough = f"sum by (route) (increase(quaver_interruptions_total[1m])) >= {raw.l2.min_interruptions}"
        low = f"({last_l1} or on (route) {doubtful})"
        leaving = (
            f"({leaving} or on (route) ({doubtful}"
            f" and on (route) route:quaver_interruptions:ratio_1m > {limit} and on (route) {enough}))"
        )
    return [
        _alert(alerts.l1_rate, low + when_stale),
        _alert(alerts.joint_evidence, last_mixture + when_stale),
        _alert(alerts.users_leaving, leaving + when_stale),
        _alert(alerts.canary, f"max by (route) (quaver_canary_evidence_log) >= {threshold}{when_stale}"),
    ]


def _slo(rules: Rules) -> list[dict[str, Any]]:
    slo = rules.slo
    budget = 1 - slo.availability
    burn = [
        {
            "alert": "QuaverErrorBudgetBurn",
            "expr": (
                f"job:quaver_responses_bad:ratio_{short} > {factor * budget:.6g}"
                f" and job:quaver_responses_bad:ratio_{long} > {factor * budget:.6g}"
                f" and sum(increase({_BAD}[{long}])) >= {slo.min_failures}"
            ),
            "labels": {"severity": severity, "team": "sre", "window": long},
            "annotations": {
                "summary": f"The error budget of {slo.availability:g} burns {factor:g} times too fast"
            },
        }
        for factor, short, long, severity in BURN_RATES
    ]
    return [
        {
            "alert": "QuaverLatencyHigh",
            "expr": (
                f"histogram_quantile(0.95, sum by (le) (rate({slo.latency_metric}_bucket[5m])))"
                f" > {slo.latency_p95_s:g} and sum(increase({slo.latency_metric}_count[5m])) >= 20"
            ),
            "for": "5m",
            "labels": {"severity": "warning", "team": "sre"},
            "annotations": {"summary": f"The 95th percentile of {slo.latency_metric} is {{{{ $value }}}} s"},
        },
        *burn,
        {
            "alert": "PromptAccuracyDrop",
            "expr": f'avg_over_time(prompt_accuracy{{env="prod"}}[1h]) < {slo.accuracy:g}',
            "labels": {"severity": "warning", "team": "prompt-eng"},
            "annotations": {
                "summary": "Accuracy over one hour is {{ $value }}",
                "action": "Audit the prompts; send the comparison of feature distributions to mlops",
            },
        },
    ]


def _meta(rules: Rules) -> list[dict[str, Any]]:
    return [
        {
            "alert": "QuaverEvaluatorStale",
            "expr": "job:quaver_evaluator_stale:bool == 1",
            "for": "1m",
            "labels": {"severity": "critical", "team": "sre"},
            "annotations": {
                "summary": "The evaluator no longer judges responses; Prometheus pages in its place"
            },
        },
        {
            "alert": "QuaverEvaluatorBlind",
            "expr": "quaver_evaluator_blind == 1",
            "for": "15m",
            "labels": {"severity": "warning", "team": "mlops"},
            "annotations": {
                "summary": "Route {{ $labels.route }} is not judged; see GET /quaver/alerts for why"
            },
        },
        {
            "alert": "QuaverTelemetryLost",
            "expr": 'sum by (what) (increase(quaver_telemetry_dropped_total{what!="late_alerts"}[5m])) > 0',
            "for": "5m",
            "labels": {"severity": "warning", "team": "sre"},
            "annotations": {
                "summary": "Telemetry loses {{ $labels.what }}",
                "action": "Who lost tokens or layers is judged in part or not at all: see GET /quaver/alerts",
            },
        },
        {
            "alert": "QuaverAlertsUndelivered",
            "expr": 'increase(quaver_alerts_sent_total{result=~"failed|rejected|dropped"}[5m]) > 0',
            "for": "5m",
            "labels": {"severity": "critical", "team": "sre"},
            "annotations": {"summary": "The evaluator cannot hand its alerts to Alertmanager"},
        },
        {
            "alert": WATCHDOG,
            "expr": "vector(1)",
            "labels": {"severity": "none", "team": "sre"},
            "annotations": {"summary": "Always fires: its silence means that nothing pages"},
        },
    ]


def _alert(rule: AlertRule, expression: str) -> dict[str, Any]:
    return {
        "alert": rule.name,
        "expr": expression,
        "labels": {
            "level": rule.level,
            "severity": rule.severity,
            "team": rule.team,
            "source": "prometheus",
        },
        "annotations": {"summary": rule.summary},
    }
