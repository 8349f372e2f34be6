"""Chaos' own settings: the switch and the caps. Every field is `QUAVER_<FIELD>`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ChaosSettings(BaseSettings):
    """What may be broken here, and how much of it at once."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    chaos: bool = Field(False, description="allow operators to start faults on this server")
    chaos_max_ttl_s: float = Field(900.0, gt=0, description="longest time to live of a fault, in seconds")
    chaos_max_share: float = Field(
        1.0, gt=0, le=1, description="largest share of the requests a fault may touch"
    )
    chaos_max_faults: int = Field(4, ge=1, description="faults in force at the same time")
    chaos_max_sigma: float = Field(10.0, ge=0, le=100, description="largest noise, in logits")
