"""Stop conditions: each halts everything, says why, and refuses starts while it holds."""

import asyncio
import contextlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from alerting.alerts import Alert
from chaos.prometheus import Prometheus, PrometheusError, read
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from chaos.stops import LEAST_RESPONSES, Stops, StopWhen
from engine.hooks import RequestEnded
from engine.messages import RequestMeta
from tests.alerting.test_real_services import free_port, ready, running, tool
from tests.chaos.lab import NOISE, TRUNCATION, Process, eventually, refused, start, story

NAMES = ("QuaverJointEvidence", "QuaverLowConfidenceRate")


def alert(name="QuaverJointEvidence", level="L2", state="firing", route="qa"):
    return Alert(
        name=name,
        level=level,
        route=route,
        severity="critical",
        team="mlops",
        summary="",
        state=state,
        starts_at="2026-01-01T00:00:00Z",
    )


def ending(disconnected, canary=False):
    return RequestEnded(
        meta=RequestMeta(request_id="r", canary=canary),
        time=0.0,
        reason="abort" if disconnected else "stop",
        disconnected=disconnected,
        error=None,
        prompt_tokens=1,
        completion_tokens=1,
        queued_s=0.0,
        prefill_s=0.0,
        first_token_s=None,
        duration_s=0.0,
        token_times_s=[],
        faults=[],
        aggregates={},
        output=None,
    )


class Played(BaseHTTPRequestHandler):
    """A Prometheus whose answer the test sets; None: it closes the connection, bytes: they are the body."""

    answer = None
    status = 200
    pause_s = 0.0  # between bytes

    def do_GET(self):
        if self.answer is None:
            return
        raw = isinstance(self.answer, bytes)
        body = self.answer if raw else json.dumps(self.answer).encode()
        self.send_response(self.status if raw else 200 if self.answer["status"] == "success" else 400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if not self.pause_s:
            self.wfile.write(body)
            return
        with contextlib.suppress(OSError):
            for byte in body:
                self.wfile.write(bytes([byte]))
                time.sleep(self.pause_s)

    def log_message(self, *args):
        pass


def vector(*values):
    result = [{"metric": {"__name__": "up", "job": "a"}, "value": [0, str(value)]} for value in values]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


@pytest.fixture
def prometheus():
    class Handler(Played):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    Handler.answer = vector()
    Handler.url = f"http://127.0.0.1:{server.server_port}"
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def make(tmp_path, monkeypatch):
    monkeypatch.setattr("chaos.controller.CONFIRM_S", 0.2)
    made = []

    async def make(**settings):
        path = tmp_path / f"{len(made)}.jsonl"
        service = Chaos(ChaosSettings(chaos=True, **settings), Process(), path, alert_names=lambda: NAMES)
        service.path, service.model = path, service.controller._model
        made.append(service)
        await service.start()
        return service

    yield make
    for service in made:
        await service.stop()


async def halted(chaos):
    """Wait for the halt; return why, as lever and journal tell it."""
    await eventually(lambda: chaos.controller.status()["lever"]["blocked"] and not chaos.controller.in_force)
    assert not chaos.model.hook.active
    assert not chaos.prompt_hook.active
    await chaos.controller.unblock()
    (entry,) = [entry for entry in story(chaos.path) if entry["event"] == "halt"]
    ends = [entry["reason"] for entry in story(chaos.path) if entry["event"] == "end"]
    assert ends == [f"halted: {entry['reason']}"] * len(entry["faults"])
    return entry["reason"]


@pytest.mark.parametrize("condition", ["L2", "QuaverJointEvidence"])
async def test_an_alert_halts_all_that_is_in_force(make, condition):
    chaos = await make()
    await start(chaos, NOISE, stop=StopWhen(alert=condition))
    await start(chaos, TRUNCATION)
    chaos.on_alert(alert("QuaverLowConfidenceRate", "L1"))
    await asyncio.sleep(0.3)
    assert chaos.controller.in_force == 2
    chaos.on_alert(alert())
    await refused(chaos, NOISE, "chaos_halted")
    reason = await halted(chaos)
    assert reason == "stop condition: alert QuaverJointEvidence (L2) fires on route qa"
    message = await refused(chaos, NOISE, "stop_condition", stop=StopWhen(alert=condition))
    assert "nothing was started" in message
    await start(chaos, NOISE)  # who does not name the alert is not held by it
    chaos.on_alert(alert(state="resolved"))
    await chaos.controller.end(chaos.controller.status()["faults"][0]["fault_id"])
    await start(chaos, NOISE, stop=StopWhen(alert=condition))


async def test_a_condition_of_the_server_holds_for_every_fault(make):
    chaos = await make(chaos_stop_alert="L2")
    await start(chaos, NOISE)
    assert chaos.controller.status()["stop"] == {"alert": "L2"}
    chaos.on_alert(alert())
    assert "L2" in await halted(chaos)


async def test_readers_that_leave_halt_chaos_and_canaries_do_not(make):
    chaos = await make()
    await start(chaos, NOISE, stop=StopWhen(interruptions=0.3))
    for _ in range(20):
        chaos.on_ended(ending(True, canary=True))
    for number in range(LEAST_RESPONSES - 1):
        chaos.on_ended(ending(number < 3))
    await asyncio.sleep(0.5)
    assert chaos.controller.in_force == 1
    chaos.on_ended(ending(True))
    assert "4 of 10 responses" in await halted(chaos)


def test_a_rate_counts_the_last_minute_only():
    now = [0.0]
    stops = Stops(StopWhen(interruptions=0.5), clock=lambda: now[0])
    for _ in range(LEAST_RESPONSES):
        stops.ended(True)
    assert stops.holds(stops.always)
    now[0] = 61.0
    assert stops.holds(stops.always) is None


async def test_promql_halts_when_it_returns_a_series(make, prometheus):
    chaos = await make(prometheus_url=prometheus.url)
    await start(chaos, NOISE, stop=StopWhen(promql="up < 1"))
    await chaos.controller.look_up()
    assert chaos.controller.in_force == 1
    prometheus.answer = vector(0.0)
    await chaos.controller.look_up()
    assert await halted(chaos) == "stop condition: PromQL 'up < 1' holds: up{job=\"a\"} 0.0"
    assert "holds" in await refused(chaos, NOISE, "stop_condition", stop=StopWhen(promql="up < 1"))
    assert story(chaos.path)[-1]["event"] == "unblock"  # a refused start is no start


async def test_a_silent_prometheus_refuses_starts_and_halts_after_a_while(make, prometheus, monkeypatch):
    chaos = await make(prometheus_url=prometheus.url)
    stop = StopWhen(promql="up < 1")
    prometheus.answer = None
    assert "cannot be watched" in await refused(chaos, NOISE, "stop_condition", stop=stop)
    prometheus.answer = vector()
    await start(chaos, NOISE, stop=stop)
    prometheus.answer = None
    now = [chaos._stops._clock()]
    monkeypatch.setattr(chaos._stops, "_clock", lambda: now[0])
    await chaos.controller.look_up()
    now[0] += 9
    await chaos.controller.look_up()
    assert chaos.controller.in_force == 1
    now[0] += 2
    await chaos.controller.look_up()
    assert "cannot be watched: no answer from Prometheus" in await halted(chaos)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[1]",
        b"null",
        b'"x"',
        b"[" * 200_000,
        b'{"data": {"resultType": "vector", "result": [1]}}',
    ],
    ids=lambda body: body[:20].decode(),
)
@pytest.mark.parametrize("status", [200, 400])
async def test_whatever_answers_in_place_of_prometheus_guards_nothing(make, prometheus, body, status):
    chaos = await make(prometheus_url=prometheus.url)
    prometheus.answer, prometheus.status = body, status
    assert "cannot be watched" in await refused(
        chaos, NOISE, "stop_condition", stop=StopWhen(promql="up < 1")
    )


