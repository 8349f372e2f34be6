"""One real `quaver serve`, for tests that talk to it as a user does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


def wait_for(what: Callable[[], T | None], seconds: float = 90.0) -> T:
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Server:
    """One `quaver serve` on a free port, with its state in a folder. `settings`: more environment."""

    def __init__(self, state: Path, **settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.state = state
        self.log = state / "serve.log"
        state.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("QUAVER_")} | {
            "QUAVER_PORT": str(port),
            "QUAVER_STATE_DIR": str(state),
            "QUAVER_CHAOS": "1",
            "QUAVER_THREADS": "1",
            **settings,
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quaver", "serve"], env=env, stdout=output, stderr=output
            )
        self.url = f"http://127.0.0.1:{port}"
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(self._ready)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def call(self, method: str, path: str, body: Any = None, role: str = "operator") -> httpx.Response:
        key = (self.state / "keys" / f"{role}.key").read_text().strip()
        return httpx.request(
            method, self.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
        )

    def chat(self, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = self.call("POST", "/v1/chat/completions", body | {"max_tokens": 12} | more, role="client")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    @property
    def front(self) -> int:
        return children(self.process.pid)[0]

    @property
    def model(self) -> int:
        return int(self.call("GET", "/quaver/status").json()["engine"]["pid"])

    def start_fault(self, kind: str, **params: Any) -> str:
        body = {"kind": kind, "params": params, "ttl_s": 300}
        answer = self.call("POST", "/quaver/chaos/faults", body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def journal(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.state / "chaos" / "journal.jsonl").read_text().splitlines()
        ]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)
