"""`quaver serve` with the real model: answers, records, ends cleanly, and comes back after kill -9."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry.query import select
from tests.quaver.server import Server, alive, children, wait_for

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("serve"))
    yield running
    if running.process.poll() is None:
        running.stop()


def test_answers_and_describes_itself(server: Server) -> None:
    answer = server.chat(signals=True)
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert len(choice["signals"]) == answer["usage"]["completion_tokens"]
    status = server.call("GET", "/quaver/status", role="viewer").json()
    assert status["ready"] and status["chaos"] == {"enabled": True, "faults": 0}
    assert status["engine"]["description"]["layers"] == 30
    assert "llm_inference_latency_seconds_bucket" in httpx.get(f"{server.url}/metrics").text
    listed = server.call("GET", "/quaver/records/requests?limit=1", role="viewer").json()
    assert listed[0]["request_id"] == answer["id"]
    assert listed[0]["prompt"] is None and listed[0]["output"] is None


def test_says_where_it_listens_and_when_the_model_is_ready(server: Server) -> None:
    log = server.log.read_text()
    assert f"listening on {server.url}; model smollm2-135m is loading" in log
    assert f"keys in {server.state / 'keys'}; chaos is on" in log
    wait_for(lambda: "model smollm2-135m is ready" in server.log.read_text())


def test_roles(server: Server) -> None:
    assert httpx.get(f"{server.url}/quaver/status").status_code == 401
    assert server.call("GET", "/quaver/chaos", role="client").status_code == 403
    assert server.call("POST", "/quaver/chaos/halt", role="viewer").status_code == 403
    assert server.call("POST", "/v1/chat/completions", {}, role="viewer").status_code == 403
    assert server.call("POST", "/quaver/alerts/webhook", {}, role="operator").status_code == 403


async def _leave_at_random(server: Server, count: int, seed: int) -> dict[str, int]:
    """Ask `count` times, 8 at once, and close each socket after a random while; return outcomes."""
    chance = random.Random(seed)
    key = (server.state / "keys" / "client.key").read_text().strip()
    places = asyncio.Semaphore(8)
    outcomes = {"left": 0, "finished": 0, "refused": 0}

    async def one(http: httpx.AsyncClient, stream: bool, words: int, patience: float) -> None:
        body = {
            "messages": [{"role": "user", "content": "Tell me a story. " * words}],
            "max_tokens": 40,
            "stream": stream,
            "n": 2,
        }
        async with places:
            try:
                async with asyncio.timeout(patience):
                    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        assert answer.status_code in (200, 429)  # 429: aborts wait for the step's end
                        async for _ in answer.aiter_bytes():
                            pass
            except TimeoutError:
                outcomes["left"] += 1
            else:
                outcomes["finished" if answer.status_code == 200 else "refused"] += 1

    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, limits=limits) as http:
        await asyncio.gather(
            *(
                one(http, chance.random() < 0.5, chance.choice((1, 20, 120)), chance.uniform(0.01, 1.5))
                for _ in range(count)
            )
        )
    return outcomes


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_two_hundred_random_aborts_leave_nothing(server: Server) -> None:
    asyncio.run(_leave_at_random(server, 20, seed=1))
    model, before = server.model, (_threads(server.front), _threads(server.model))
    left = seed = 0
    while left < 200 and seed < 8:
        left += asyncio.run(_leave_at_random(server, 100, seed=(seed := seed + 1)))["left"]
    assert left >= 200

    def idle() -> bool:
        stats = server.call("GET", "/quaver/status").json()["engine"]["stats"]
        return not (stats["running"] or stats["waiting"] or stats["pages_used"])

    wait_for(idle)
    assert server.chat()["choices"]  # the engine checks its pages whenever it becomes idle
    status = server.call("GET", "/quaver/status").json()
    assert status["engine"]["pid"] == model and status["engine"]["restarts"] == 0
    wait_for(lambda: _metric(server, "quaver_open_requests") == 0)
    after = (_threads(server.front), _threads(server.model))
    pool = (os.cpu_count() or 1) + 4  # asyncio's threads for long prompts, made on demand and kept
    assert after[0] <= before[0] + pool and after[1] == before[1]


def _chaos_run(
    server: Server, folder: Path, method: list[dict[str, Any]]
) -> subprocess.CompletedProcess[str]:
    probe = {"type": "python", "module": "chaos.toolkit", "func": "faults_in_force"}
    experiment = {
        "title": "noise comes and goes",
        "description": "a fault is started and ended",
        "steady-state-hypothesis": {
            "title": "nothing is broken",
            "probes": [{"name": "faults", "type": "probe", "tolerance": 0, "provider": probe}],
        },
        "method": [
            {
                "name": step["func"],
                "type": "action",
                "provider": {"type": "python", "module": "chaos.toolkit"} | step,
            }
            for step in method
        ],
    }
    path = folder / "experiment.json"
    path.write_text(json.dumps(experiment))
    command = [str(Path(sys.executable).with_name("chaos")), "--no-version-check", "run", str(path)]
    env = os.environ | {"QUAVER_URL": server.url, "QUAVER_STATE_DIR": str(server.state)}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_chaos_toolkit_runs_an_experiment(server: Server, tmp_path: Path) -> None:
    nobody_asks = {"kind": "noise", "ttl_s": 60, "params": {"sigma": 2}, "at_least": 0}
    start = {"func": "start_fault", "arguments": nobody_asks}
    done = _chaos_run(server, tmp_path, [start, {"func": "stop_faults"}])
    assert done.returncode == 0, done.stderr
    events = [entry["event"] for entry in server.journal()]
    assert [event for event in events if event != "revert"][-2:] == ["start", "end"]


def test_an_experiment_whose_fault_is_refused_fails(server: Server, tmp_path: Path) -> None:
    start = {"func": "start_fault", "arguments": {"kind": "noise", "ttl_s": 60, "params": {"sigma": 999}}}
    done = _chaos_run(server, tmp_path, [start])
    assert done.returncode != 0
    assert "sigma" in done.stderr


def test_killed_model_process_comes_back_without_faults(server: Server) -> None:
    fault, killed = server.start_fault("noise", sigma=2), server.model
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not server.call("GET", "/quaver/chaos").json()["faults"])
    server.wait_ready()
    assert server.model != killed
    assert "Paris" in server.chat()["choices"][0]["message"]["content"]
    ends = [entry for entry in server.journal() if entry["event"] == "end" and entry["fault_id"] == fault]
    assert len(ends) == 1 and ends[0]["reason"] == "model process lost"


def test_killed_front_comes_back_without_faults_or_orphans(server: Server) -> None:
    answer = server.chat()
    faults = {server.start_fault("noise", sigma=2), server.start_fault("authority")}
    front, model = server.front, server.model
    wait_for(
        lambda: select(
            server.state / "records", "SELECT 1 FROM requests WHERE request_id = ?", [answer["id"]]
        )
    )
    os.kill(front, signal.SIGKILL)
    wait_for(lambda: not alive(model), 15)
    wait_for(lambda: server.front != front if children(server.process.pid) else None)
    server.wait_ready()
    assert not server.call("GET", "/quaver/chaos").json()["faults"]
    lost = {e["fault_id"] for e in server.journal() if e["event"] == "end" and e["reason"] == "process lost"}
    assert faults <= lost
    assert "Paris" in server.chat()["choices"][0]["message"]["content"]
    found = select(
        server.state / "records", "SELECT outcome FROM requests WHERE request_id = ?", [answer["id"]]
    )
    assert found == [{"outcome": "completed"}]


def test_shutdown_ends_streams_and_leaves_nothing(server: Server) -> None:
    fault, front, model = server.start_fault("noise", sigma=1), server.front, server.model
    key = (server.state / "keys" / "client.key").read_text().strip()
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 24, "stream": True}
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    ) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        server.process.terminate()
        rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(40) == 0, server.log.read_text()
    assert not alive(front) and not alive(model)
    assert [e["reason"] for e in server.journal() if e.get("fault_id") == fault and e["event"] == "end"] == [
        "server stopped"
    ]
    request_id = json.loads(first.removeprefix("data: "))["id"]
    found = select(
        server.state / "records", "SELECT finish_reason FROM requests WHERE request_id = ?", [request_id]
    )
    assert found == [{"finish_reason": "length"}]


def test_killed_supervisor_takes_everything_along(tmp_path: Path) -> None:
    server = Server(tmp_path / "state")
    front, model = server.front, server.model
    server.process.kill()
    server.process.wait(10)
    wait_for(lambda: not alive(front) and not alive(model), 20)


def test_cannot_start_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "QUAVER_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "quaver", "serve"]
    failed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 2
    assert "quaver model pull" in failed.stderr and "Traceback" not in failed.stderr
    assert "restarting" not in failed.stderr
