"""The whole round: evaluator → real Alertmanager → our webhook over HTTP; and a real Prometheus beside it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from alerting import baseline as baselines
from alerting import generate
from alerting.service import Alerting
from alerting.settings import AlertingSettings
from engine.api.auth import AuthMiddleware, Keys
from engine.messages import RequestMeta

pytestmark = pytest.mark.services


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH")
    return path


@contextlib.asynccontextmanager
async def running(log: Path, *command: str) -> AsyncIterator[None]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def serving(app: object, port: int) -> AsyncIterator[None]:
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")  # type: ignore[arg-type]
    )
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the conditions are plain state
            await asyncio.sleep(0.05)


async def ready(url: str, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds), httpx.AsyncClient() as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def test_alerts_go_round_by_alertmanager_and_prometheus_takes_over(
    tmp_path: Path, service, rules
) -> None:
    alertmanager, prometheus = tool("alertmanager"), tool("prometheus")
    am_port, prom_port, port = free_port(), free_port(), free_port()
    keys = tmp_path / "keys"
    policy = Keys.load_or_create(keys)
    quick = rules.model_copy(
        update={
            "slo": rules.slo.model_copy(update={"evaluator_stale_s": 1}),
            "breaker": rules.breaker.model_copy(update={"cool_down_s": 0.2}),
        }
    )
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(quick.model_dump()))
    generate.write(
        tmp_path,
        quick,
        webhook_url=f"http://127.0.0.1:{port}/quaver/alerts/webhook",
        webhook_key_file=str(keys / "webhook.key"),
        engine=f"127.0.0.1:{port}",
        alertmanager=f"127.0.0.1:{am_port}",
    )
    config = tmp_path / "prometheus.yml"
    config.write_text(config.read_text().replace(": 5s", ": 500ms"))

    baselines.save(service.baseline(rules), tmp_path / "state" / "baseline.json")
    registry = CollectorRegistry()
    alerting = Alerting(
        AlertingSettings(
            rules_file=tmp_path / "own.yaml",
            alertmanager_url=f"http://127.0.0.1:{am_port}",
            alert_resend_s=1.0,
        ),
        registry,
        tmp_path / "state",
    )

    async def metrics(request: Request) -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry).decode())

    routes = [*alerting.routes(), Route("/metrics", metrics)]
    app = AuthMiddleware(Starlette(routes=routes), policy)

    def told() -> list[tuple[str, str, str]]:
        return [
            (n["labels"]["alertname"], n["labels"].get("source", ""), n["status"])
            for n in reversed(alerting.state()["webhook"])
        ]

    am = (
        alertmanager,
        f"--config.file={tmp_path / 'alertmanager.yml'}",
        f"--storage.path={tmp_path / 'am'}",
        f"--web.listen-address=127.0.0.1:{am_port}",
        "--cluster.listen-address=",
    )
    prom = (
        prometheus,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'prom'}",
        f"--web.listen-address=127.0.0.1:{prom_port}",
        "--rules.alert.resend-delay=1s",
    )
    async with serving(app, port), running(tmp_path / "am.log", *am):
        await ready(f"http://127.0.0.1:{am_port}/-/ready")
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/quaver/alerts/webhook"
            assert (await http.post(url, json={})).status_code == 401
            operator = (keys / "operator.key").read_text().strip()
            headers = {"Authorization": f"Bearer {operator}"}
            assert (await http.post(url, json={}, headers=headers)).status_code == 403
        await alerting.start()

        service.now = time.time()
        for i in range(30):
            service.respond(
                alerting.sink, service.rows(24, 2.5), tenant="ab"[i % 2], leave_after=18, seconds=0.01
            )
        await until(lambda: ("QuaverUsersLeaving", "evaluator", "firing") in told())
        while alerting.gate.state("qa") != "closed":
            await asyncio.sleep(0.02)
            service.now = time.time()
            alerting.gate.admit(RequestMeta(request_id=f"p{service.now}", route="qa"))
            service.respond(alerting.sink, service.rows(24), seconds=0.01, request_id=f"p{service.now}")
        await until(lambda: ("QuaverUsersLeaving", "evaluator", "resolved") in told())
        assert alerting.state()["webhook"][0]["source"] == "alertmanager"

        service.now = time.time()
        for _ in range(30):
            service.respond(alerting.sink, service.rows(24, 2.5), seconds=0.01)
        alerting.evaluator.tick()
        await alerting.stop()  # from here on nobody evaluates, while /metrics is still served
        async with running(tmp_path / "prom.log", *prom):
            await ready(f"http://127.0.0.1:{prom_port}/-/ready")
            await until(lambda: ("QuaverJointEvidence", "prometheus", "firing") in told(), 30)
            await until(lambda: alerting.state()["evaluator"]["watchdog_heard"], 30)
