"""The settings of alerting; `quaver` composes them with those of the other packages.

Every field is an environment variable `QUAVER_<FIELD>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class AlertingSettings(BaseSettings):
    """Which rules are in force, and where notifications go."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    rules_file: Path | None = Field(None, description="alert rules; unset: the packaged rules.yaml")
    alert_preset: str | None = Field(None, description="preset that pages; unset: the rules' default")
    baseline_file: Path | None = Field(
        None, description="healthy baseline; unset: baseline.json in the state dir"
    )
    breaker: Literal["observe", "enforce"] = Field(
        "observe", description="observe: record transitions only; enforce: shed while open"
    )
    alertmanager_url: str | None = Field(
        None, description="Alertmanager's base URL; unset: the embedded sink"
    )
    alert_resend_s: float = Field(15.0, gt=0, description="a firing alert is sent again after this long")
    alert_timeout_s: float = Field(5.0, gt=0, description="time limit of one request to Alertmanager")
    alert_tick_s: float = Field(0.1, gt=0, description="period of the evaluator")
    canary_every_s: float = Field(
        30.0,
        ge=0,
        description="seconds between two canaries, once `quaver calibrate` has made their baseline; 0: none",
    )
    alert_log_max_mb: float = Field(
        16.0, gt=0, description="size of alerts.jsonl at which its older half goes"
    )
    public_url: str = Field(
        "http://127.0.0.1:8000", description="where people reach this server; links in alerts"
    )
