"""A real engine with a small model, flooded over HTTP: refusals come early, and not to the wrong tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import httpx
import pytest

from engine.api.settings import ApiSettings
from engine.settings import EngineSettings

from .conftest import Server

LIMIT_S = 1.0
TOKENS = {"flood": "flood-key-0123456789", "small": "small-key-0123456789"}


@dataclass
class Reply:
    """What a client saw: the status, the seconds to the first token, the refusal if it was one."""

    status: int
    first_s: float
    total_s: float
    refusal: dict | None = None
    retry_after: int = 0


@pytest.fixture
def busy(write_gguf, tmp_path) -> Iterator[Server]:
    """One slot, room for two hundred in the queue, nobody to wait for more than a second."""
    path, _ = write_gguf()
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for tenant, token in TOKENS.items():
        (keys / f"client-{tenant}.key").write_text(token)
        (keys / f"client-{tenant}.key").chmod(0o600)
    engine = EngineSettings(model=str(path), backend="reference", threads=1, max_running=1, max_waiting=200)
    server = Server(engine, ApiSettings(queue_delay_s=LIMIT_S, tenant_concurrency=500), keys)
    yield server
    assert server.idle()
    assert server.state.door.in_flight == 0
    server.close()


async def ask(client: httpx.AsyncClient, tenant: str) -> Reply:
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {TOKENS[tenant]}"}
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            error = (await answer.aread()) and answer.json()["error"]
            took = time.perf_counter() - began
            return Reply(answer.status_code, took, took, error, int(answer.headers["retry-after"]))
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    return Reply(200, first, time.perf_counter() - began)


async def flood(url: str) -> tuple[list[Reply], list[Reply]]:
    """A hundred and fifty from one tenant in three seconds; the other asks once at a time meanwhile."""
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        for _ in range(4):
            assert (await ask(client, "flood")).status == 200
        tasks = []
        small = asyncio.create_task(_modest(client))
        for _ in range(150):
            tasks.append(asyncio.create_task(ask(client, "flood")))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks), await small


async def _modest(client: httpx.AsyncClient) -> list[Reply]:
    await asyncio.sleep(1.5)
    return [await ask(client, "small") for _ in range(4)]


def test_a_flood_is_refused_before_it_waits_and_starves_nobody(busy: Server) -> None:
    flooded, small = asyncio.run(flood(busy.url))
    refused = [reply for reply in flooded if reply.status != 200]
    served = [reply for reply in flooded if reply.status == 200]
    assert {reply.status for reply in refused} == {429}
    for reply in refused:
        assert reply.refusal is not None
        assert set(reply.refusal) == {"message", "type", "param", "code"}
        assert (reply.refusal["type"], reply.refusal["code"]) == ("rate_limit_error", "queue_delay")
        assert reply.retry_after >= 1
    assert served, "the flood gets what the engine can do"
    assert max(reply.first_s for reply in served) < 3 * LIMIT_S + 2
    assert [reply.status for reply in small] == [200] * 4
    waits = [[reply.first_s for reply in replies] for replies in (small, served)]
    assert median(waits[0]) < median(waits[1])
    meta, status, code = busy.recorder.rejected[-1]
    assert (meta.tenant, status, code) == ("flood", 429, "queue_delay")
