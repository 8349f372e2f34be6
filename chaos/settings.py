"""Chaos' own settings: the switch, the caps, the stop conditions. Every field is `QUAVER_<FIELD>`."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from chaos.caps import Caps


class ChaosSettings(BaseSettings):
    """What may be broken here, how much of it at once, and what ends it at once."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    chaos: bool = Field(False, description="allow operators to start faults on this server")
    chaos_max_ttl_s: float = Field(900.0, gt=0, description="longest time to live of a fault, in seconds")
    chaos_max_share: float = Field(
        1.0, gt=0, le=1, description="largest share of the requests a fault may touch"
    )
    chaos_max_faults: int = Field(4, ge=1, description="faults in force at the same time")
    chaos_caps: dict[str, float] = Field(
        {}, description='largest values of parameters, as `{"noise.sigma": 3}`; unset: each kind\'s own'
    )
    chaos_stop_alert: str | None = Field(
        None, description="halt chaos when this alert, or any of this level (`L1`, `L2`), fires"
    )
    chaos_stop_promql: str | None = Field(None, description="halt chaos when this expression holds")
    chaos_stop_interruptions: float | None = Field(
        None, gt=0, lt=1, description="halt chaos when readers break off more than this share of answers"
    )
    chaos_verify: bool = Field(
        True, description="ask a known question before and after each fault, and compare the answers"
    )
    prometheus_url: str | None = Field(
        None, description="Prometheus that PromQL stop conditions are asked of"
    )
    env: str = Field("prod", description="label `env` of `prompt_accuracy`, which the quality probes report")

    @field_validator("chaos_caps")
    @classmethod
    def _known(cls, caps: dict[str, float]) -> dict[str, float]:
        Caps(caps)
        return caps
