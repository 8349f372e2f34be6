"""Quality of a real model, clean and under faults that strike the probes' own requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.client import ChaosClient, RefusedError
from chaos.quality.faulted import under_fault
from chaos.quality.measure import QualityError, compare, quality
from tests.quaver.server import Server

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("state"), QUAVER_DETERMINISTIC="1", QUAVER_CHAOS_VERIFY="0")
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[ChaosClient]:
    with ChaosClient(server.url, key(server, "operator")) as client:
        yield client


def key(server: Server, role: str) -> str:
    return (server.state / "keys" / f"{role}.key").read_text().strip()


def ask(server: Server, n: int = 12, **more: Any) -> dict[str, Any]:
    return quality(server.url, key(server, "client"), n, probes=("facts", "format"), **more)


def test_noise_harms_and_its_control_changes_no_letter(server: Server, client: ChaosClient) -> None:
    found = under_fault(client, "noise", {"sigma": 4.0}, lambda: ask(server))
    assert found["clean"]["rates"]["facts"]["rate"] >= 0.75
    assert found["clean"]["prompt_accuracy"] == found["clean"]["rates"]["facts"]["rate"]
    assert found["changes"]["facts"]["harmed"] and found["changes"]["format"]["harmed"]
    assert found["fault"]["touched"] == 24 and not client.status()["faults"]
    control = under_fault(client, "noise", {"sigma": 0.0}, lambda: ask(server, 6))
    assert control["clean"]["replies"] == control["faulted"]["replies"]
    assert not any(change["harmed"] for change in control["changes"].values())


def test_a_fault_that_strikes_nothing_is_no_measurement(server: Server, client: ChaosClient) -> None:
    with pytest.raises(QualityError, match="struck none"):
        under_fault(client, "noise", {"sigma": 1.0}, lambda: ask(server, 1), route="elsewhere")
    with pytest.raises(RefusedError):
        under_fault(client, "noise", {"sigma": -1.0}, lambda: ask(server, 1))
    client.start("noise", 60, {"sigma": 0.0}, {"route": "elsewhere"})
    with pytest.raises(QualityError, match="is in force"):
        under_fault(client, "noise", {"sigma": 1.0}, lambda: ask(server, 1))
    client.halt()
    client.unblock()


def test_what_cannot_be_compared_is_refused(server: Server) -> None:
    one, other = ask(server, 2), ask(server, 2, seed=1)
    assert compare(one, one)["facts"]["change"] == 0
    for bad in (other, {}, {"replies": [{"id": 1}]}):
        with pytest.raises(QualityError):
            compare(one, bad)
    with pytest.raises(QualityError, match="not answered"):
        quality(server.url, "no-key-of-this-server", 1)
    with pytest.raises(QualityError, match="at least 1"):
        ask(server, 0)


def command(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quaver", "quality", "--url", server.url, *options],
        env=os.environ | {"QUAVER_STATE_DIR": str(server.state)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_command_reports_and_the_server_exports(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "clean.json"
    done = command(server, "--n", "4", "--probe", "facts", "--report", "--json", str(file))
    assert done.returncode == 0, done.stderr
    accuracy = json.loads(file.read_text())["prompt_accuracy"]
    assert f'prompt_accuracy{{env="prod"}} {accuracy}\n' in server.call("GET", "/metrics").text
    assert (
        server.call("GET", "/quaver/quality", role="viewer").json()["report"]["prompt_accuracy"] == accuracy
    )
    assert server.call("POST", "/quaver/quality", {"rates": {}}, role="client").status_code == 403
    again = command(server, "--n", "4", "--probe", "facts", "--against", str(file))
    assert again.returncode == 0 and "+0 pt" in again.stdout


def test_the_command_says_what_is_wrong(server: Server) -> None:
    for options, complaint in (
        (("--probe", "speed"), "there is no probe 'speed'"),
        (("--fault", "gremlin", "--n", "1"), "gremlin"),
        (("--fault", "noise", "--report"), "comparison of its own"),
        (("--every", "5"), "repeats --report"),
        (("--against", "/nowhere.json"), "No such file"),
    ):
        done = command(server, *options)
        assert done.returncode != 0 and complaint in done.stderr, (options, done.stderr)
