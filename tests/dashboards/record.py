"""Records what a running engine answers, as fixtures.

`python tests/dashboards/record.py URL KEY_FILE [REQUEST_ID]`. Numbers are rounded and the path of the
baseline file is left out; nothing else is changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

FIXTURES = Path(__file__).parent / "fixtures"
PATHS = {
    "status": "/quaver/status",
    "live": "/quaver/live?seconds=300",
    "alerts": "/quaver/alerts",
    "chaos": "/quaver/chaos",
    "tiers": "/quaver/tiers",
    "requests": "/quaver/records/requests?limit=60",
}


def short(value: Any) -> Any:
    """Return the value with four digits to every float; unix times keep their milliseconds."""
    if isinstance(value, float):
        return round(value, 3) if abs(value) > 1e6 else float(f"{value:.4g}")
    if isinstance(value, list):
        return [short(item) for item in value]
    if isinstance(value, dict):
        return {name: short(item) for name, item in value.items()}
    return value


def record(url: str, key: str, request_id: str | None) -> None:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as engine:
        answers = {name: engine.get(path).raise_for_status().json() for name, path in PATHS.items()}
        chosen = request_id or answers["requests"][0]["request_id"]
        detail = engine.get(f"/quaver/records/requests/{chosen}").raise_for_status().json()
    answers["alerts"]["evaluator"].pop("baseline_file", None)
    for name, answer in {**answers, "detail": detail}.items():
        (FIXTURES / f"{name}.json").write_text(json.dumps(short(answer), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]).read_text().strip(), sys.argv[3] if len(sys.argv) > 3 else None)
