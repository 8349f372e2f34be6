"""The processes the demo starts: `quaver serve` and the dashboard, each ended with it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from engine.settings import cores
from quaver.demo.control import Control, DemoError

READY_S = 180.0
GRACE_S = 15.0


def free_port(wanted: int = 0) -> int:
    """Return `wanted` if nothing listens there on loopback, else any free port."""
    for port in (wanted, 0):
        try:
            with socket.create_server(("127.0.0.1", port)) as listener:
                return int(listener.getsockname()[1])
        except OSError:
            continue
    raise DemoError("no free port on 127.0.0.1")


class Child:
    """One process with its log file; `stop` ends it and waits."""

    def __init__(self, name: str, command: list[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            # A session of its own: Ctrl-C reaches the demo alone, which ends its children in order.
            self._process = subprocess.Popen(  # noqa: S603
                command, env={**os.environ, **env}, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-8:])

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL after a grace."""
        if not self.running:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_server(state_dir: Path, port: int) -> Child:
    """Start `quaver serve` with chaos on, the breaker enforcing and content captured."""
    env = {
        "QUAVER_HOST": "127.0.0.1",
        "QUAVER_PORT": str(port),
        "QUAVER_STATE_DIR": str(state_dir),
        "QUAVER_KEYS_DIR": str(state_dir / "keys"),
        "QUAVER_RECORDS_DIR": str(state_dir / "records"),
        "QUAVER_CHAOS": "1",
        "QUAVER_BREAKER": "enforce",
        "QUAVER_CAPTURE_CONTENT": "1",
        # Spinning compute threads on every core would starve the front and the readers beside them.
        "QUAVER_THREADS": str(max(1, cores() - 1)),
    }
    command = [sys.executable, "-m", "quaver", "serve"]
    return Child("quaver serve", command, env, state_dir / "serve.log")


async def until_ready(control: Control, server: Child | None, limit_s: float = READY_S) -> None:
    """Wait until the model is loaded; raise DemoError when the server ends or takes too long."""
    end = time.monotonic() + limit_s
    while not await control.ready():
        if server is not None and not server.running:
            raise DemoError(f"`quaver serve` ended; its log {server.log} says:\n{server.tail()}")
        if time.monotonic() > end:
            where = f"; see {server.log}" if server else ""
            raise DemoError(f"{control.url} was not ready after {limit_s:.0f} s{where}")
        await asyncio.sleep(0.3)


def start_dashboard(state_dir: Path, server_url: str, keys_dir: Path) -> tuple[Child, str] | None:
    """Start the Streamlit dashboard; None when the extra is not installed."""
    if find_spec("streamlit") is None:
        return None
    from dashboards.__main__ import command  # noqa: PLC0415

    port = free_port(8501)
    env = {"QUAVER_URL": server_url, "QUAVER_KEYS_DIR": str(keys_dir)}
    return Child("dashboard", command(port), env, state_dir / "dashboard.log"), f"http://127.0.0.1:{port}"
