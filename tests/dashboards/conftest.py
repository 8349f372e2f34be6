"""A real HTTP server that answers with recorded responses of an engine, for the dashboard's tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
OPERATOR_KEY = "operator-key-of-the-tests"
VIEWER_KEY = "viewer-key-of-the-tests"
PATHS = {
    "/quaver/status": "status",
    "/quaver/live": "live",
    "/quaver/alerts": "alerts",
    "/quaver/chaos": "chaos",
    "/quaver/tiers": "tiers",
    "/quaver/records/requests": "requests",
}


class RecordedEngine:
    """Serves `answers` (by fixture name; tests may change them) and keeps what was `sent` to it."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Any] = {p.stem: json.loads(p.read_text()) for p in FIXTURES.glob("*.json")}
        self.sent: list[tuple[str, str, Any]] = []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def empty(self) -> None:
        """Answer like an engine that has just started and served nothing."""
        live = self.answers["live"]
        live["series"] = {name: [None] * len(live["time"]) for name in live["series"]}
        self.answers["requests"] = []
        self.answers["alerts"].update(active=[], history=[], webhook=[])
        self.answers["chaos"].update(faults=[], journal=[])

    def calm(self) -> None:
        """Answer as if the alerts that fired at the time of the recording were over."""
        self.answers["alerts"]["active"] = []

    def read(self, path: str) -> Any:
        if path.startswith("/quaver/records/requests/"):
            detail = self.answers["detail"]
            return detail if path.endswith("/" + detail["request"]["request_id"]) else None
        return self.answers[PATHS[path]] if path in PATHS else None

    def write(self, method: str, path: str, body: Any) -> None:
        if path == "/quaver/chaos/preview":
            return
        self.sent.append((method, path, body))
        chaos = self.answers["chaos"]
        if path == "/quaver/chaos/halt":
            chaos["faults"] = []
            chaos["lever"] = {**chaos["lever"], "blocked": True, "reason": "halted by the operator"}
        elif path == "/quaver/chaos/unblock":
            chaos["lever"] = {**chaos["lever"], "blocked": False, "reason": None}
        elif method == "DELETE":
            chaos["faults"] = [f for f in chaos["faults"] if not path.endswith("/" + f["fault_id"])]
        elif path == "/quaver/chaos/faults":
            chaos["faults"].append({"fault_id": "f-test", "remaining_s": body["ttl_s"], "touched": 0, **body})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None: ...

            def do_GET(self) -> None:
                with engine.lock:
                    body = engine.read(urlsplit(self.path).path)
                if self.headers.get("authorization") != f"Bearer {VIEWER_KEY}":
                    self.answer(401, {"error": {"message": "This key is not known."}})
                elif body is None:
                    self.answer(404, {"error": {"message": "There is no such record."}})
                else:
                    self.answer(200, body)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
                if self.headers.get("authorization") != f"Bearer {OPERATOR_KEY}":
                    self.answer(401, {"error": {"message": "This needs the operator key."}})
                    return
                with engine.lock:
                    engine.write(self.command, urlsplit(self.path).path, body)
                    recent = len(engine.answers["requests"])
                self.answer(200, {"recent": recent, "admitted": recent, "expected": recent / 2})

            def do_DELETE(self) -> None:
                self.do_POST()

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


@pytest.fixture
def recorded_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    engine = RecordedEngine()
    monkeypatch.setenv("QUAVER_URL", engine.url)
    monkeypatch.setenv("QUAVER_VIEWER_KEY", VIEWER_KEY)
    yield engine
    engine.close()
