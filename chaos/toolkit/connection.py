"""Where the server is, and whose key it wants.

An experiment's configuration may name `url` and `operator_key_file`. Without them the address is
`QUAVER_URL`, else the default one, and the key is the file `QUAVER_OPERATOR_KEY_FILE`, else the one in
the keys folder that a server with the same environment would use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from chaoslib.exceptions import ActivityFailed

from chaos.client import ChaosClient, RefusedError

T = TypeVar("T")
Configuration = dict[str, Any] | None

_URL = "http://127.0.0.1:8000"


def ask(configuration: Configuration, question: Callable[[ChaosClient], T]) -> T:
    """Put a question to the server; raises ActivityFailed that says what to do."""
    try:
        with connect(configuration) as client:
            return question(client)
    except (RefusedError, httpx.TransportError, httpx.InvalidURL) as error:
        raise ActivityFailed(f"{url_of(configuration)}: {error}") from error


def connect(configuration: Configuration) -> ChaosClient:
    """Return a client with the operator's key."""
    return ChaosClient(url_of(configuration), read_key(key_file(configuration, "operator")))


def firing(configuration: Configuration) -> list[dict[str, Any]]:
    """Return the alerts that fire. What only informs, as of other traffic, is none of them."""
    return [alert for alert in ask(configuration, ChaosClient.alerts)["active"] if alert["level"] != "info"]


def url_of(configuration: Configuration) -> str:
    """Return the server's address."""
    return str((configuration or {}).get("url") or os.environ.get("QUAVER_URL") or _URL)


def key_file(configuration: Configuration, role: str) -> Path:
    """Return where the key of a role is, by the variables that the server reads too."""
    name = f"{role}_key_file"
    given = (configuration or {}).get(name) or os.environ.get(f"QUAVER_{name.upper()}")
    if given:
        return Path(given).expanduser()
    state = os.environ.get("QUAVER_STATE_DIR") or "~/.local/state/quaver"
    folder = Path(os.environ.get("QUAVER_KEYS_DIR") or Path(state) / "keys")
    return folder.expanduser() / f"{role}.key"


def read_key(path: Path) -> str:
    """Return the key in a file; raises ActivityFailed."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ActivityFailed(
            f"cannot read the operator's key {path} ({error.strerror}); set QUAVER_STATE_DIR as the "
            "server has it, or QUAVER_OPERATOR_KEY_FILE to the file"
        ) from error
