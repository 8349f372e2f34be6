"""Faults of the front process on a real server: in streams, in the prompt's encoding, in telemetry."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.quaver.server import Server, wait_for

pytestmark = pytest.mark.model
HURT = {"header": "x-hurt=yes"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("state")
    server = Server(folder, QUAVER_DETERMINISTIC="1", QUAVER_SIGNAL_BUDGET="1")  # detail of every token
    yield server
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    yield
    server.call("POST", "/quaver/chaos/halt")
    server.call("POST", "/quaver/chaos/unblock")


def start(server: Server, kind: str, ttl_s: float = 60.0, **params: Any) -> str:
    body = {"kind": kind, "params": params, "ttl_s": ttl_s, "selector": HURT}
    answer = server.call("POST", "/quaver/chaos/faults", body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def touched(server: Server, fault_id: str) -> int:
    return int(server.call("DELETE", f"/quaver/chaos/faults/{fault_id}").json()["touched"])


class Read:
    """A stream as one client read it: its pieces, when each came, its id, and whether it ended well."""

    def __init__(self, server: Server, hurt: bool) -> None:
        key = (server.state / "keys" / "client.key").read_text().strip()
        headers = {"authorization": f"Bearer {key}"} | ({"x-hurt": "yes"} if hurt else {})
        body = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 10,
            "ignore_eos": True,
            "stream": True,
        }
        self.lines: list[str] = []
        self.times: list[float] = []
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            self.id = answer.headers["x-request-id"]
            try:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.times.append(time.monotonic())
                self.whole = self.lines[-1] == "data: [DONE]"
            except httpx.RemoteProtocolError:
                self.whole = False

    @property
    def chunks(self) -> list[dict[str, Any] | None]:
        """The events, None for one that is no JSON."""
        return [_json(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks if chunk for choice in chunk["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def _json(text: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(text))
    except ValueError:
        return None


@pytest.fixture(scope="module")
def clean(server: Server) -> str:
    read = Read(server, hurt=True)
    assert read.whole and read.text
    return read.text


CONTROLS = {
    "stream_stall": {"seconds": 0.0},
    "stream_delay": {"seconds": 0.0},
    "stream_cut": {"spare": True},
    "stream_garble": {"rate": 0.0},
}


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_control_of_a_stream_fault_changes_nothing(server: Server, clean: str, kind: str) -> None:
    fault_id = start(server, kind, **CONTROLS[kind])
    read = Read(server, hurt=True)
    assert read.whole and read.text == clean
    assert all(chunk is not None for chunk in read.chunks)
    assert touched(server, fault_id) == 1


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("stream_stall", {"seconds": 60.0}),
        ("stream_delay", {"seconds": 60.0}),
        ("stream_cut", {"at": 1}),
        ("stream_garble", {"rate": 1.0}),
        ("telemetry_drop", {}),
        ("double_bos", {}),
        ("template", {}),
    ],
)
def test_requests_that_do_not_match_are_as_ever(
    server: Server, clean: str, kind: str, params: dict[str, Any]
) -> None:
    fault_id = start(server, kind, **params)
    read = Read(server, hurt=False)
    assert read.whole and read.text == clean
    assert touched(server, fault_id) == 0


def test_a_stalled_stream_pauses_once_and_a_delayed_one_at_each_piece(server: Server, clean: str) -> None:
    fault_id = start(server, "stream_stall", seconds=0.5, at=2)
    read = Read(server, hurt=True)
    gaps = [after - before for before, after in zip(read.times, read.times[1:], strict=False)]
    assert read.text == clean
    assert max(gaps) > 0.45
    server.call("DELETE", f"/quaver/chaos/faults/{fault_id}")
    start(server, "stream_delay", seconds=0.2)
    read = Read(server, hurt=True)
    assert read.text == clean
    assert read.times[-1] - read.times[0] > 0.2


def test_a_stall_ends_with_its_lease(server: Server, clean: str) -> None:
    start(server, "stream_stall", ttl_s=1.0, seconds=3600.0, at=2)
    assert Read(server, hurt=True).text == clean


def test_ending_a_stall_lets_blocked_streams_go(server: Server, clean: str) -> None:
    fault_id = start(server, "stream_stall", seconds=3600.0, at=2)
    found: list[Read] = []
    reader = threading.Thread(target=lambda: found.append(Read(server, hurt=True)))
    reader.start()

    def blocked() -> bool:
        (fault,) = server.call("GET", "/quaver/chaos").json()["faults"]
        return fault["touched"] == 1

    wait_for(blocked, 20)
    assert Read(server, hurt=False).text == clean  # others go on
    assert touched(server, fault_id) == 1
    reader.join(20)
    assert found and found[0].text == clean


def test_a_cut_stream_breaks_off_and_counts_as_interrupted(server: Server, clean: str) -> None:
    fault_id = start(server, "stream_cut", at=3)
    read = Read(server, hurt=True)
    assert not read.whole
    assert clean.startswith(read.text) and read.text != clean

    def ended() -> dict[str, Any] | None:
        answer = server.call("GET", f"/quaver/records/requests/{read.id}")
        return answer.json()["request"] if answer.status_code == 200 else None

    request = wait_for(ended, 20)
    assert (request["finish_reason"], request["outcome"]) == ("abort", "interrupted")
    assert request["faults"] == [fault_id]


def test_a_garbled_stream_has_events_that_are_no_json(server: Server, clean: str) -> None:
    start(server, "stream_garble", rate=1.0)
    read = Read(server, hurt=True)
    assert read.whole
    assert read.chunks.count(None) >= 3
    assert read.text != clean


def ask(server: Server, hurt: bool = True) -> dict[str, Any]:
    key = (server.state / "keys" / "client.key").read_text().strip()
    headers = {"authorization": f"Bearer {key}"} | ({"x-hurt": "yes"} if hurt else {})
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize(
    ("kind", "params", "control"),
    [
        ("double_bos", {"count": 3}, {"count": 0}),
        ("template", {"style": "headings"}, {"own": True}),
        ("template", {"style": "brackets"}, {"own": True}),
        ("template", {"style": "bare"}, {"own": True}),
    ],
)
def test_a_prompt_is_encoded_otherwise_and_by_the_control_as_ever(
    server: Server, kind: str, params: dict[str, Any], control: dict[str, Any]
) -> None:
    before = ask(server)
    fault_id = start(server, kind, **params)
    struck = ask(server)
    assert touched(server, fault_id) == 1
    assert struck["usage"]["prompt_tokens"] != before["usage"]["prompt_tokens"]
    if kind == "double_bos":
        assert struck["usage"]["prompt_tokens"] == before["usage"]["prompt_tokens"] + 3
    fault_id = start(server, kind, **params | control)
    same = ask(server)
    assert touched(server, fault_id) == 1
    assert same["usage"]["prompt_tokens"] == before["usage"]["prompt_tokens"]
    assert same["choices"][0]["message"] == before["choices"][0]["message"]


def dropped(server: Server, what: str) -> float:
    lines = server.call("GET", "/metrics").text.splitlines()
    name = f'quaver_telemetry_dropped_total{{what="{what}"}} '
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def rows(server: Server, request_id: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        answer = server.call("GET", f"/quaver/records/requests/{request_id}")
        return dict(answer.json()) if answer.status_code == 200 else None

    return wait_for(there, 20)


def test_lost_telemetry_is_counted_and_the_answer_stays(server: Server, clean: str) -> None:
    before = dropped(server, "tokens")
    fault_id = start(server, "telemetry_drop", rate=0.0)
    read = Read(server, hurt=True)
    assert len(rows(server, read.id)["tokens"]["step"]) == 10
    assert dropped(server, "tokens") == before
    assert touched(server, fault_id) == 1
    fault_id = start(server, "telemetry_drop", rate=1.0)
    read = Read(server, hurt=True)
    assert read.text == clean
    detail = rows(server, read.id)
    assert detail["request"]["completion_tokens"] == 10
    assert not detail["tokens"]["step"]
    assert dropped(server, "tokens") == before + 10
    assert touched(server, fault_id) == 1


def degraded(server: Server, lost: str) -> float:
    lines = server.call("GET", "/metrics").text.splitlines()
    name = f'quaver_degraded_responses_total{{lost="{lost}"'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("what", ["tokens", "layers"])
def test_a_response_that_lost_telemetry_is_marked(server: Server, what: str) -> None:
    start(server, "telemetry_drop", rate=0.0, what=what)
    assert not any(name.startswith("lost_") for name in aggregates(server, Read(server, hurt=True).id))
    server.call("POST", "/quaver/chaos/halt")
    server.call("POST", "/quaver/chaos/unblock")
    gone, marked = dropped(server, what), degraded(server, what)
    start(server, "telemetry_drop", rate=0.6, what=what)
    lost = aggregates(server, Read(server, hurt=True).id)[f"lost_{what}"]
    assert 1 <= lost < 10
    assert (dropped(server, what) - gone, degraded(server, what) - marked) == (lost, 1)
    spared = aggregates(server, Read(server, hurt=False).id)
    assert not any(name.startswith("lost_") for name in spared)
    assert degraded(server, what) == marked + 1
    report = server.call("GET", "/quaver/alerts").json()["evaluator"]["routes"]
    assert sum(route["degraded_recent"] for route in report.values()) >= 1


def aggregates(server: Server, request_id: str) -> dict[str, float]:
    return dict(rows(server, request_id)["request"]["aggregates"])
