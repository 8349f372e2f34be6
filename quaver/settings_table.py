"""The configuration table of the README, made from the settings themselves.

`python -m quaver.settings_table` prints it; a test compares it with the README.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from alerting.settings import AlertingSettings
from chaos.settings import ChaosSettings
from engine.api.settings import ApiSettings
from engine.settings import EngineSettings
from quaver.settings import Settings
from telemetry.settings import TelemetrySettings

_GROUPS: tuple[tuple[str, type[BaseSettings]], ...] = (
    ("engine", EngineSettings),
    ("API", ApiSettings),
    ("telemetry", TelemetrySettings),
    ("alerting", AlertingSettings),
    ("chaos", ChaosSettings),
)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (group, variable, default, meaning) for every setting, each once."""
    owner = {name: group for group, model in reversed(_GROUPS) for name in model.model_fields}
    fields = Settings.model_fields
    groups = ["server", *(group for group, _ in _GROUPS)]
    for group in groups:
        for name, field in fields.items():
            if owner.get(name, "server") == group:
                yield group, f"QUAVER_{name.upper()}", _default(field), field.description or ""


def markdown() -> str:
    """Return the table in Markdown."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    shown = ""
    for group, variable, default, meaning in rows():
        if group != shown:
            lines.append(f"| **{group}** | | |")
            shown = group
        lines.append(f"| `{variable}` | {default} | {meaning} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is None or value == ():
        return "–"
    if isinstance(value, bool):
        return "`1`" if value else "`0`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(markdown())
