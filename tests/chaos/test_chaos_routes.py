"""The HTTP endpoints and their client."""

import asyncio
import threading
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette

from chaos.client import ChaosClient, RefusedError
from chaos.faults.registry import KINDS
from chaos.service import Chaos
from chaos.settings import ChaosSettings


class Nowhere:
    """A model process that takes every fault."""

    def __init__(self):
        self.fault_listeners = []

    async def attach_fault(self, fault):
        return True

    async def detach_fault(self, fault_id=None):
        return True


@pytest.fixture
async def http(tmp_path):
    chaos = Chaos(ChaosSettings(chaos=True), Nowhere(), tmp_path / "journal.jsonl")
    app = Starlette(routes=chaos.routes())

    async def as_operator(scope, receive, send):
        scope.setdefault("state", {})["principal"] = SimpleNamespace(role="operator", tenant="ops")
        await app(scope, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(as_operator), base_url="http://quaver"
    ) as client:
        yield client
    await chaos.stop()


async def test_the_life_of_a_fault(http):
    body = {"kind": "noise", "ttl_s": 60, "params": {"sigma": 2}, "selector": {"share": 0.5}, "seed": 3}
    started = await http.post("/quaver/chaos/faults", json=body)
    assert started.status_code == 201
    fault = started.json()
    status = (await http.get("/quaver/chaos")).json()
    assert status["enabled"] is True
    assert [one["fault_id"] for one in status["faults"]] == [fault["fault_id"]]
    assert status["faults"][0]["by"] == "operator:ops"
    assert {kind["kind"] for kind in status["kinds"]} == KINDS.keys()
    orders = [kind["order"] for kind in status["kinds"]]
    assert orders == sorted(orders)
    noise = next(kind for kind in status["kinds"] if kind["kind"] == "noise")
    assert noise["params"]["properties"]["sigma"]["maximum"] == 10
    assert status["journal"][0]["event"] == "start"
    preview = await http.post("/quaver/chaos/preview", json={"selector": {"tenant": "x"}})
    assert preview.json() == {"recent": 0, "admitted": 0, "expected": 0}
    assert (await http.delete(f"/quaver/chaos/faults/{fault['fault_id']}")).json()["ended"] is True
    assert (await http.delete(f"/quaver/chaos/faults/{fault['fault_id']}")).json()["ended"] is False
    assert (await http.post("/quaver/chaos/halt")).json()["blocked"] is True
    assert (await http.post("/quaver/chaos/faults", json=body)).status_code == 409
    assert (await http.post("/quaver/chaos/unblock")).json() == {"blocked": False}
    assert (await http.post("/quaver/chaos/faults", json=body)).status_code == 201


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_body"),
        (b'{"kind": "noise"}', 400, "invalid_body"),
        (b'{"kind": "noise", "ttl_s": 5, "extra": 1}', 400, "invalid_body"),
        (b'{"kind": "noise", "ttl_s": NaN}', 400, "invalid_body"),
        (b'{"kind": "noise", "ttl_s": 5, "params": {"sigma": []}}', 400, "invalid_body"),
        (b'{"kind": "noise", "ttl_s": 5, "params": {"sigma": -1}}', 400, "invalid_fault"),
        (
            b'{"kind": "noise", "ttl_s": 5, "params": {"from_token": 1' + b"0" * 30 + b"}}",
            400,
            "invalid_fault",
        ),
        (
            b'{"kind": "truncation", "ttl_s": 5, "params": {"budget": 1' + b"0" * 30 + b"}}",
            400,
            "invalid_fault",
        ),
        (b'{"kind": ' + b"[" * 30_000, 400, "invalid_body"),
        (b'{"kind": "noise", "ttl_s": 1e9}', 400, "over_cap"),
        (b"\xff" * 70_000, 413, "body_too_large"),
    ],
)
async def test_errors_have_openai_s_shape(http, content, status, code):
    answer = await http.post("/quaver/chaos/faults", content=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


class Bridge(httpx.BaseTransport):
    """Lets the blocking client reach an app on a loop of its own."""

    def __init__(self, app):
        self.loop = asyncio.new_event_loop()
        self.inner = httpx.ASGITransport(app)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def handle_request(self, request):
        async def send():
            answer = await self.inner.handle_async_request(request)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return self.call(send())

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def test_the_client_speaks_all_of_it(tmp_path):
    chaos = Chaos(ChaosSettings(chaos=True), Nowhere(), tmp_path / "journal.jsonl")
    bridge = Bridge(Starlette(routes=chaos.routes()))
    try:
        with ChaosClient("http://quaver", "key", transport=bridge) as client:
            fault = client.start("truncation", 30, {"side": "suffix", "ratio": 0.4}, {"route": "qa"})
            assert client.status()["faults"][0]["fault_id"] == fault["fault_id"]
            with pytest.raises(RefusedError, match="already acts") as caught:
                client.start("truncation", 30, {"ratio": 0.4})
            assert (caught.value.status, caught.value.code) == (409, "overlap")
            assert client.preview()["recent"] == 0
            assert client.stop(fault["fault_id"])["ended"]
            assert client.stop("no such?fault#")["fault_id"] == "no such?fault#"
            assert client.halt()["blocked"]
            assert not client.unblock()["blocked"]
        bridge.call(chaos.stop())
    finally:
        bridge.stop()
