"""Telemetry's own settings; `quaver` composes them with those of the other packages.

Every field is an environment variable `QUAVER_<FIELD>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class TelemetrySettings(BaseSettings):
    """What is recorded, for how long, and where it is sent."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    capture_content: bool = Field(
        False, description="record prompts, answers and token ids; off: no text anywhere"
    )
    metrics_open: bool = Field(True, description="serve /metrics without a key")
    max_routes: int = Field(32, ge=1, description="route label values; further routes are counted as `other`")
    max_tenants: int = Field(
        64, ge=1, description="tenant label values; further tenants are counted as `other`"
    )

    records_dir: Path = Field(Path("~/.local/state/quaver/records"), description="folder of the records")
    records_flush_s: float = Field(1.0, gt=0, description="a kill loses at most this much")
    records_rotate_s: float = Field(1800.0, gt=0, description="age at which a live segment becomes Parquet")
    records_rotate_mb: float = Field(16.0, gt=0, description="size at which a live segment becomes Parquet")
    records_max_mb: float = Field(512.0, gt=0, description="all records together; the oldest files go first")
    records_max_age_h: float = Field(168.0, gt=0, description="older Parquet files are deleted")
    records_queue: int = Field(
        4096, ge=1, description="engine steps waiting to be written before detail is dropped"
    )

    otlp_endpoint: str | None = Field(
        None, description="OTLP collector, e.g. http://localhost:4318; unset: off"
    )
    otlp_protocol: Literal["http/protobuf", "grpc"] = Field("http/protobuf", description="OTLP transport")
    otlp_interval_s: float = Field(15.0, gt=0, description="how often metrics are exported")
    otlp_timeout_s: float = Field(5.0, gt=0, description="longest single export, and the flush at shutdown")
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="share of traces exported when the caller did not decide"
    )
    trace_long_tokens: int = Field(
        1000, ge=1, description="spans of more tokens are exported whatever was sampled"
    )
    traces_kept: int = Field(500, ge=0, description="finished traces kept in memory for the dashboard")

    interruption_window_s: float = Field(10.0, ge=1, description="window of the interruption rate")
    blind_after_s: float = Field(3.0, gt=0, description="a joint input without news for so long is blind")
    feedback_kept: int = Field(20_000, ge=1, description="requests that can still receive feedback")
