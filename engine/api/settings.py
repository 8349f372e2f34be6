"""Limits of the HTTP API. Every field is an environment variable `QUAVER_<FIELD>`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.messages import Priority


class ApiSettings(BaseSettings):
    """Who may ask, how much, and how often."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    keys_dir: Path = Field(
        Path("~/.local/state/quaver/keys"), description="folder of the bearer keys, files of mode 0600"
    )
    max_body_bytes: int = Field(2 << 20, ge=1024, description="largest request body; above it 413")
    body_timeout_s: float = Field(30.0, gt=0, description="longest time a request body may take to arrive")
    write_timeout_s: float = Field(60.0, gt=0, description="a reader slower than this counts as gone")
    tenant_concurrency: int = Field(
        64, ge=1, description="requests one tenant may have running; above it 429"
    )
    priorities: dict[str, Priority] = Field(
        {},
        description="JSON object of tenant → highest priority it may have: `high`, `normal`, `low`; "
        "others: `normal`. x-quaver-priority asks for a lower one",
    )
    admission_pool: Literal["elastic", "fixed"] = Field(
        "elastic",
        description="choices let in before `max_waiting` counts: sized by the load, or `max_running`",
    )
    queue_delay_s: float = Field(
        10.0, gt=0, description="429 when the answer would probably begin later than this"
    )
    max_choices: int = Field(16, ge=1, description="choices of one request: n times the number of prompts")
    default_max_tokens: int = Field(512, ge=1, description="answer length when a chat request names none")
    routes: tuple[str, ...] = Field(
        (),
        description="JSON list of labels taken from x-quaver-route; empty: the first `max_routes` seen",
    )
    max_routes: int = Field(32, ge=1, description="route labels accepted when `routes` is empty")
