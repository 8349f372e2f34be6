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
    assert "was over already" in said("stop", fault_id)
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


def test_a_fault_of_the_whole_process_counts_no_requests(server: Server) -> None:
    assert "strikes the whole model process" in said("start", "host_flip", "--dry-run")
    fault_id = said("start", "host_flip", "-p", "share=0.5").split(":")[0]
    told = said("list")
    assert "what: share=0.5, burst=1; whom: the whole model process" in told
    assert "a ttl of at most 900 s" in told and "in logits (nats) (≥ 0, ≤ 10)" in told
    assert said("stop", fault_id).strip() == f"{fault_id}: ended"
    begun, ended = (
        line for line in said("journal").splitlines() if fault_id in line and "revert" not in line
    )
    assert "what: share=0.5, burst=1; whom: the whole model process; ttl_s: 60" in begun
    listed = [line for line in said("list").splitlines() if fault_id in line]
    assert listed and "touched" not in begun + ended + listed[0]


def test_the_journal_tells_who_halted_once(server: Server) -> None:
    said("start", "noise", "-s", "tenant=gold")
    said("halt")
    halted = next(line for line in said("journal").splitlines() if " halt" in line)
    assert halted.endswith("halt reason: by operator:ops")
    assert halted.count("operator:ops") == 1


def test_stopping_what_never_was_is_an_error(server: Server) -> None:
    result = CliRunner().invoke(app, ["chaos", "stop", "noise-00000000"])
    assert result.exit_code == 1
    assert "never had a fault 'noise-00000000'" in str(result.exception)


@pytest.mark.parametrize("fault_id", ["", "a/b", "../halt", "?x=1", "%2F"])
def test_no_id_reaches_anything_but_faults(server: Server, fault_id: str) -> None:
    said("start", "noise")
    result = CliRunner().invoke(app, ["chaos", "stop", fault_id])
    assert "never had a fault" in str(result.exception)
    assert server.in_force() == ["noise"] and "blocked" not in said("list")


def test_names_of_tenants_and_routes_are_texts_whatever_they_look_like(server: Server) -> None:
    said("start", "noise", "-s", "tenant=5", "-s", "route=true", "-s", "share=0.5")
    (fault,) = server.state()["faults"]
    assert fault["selector"] == {"tenant": "5", "route": "true", "share": 0.5}


def test_nobody_writes_lines_of_the_journal_that_are_not_there(server: Server) -> None:
    server.call("POST", "/quaver/chaos/notes", {"text": "fine\n2026-01-01 00:00:00 halt \x1b[2J"})
    assert said("journal", "-n", "1").count("\n") == 1 and "\x1b" not in said("journal")


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
        (
            ("noise", "-p", "sigma=abc"),
            'sigma has to be a number of at least 0 and of at most 100, not "abc"',
        ),
        (
            ("noise", "-p", "sigma=NaN"),
            'sigma has to be a number of at least 0 and of at most 100, not "NaN"',
        ),
        (("noise", "-p", "sigm=2"), "noise: there is no 'sigm'; the names are sigma, from_token"),
        (("noise", "-p", "sigma=2", "-p", "sigma=3"), "sigma is given twice"),
        (("noise", "-s", "share=2"), "share has to be a number above 0 and of at most 1, not 2"),
        (("noise", "-s", "foo=1"), "selector: there is no 'foo'; the names are share, tenant, header, route"),
        (("noise", "--stop", "foo=1"), "stop: there is no 'foo'; the names are alert, promql, interruptions"),
        (
            ("noise", "-p", "sigma=1e999"),
            'sigma has to be a number of at least 0 and of at most 100, not "1e999"',
        ),
        (("noise", "--ttl", "nan"), "Invalid value for '--ttl'"),
        (("noise", "--ttl", "inf"), "Invalid value for '--ttl'"),
        (("disk_slow",), "no KV cache on disk: start the server with QUAVER_KV_DISK_DIR"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_refusals_say_why(words: tuple[str, ...], dry: tuple[str, ...], why: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "start", *words, *dry])
    assert result.exit_code != 0
    assert why in str(result.exception) + result.output
