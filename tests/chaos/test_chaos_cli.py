"""`quaver chaos` against chaos' own endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from quaver.cli import app
from tests.chaos.served import Server, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("state"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def clean(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUAVER_URL", server.url)
    monkeypatch.setenv("QUAVER_OPERATOR_KEY", "key")
    yield
    server.call("POST", "/quaver/chaos/halt")
    server.call("POST", "/quaver/chaos/unblock")


def said(*words: str) -> str:
    result = CliRunner().invoke(app, ["chaos", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_start_list_stop_and_the_journal(server: Server) -> None:
    words = (
        "truncation",
        "-p",
        "ratio=0.5",
        "-s",
        "tenant=gold",
        "--ttl",
        "30",
        "--stop",
        "interruptions=0.5",
    )
    fault_id = said("start", *words).split(":")[0]
    wait_for(lambda: server.state()["faults"][0]["touched"])
    listed = said("list")
    assert f"{fault_id}: " in listed and "halts when: interruptions=0.5" in listed
    assert "touched" in said("stop", fault_id)
    assert "was not in force" in said("stop", fault_id)
    wait_for(lambda: server.state()["ended"][0]["reverted"]["state"] != "pending")
    assert f"{fault_id}: stopped" in said("list")
    assert "reverted: not checked" in said("list")
    told = [line.split()[2:4] for line in said("journal").splitlines() if fault_id in line]
    assert told == [["start", fault_id], ["end", fault_id], ["revert", fault_id]]
    assert [json.loads(line)["event"] for line in said("journal", "-n", "1", "--json").splitlines()] == [
        "revert"
    ]


def test_a_dry_run_and_a_preview_start_nothing(server: Server) -> None:
    told = said("start", "truncation", "-p", "ratio=0.5", "-s", "tenant=gold", "--dry-run")
    assert "truncation may be started" in told
    assert "not known whom it would reach" in said("preview", "-s", "tenant=gold")  # no engine told of any
    assert server.in_force() == []


def test_faults_that_meet_are_named(server: Server) -> None:
    first = said("start", "authority").split(":")[0]
    assert f"acts on requests with {first}" in said("start", "noise")
    assert "acts together with others, in this order: authority" in said("list")


def test_halt_and_unblock(server: Server) -> None:
    said("start", "noise")
    assert "every fault is ended" in said("halt")
    assert "blocked: by operator:ops" in said("list")
    assert "again" in said("unblock")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("noise", "--stop", "alert=typo"), "there is no alert 'typo'"),
        (("noise", "--stop", "promql=up"), "QUAVER_PROMETHEUS_URL"),
        (("noise", "-p", "sigma=50"), "sigma of at most 10"),
        (("nose",), "unknown fault 'nose'"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_refusals_say_why(words: tuple[str, ...], dry: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "start", *words, *dry])
    assert result.exit_code != 0
    assert why in str(result.exception) + result.output
