"""All settings of Quaver: those of every package, and where the server listens and keeps its state.

Every field is an environment variable `QUAVER_<FIELD>`; the README has the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict, SettingsError

from alerting.settings import AlertingSettings
from chaos.settings import ChaosSettings
from engine.api.settings import ApiSettings
from engine.settings import EngineSettings
from telemetry.settings import TelemetrySettings

#: Where the packages keep their state, below `state_dir` unless their own variable says otherwise.
_IN_STATE_DIR = {"records_dir": "records", "keys_dir": "keys", "baseline_file": "baseline.json"}


class Settings(EngineSettings, TelemetrySettings, AlertingSettings, ChaosSettings, ApiSettings):
    """One flat model: an instance is every package's settings at once."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    keys_dir: Path = Field(
        Path("~/.local/state/quaver/keys"), description="folder of the bearer keys, files of mode 0600"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    state_dir: Path = Field(
        Path("~/.local/state/quaver"), description="keys, records, journal, baseline and alerts live here"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")
    shutdown_grace_s: int = Field(
        10, ge=0, description="seconds that running answers get to finish at shutdown"
    )

    @model_validator(mode="before")
    @classmethod
    def _place_state(cls, values: dict[str, Any]) -> dict[str, Any]:
        state = Path(values.get("state_dir", "~/.local/state/quaver")).expanduser()
        return {name: state / leaf for name, leaf in _IN_STATE_DIR.items()} | values | {"state_dir": state}


def load_settings() -> Settings:
    """Return the settings of this environment; raise ValueError naming each variable that is wrong."""
    try:
        return Settings()
    except SettingsError as error:  # error parsing value for field "…"
        variable = f"QUAVER_{str(error).split(chr(34))[1].upper()}"
        raise ValueError(f"settings are not valid: {variable} is not JSON: {error.__cause__}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{_variable(*item['loc'])}: {item['msg']}" for item in error.errors())
        raise ValueError(f"settings are not valid: {wrong}") from None


def _variable(name: str | int, *inside: str | int) -> str:
    """The variable's name, and which part of its value."""
    return "".join([f"QUAVER_{name}".upper(), *(f"[{part!r}]" for part in inside)])
