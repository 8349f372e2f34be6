"""Commands that are pointed at something else than a Quaver server."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quaver.cli import app

COMMANDS = (
    ("chaos", "list"),
    ("chaos", "start", "noise"),
    ("chaos", "stop", "noise-1"),
    ("alerts", "list"),
    ("alerts", "canaries"),
    ("calibrate",),
    ("load", "--seconds", "1"),
    ("quality",),
)


@pytest.fixture(params=[b"<!DOCTYPE html><title>Something</title>", b"[]", b"", b"\xff"], scope="module")
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers everything with 200 and the same bytes."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(request.param)))
            self.end_headers()
            self.wfile.write(request.param)

        do_POST = do_DELETE = do_GET  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_no_quaver_server_is_said_to_be_none(
    words: tuple[str, ...], other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for role in ("OPERATOR", "VIEWER", "CLIENT"):
        monkeypatch.setenv(f"QUAVER_{role}_KEY", "key")
    result = CliRunner().invoke(app, [*words, "--url", other])
    assert result.exit_code == 1
    assert "answered 200; is a Quaver server there?" in str(result.exception) + result.output


@pytest.mark.parametrize("key", [b"", b"\n", b"\xff\xfekey", b"one\ntwo", "schlüssel".encode(), b"a\0b"])
def test_a_file_without_a_key_is_named(key: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.key").write_bytes(key)
    result = CliRunner().invoke(
        app, ["chaos", "list", "--url", "http://127.0.0.1:1", "--key-file", str(tmp_path / "some.key")]
    )
    assert "there is no key in" in str(result.exception) and "some.key" in str(result.exception)