async def test_an_answer_that_trickles_in_is_none(prometheus, monkeypatch):
    monkeypatch.setattr("chaos.prometheus.TIMEOUT_S", 0.2)
    prometheus.answer, prometheus.pause_s = b" " * 100, 0.05
    with pytest.raises(PrometheusError, match="did not answer in"):
        await Prometheus(prometheus.url).query("up")


@pytest.mark.parametrize("broken", ["chaos.controller.Controller.tick", "chaos.stops.Stops.look_up"])
async def test_who_cannot_watch_halts_and_watches_on(make, monkeypatch, broken):
    monkeypatch.setattr("chaos.service._LOOK_UP_S", 0.05)
    chaos = await make()
    await start(chaos, NOISE)

    def fail(*stops):
        raise RuntimeError("a bug")

    with monkeypatch.context() as during:
        during.setattr(broken, fail)
        assert await halted(chaos) == "faults cannot be watched: a bug"
    await start(chaos, NOISE, ttl_s=0.3)
    await eventually(lambda: not chaos.controller.in_force)


async def test_conditions_that_cannot_be_watched_are_refused(make, tmp_path):
    chaos = await make()
    assert "QUAVER_PROMETHEUS_URL" in await refused(chaos, NOISE, "invalid_stop", stop=StopWhen(promql="up"))
    assert "QuaverJointEvidence" in await refused(chaos, NOISE, "invalid_stop", stop=StopWhen(alert="typo"))
    with pytest.raises(ValueError, match="QUAVER_CHAOS_STOP"):
        Chaos(ChaosSettings(chaos_stop_alert="typo"), Process(), tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("data", "holds"),
    [
        ({"resultType": "scalar", "result": [0, "0"]}, False),
        ({"resultType": "scalar", "result": [0, "0.5"]}, True),
        ({"resultType": "scalar", "result": [0, "NaN"]}, True),
        ({"resultType": "vector", "result": []}, False),
        ({"resultType": "vector", "result": [{"metric": {}, "value": [0, "0"]}]}, True),
    ],
)
def test_an_expression_holds_as_an_alerting_rule_does(data, holds):
    assert read({"data": data}).holds is holds


@pytest.mark.parametrize(
    "payload", [{}, [], {"data": None}, {"data": {"resultType": "matrix", "result": []}}]
)
def test_what_is_no_answer_is_an_error(payload):
    with pytest.raises(PrometheusError):
        read(payload)


@pytest.mark.services
async def test_a_real_prometheus_is_understood(tmp_path):
    configuration, port = tmp_path / "prometheus.yml", free_port()
    configuration.write_text("{}")
    words = [tool("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    client = Prometheus(f"http://127.0.0.1:{port}")
    async with running(tmp_path / "log", *words, f"--web.listen-address=127.0.0.1:{port}"):
        await ready(f"http://127.0.0.1:{port}/-/ready")
        held = {
            text: (await client.query(text)).holds for text in ("vector(1) > 2", "vector(3) > 2", "0", "7")
        }
        assert held == {"vector(1) > 2": False, "vector(3) > 2": True, "0": False, "7": True}
        with pytest.raises(PrometheusError, match="parse error"):
            await client.query("up <")
        await client.close()


async def test_prometheus_errors_say_what_is_wrong(prometheus):
    prometheus.answer = {"status": "error", "error": "parse error at char 1"}
    client = Prometheus(prometheus.url)
    with pytest.raises(PrometheusError, match="parse error"):
        await client.query("up <")
    await client.close()
    with pytest.raises(PrometheusError, match="no answer"):
        await Prometheus("http://127.0.0.1:9").query("up")
