"""Clients that leave, engines that die, servers that stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest

from engine.api.endpoint import GenerationEndpoint
from engine.api.jobs import completion_job
from engine.api.replies import CompletionReply

pytestmark = pytest.mark.model

LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 2000,
    "temperature": 1,
    "seed": 1,
    "ignore_eos": True,
}


def running_id(server, but: str = "") -> str:
    """Wait for a request that has begun and emitted something."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for generation in list(server.state.active):
            request_id = generation.job.meta.request_id
            if generation.completion_tokens > 2 and request_id != but:
                return request_id
        time.sleep(0.01)
    raise AssertionError("nothing runs")


def test_leaving_a_stream_stops_generation(http, server):
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    ended = server.recorder.end_of(request_id)
    assert (ended.reason, ended.disconnected) == ("abort", True)
    assert 0 < ended.completion_tokens < 2000
    assert ended.aggregates["tokens"] >= ended.completion_tokens
    assert server.idle()


def test_leaving_while_waiting_for_a_whole_answer_stops_generation(http, server):
    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=3)

    thread = threading.Thread(target=ask)
    thread.start()
    request_id = running_id(server)
    thread.join()
    ended = server.recorder.end_of(request_id)
    assert (ended.reason, ended.disconnected) == ("abort", True)
    assert server.idle()


def test_leaving_the_queue_stops_waiting(http, server):
    """Four choices run and no more can: the fifth leaves before its turn."""
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 4}):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=1)
        last = list(server.recorder.started)[-1]
        ended = server.recorder.end_of(last)
    assert server.idle()
    assert (ended.disconnected, ended.completion_tokens, ended.first_token_s) == (True, 0, None)


def test_the_engine_killed_is_an_error_for_all_it_ran_and_comes_back(ai, http, server):
    own = {k: v for k, v in LONG.items() if k != "ignore_eos"}
    chunks = iter(
        ai.completions.create(model="smollm2-135m", stream=True, extra_body={"ignore_eos": True}, **own)
    )
    request_id = next(chunks).id
    answers = []
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=LONG)))
    thread.start()
    whole_id = running_id(server, but=request_id)
    os.kill(server.client.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="model process died"):
        for _ in chunks:
            pass
    thread.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "engine_error"
    assert "retry-after" in answers[0].headers
    for ended in map(server.recorder.end_of, (request_id, whole_id)):
        assert (ended.reason, ended.disconnected) == ("error", False)
        assert "model process died (signal SIGKILL)" in ended.error

    refused = http.post("/v1/completions", json={"prompt": "a"})
    assert refused.json()["error"]["code"] == "engine_not_ready"
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200
    server.wait_ready()
    assert http.get("/ready").json()["restarts"] >= 1
    whole = http.post("/v1/completions", json={"prompt": "The capital of France is", "temperature": 0})
    assert "Paris" in whole.json()["choices"][0]["text"]


def test_a_cancelled_task_still_has_its_end(server):
    async def cancel() -> None:
        endpoint = GenerationEndpoint(server.state, "cmpl", completion_job, CompletionReply)
        never = asyncio.Event()
        bodies = [{"type": "http.request", "body": json.dumps(LONG).encode()}]

        async def receive():
            if not bodies:
                await never.wait()
            return bodies.pop()

        async def send(_message) -> None: ...

        task = asyncio.create_task(endpoint({"type": "http", "headers": []}, receive, send))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    server.call(cancel())
    ended = server.recorder.end_of(list(server.recorder.started)[-1])
    assert (ended.reason, ended.disconnected, ended.error) == ("abort", False, "CancelledError")
    assert server.idle()


def test_draining_marks_what_it_cannot_finish(http, server):
    seen = []

    def read() -> None:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            seen.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    request_id = running_id(server)
    try:
        server.call(server.state.drain(grace_s=0.1))
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert http.get("/ready").status_code == 503
    finally:
        server.state.draining = False
    thread.join()
    assert json.loads(seen[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert refused.json()["error"]["code"] == "shutting_down"
    ended = server.recorder.end_of(request_id)
    assert (ended.reason, ended.disconnected) == ("abort", False)
    assert server.idle()


class Faulty:
    """A prompt hook that changes what matches, and one that breaks."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks

    def apply(self, meta, messages):
        if self.breaks:
            raise RuntimeError("a fault of its own")
        if meta.headers.get("x-hit") != "1":
            return messages, []
        return [{**messages[0], "content": "The capital of Italy is"}], ["fault-1"]


def test_prompt_faults_act_before_the_tokens(http, server):
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    server.state.prompt_hook = Faulty(breaks=False)
    try:
        clean = http.post("/v1/completions", json=body).json()
        hit = http.post("/v1/completions", json=body, headers={"x-hit": "1"}).json()
        server.state.prompt_hook = Faulty(breaks=True)
        broken = http.post("/v1/completions", json=body).json()
    finally:
        server.state.prompt_hook = None
    assert clean["choices"][0]["text"] == broken["choices"][0]["text"] != hit["choices"][0]["text"]
    assert server.recorder.started[hit["id"]].faults == ["fault-1"]
    assert server.recorder.end_of(hit["id"]).faults == ["fault-1"]
    assert server.recorder.started[clean["id"]].faults == []


class Held:
    """A prompt hook that works until it is released."""

    def __init__(self) -> None:
        self.working, self.released = threading.Event(), threading.Event()

    def apply(self, meta, messages):
        self.working.set()
        assert self.released.wait(60)
        return messages, []


def test_many_prompts_are_refused_before_they_are_tokenised(http, server, monkeypatch):
    monkeypatch.setattr(type(server.state.tokenizer), "encode_prompt", None)
    many = {"prompt": ["a " * 1000] * 900}
    assert http.post("/v1/completions", json=many).json()["error"]["param"] == "n"


def test_the_work_on_a_long_prompt_keeps_nobody_waiting(http, server):
    long = {"prompt": "many words " * 20_000}
    server.state.prompt_hook = hook = Held()
    posting = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": long})
    try:
        posting.start()
        assert hook.working.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    finally:
        hook.released.set()
        posting.join()
        server.state.prompt_hook = None
