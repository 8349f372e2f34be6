"""Chaos on a real server: reverts bit for bit, under load, with readers who do not read, on a full disk."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.disks import mounted
from tests.quaver.server import Server, wait_for

pytestmark = pytest.mark.model
ROLL = {"kind": "kv_roll", "params": {}, "ttl_s": 120}
NOISE = {"kind": "noise", "params": {"sigma": 3}, "ttl_s": 120}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A deterministic server whose journal lies on a disk of 1 MB."""
    state = tmp_path_factory.mktemp("state")
    with mounted(state / "chaos", "1m", lazily=True):
        server = Server(state, QUAVER_DETERMINISTIC="1")
        yield server
        server.stop()


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    yield
    server.call("POST", "/quaver/chaos/halt")
    server.call("POST", "/quaver/chaos/unblock")


def start(server: Server, body: dict[str, Any], status: int = 201) -> dict[str, Any]:
    answer = server.call("POST", "/quaver/chaos/faults", body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def chaos(server: Server) -> dict[str, Any]:
    return dict(server.call("GET", "/quaver/chaos").json())


def verdict(server: Server, fault_id: str) -> dict[str, Any]:
    def known() -> dict[str, Any] | None:
        (ended,) = [fault for fault in chaos(server)["ended"] if fault["fault_id"] == fault_id]
        return None if ended["reverted"]["state"] == "pending" else dict(ended["reverted"])

    return wait_for(known, 20)


@pytest.mark.parametrize("body", [ROLL, NOISE], ids=["kv_roll", "noise"])
def test_a_revert_is_verified_bit_for_bit(server: Server, body: dict[str, Any]) -> None:
    clean = server.chat()["choices"][0]["message"]["content"]
    fault = start(server, body)
    assert server.call("POST", "/quaver/chaos/canary").json()["state"] == "differs"
    assert server.chat()["choices"][0]["message"]["content"] != clean
    ended = server.call("DELETE", f"/quaver/chaos/faults/{fault['id']}").json()
    assert ended["touched"] >= 2
    assert verdict(server, fault["id"]) == {"state": "verified", "error": 0.0}
    (entry,) = [e for e in server.journal() if e["event"] == "revert" and e["fault_id"] == fault["id"]]
    assert entry["state"] == "verified"
    assert server.chat()["choices"][0]["message"]["content"] == clean


@contextmanager
def crowd(server: Server, readers: int) -> Iterator[list[int]]:
    """Keep readers of long streams busy; yields the numbers of chunks that each has read."""
    key = (server.state / "keys" / "client.key").read_text().strip()
    read = [0] * readers
    over = threading.Event()

    def listen(number: int) -> None:
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=_long(), headers=_bearer(key), timeout=60
        ) as answer:
            for line in answer.iter_lines():
                read[number] += line.startswith("data:")
                if over.is_set():
                    return

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield read
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def _long(**more: Any) -> dict[str, Any]:
    words = [{"role": "user", "content": "Tell me a long story."}]
    return {"messages": words, "max_tokens": 600, "ignore_eos": True, "stream": True} | more


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def deaf(server: Server) -> Iterator[socket.socket]:
    """Ask for a wide stream and never read a byte of it."""
    url = httpx.URL(server.url)
    key = (server.state / "keys" / "client.key").read_text().strip()
    body = json.dumps(_long(n=4, logprobs=True, top_logprobs=20, signals=True)).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect((url.host, url.port or 80))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        raw.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        yield raw


def test_under_load_and_with_a_reader_who_does_not_read(server: Server) -> None:
    with crowd(server, 4) as read, deaf(server):
        wait_for(lambda: min(read) > 3, 60)
        noise = start(server, NOISE | {"ttl_s": 60, "selector": {"share": 0.5}})
        flip = start(server, {"kind": "kv_flip", "ttl_s": 60})
        assert [fault["id"] for fault in chaos(server)["faults"]] == [noise["id"], flip["id"]]
        seen = sum(read)
        wait_for(lambda: sum(read) > seen + 4, 60)
        assert server.call("DELETE", f"/quaver/chaos/faults/{noise['id']}").json()["confirmed"]
        halted = server.call("POST", "/quaver/chaos/halt").json()
        assert (halted["ended"], halted["confirmed"]) == ([flip["id"]], True)
        assert chaos(server)["faults"] == []
        assert start(server, NOISE, 409)["error"]["code"] == "chaos_halted"
        seen = list(read)
        wait_for(lambda: min(now - before for now, before in zip(read, seen, strict=True)) > 0, 60)
    (touched,) = [fault["touched"] for fault in chaos(server)["ended"] if fault["fault_id"] == flip["id"]]
    assert touched > 0


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    return filler


def test_on_a_full_disk_nothing_starts_and_everything_ends(server: Server) -> None:
    noise, flip = start(server, NOISE), start(server, {"kind": "kv_flip", "ttl_s": 60})
    filler = fill(server.state / "chaos")
    journal = server.state / "chaos" / "journal.jsonl"
    try:
        for _ in range(20):  # the last page of the file has room for a few more entries
            answer = server.call("POST", "/quaver/chaos/faults", ROLL)
            if answer.status_code != 201:
                break
            server.call("DELETE", f"/quaver/chaos/faults/{answer.json()['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "journal_unavailable")
        assert "no space left" in answer.json()["error"]["message"].lower()
        assert [fault["id"] for fault in chaos(server)["faults"]] == [noise["id"], flip["id"]]
        assert server.call("DELETE", f"/quaver/chaos/faults/{noise['id']}").json()["confirmed"]
        assert server.call("POST", "/quaver/chaos/halt").json()["confirmed"]
        state = chaos(server)
        assert (state["faults"], state["lever"]["blocked"]) == ([], True)
    finally:
        filler.unlink()
    assert server.call("POST", "/quaver/chaos/unblock").json() == {"blocked": False}
    assert start(server, NOISE)["state"] == "active"
    assert all(json.loads(line) for line in journal.read_text().splitlines())  # no half line was left
