"""`chaos run` as a process of its own: what it exits with, and what it leaves in force when it is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaoslib.experiment import ensure_experiment_is_valid

from chaos.faults.registry import parse_fault
from chaos.settings import ChaosSettings
from tests.chaos.served import Server, wait_for

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "chaos" / "experiments").glob("*.yaml"))
CHAOS = Path(sys.executable).with_name("chaos")
CUT = {"kind": "truncation", "ttl_s": 300, "params": {"ratio": 0.5}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def action(func: str, **arguments: Any) -> dict[str, Any]:
    provider = {"type": "python", "module": "chaos.toolkit", "func": func, "arguments": arguments}
    return {"name": f"{func} {arguments.get('kind', '')}", "type": "action", "provider": provider}


def probe(func: str, tolerance: Any, **arguments: Any) -> dict[str, Any]:
    return action(func, **arguments) | {"type": "probe", "tolerance": tolerance}


def controls(*names: str) -> list[dict[str, Any]]:
    modules = {name: f"chaos.toolkit.controls.{name}" for name in names}
    return [{"name": n, "provider": {"type": "python", "module": m}} for n, m in modules.items()]


def command(
    server: Server, *method: dict[str, Any], use: tuple[str, ...] = ("safeguards",)
) -> dict[str, Any]:
    experiment = {
        "title": "a test",
        "description": "of ours",
        "method": [*method],
        "controls": controls(*use),
    }
    path = server.folder / "experiment.json"
    path.write_text(json.dumps(experiment))
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUAVER_")}
    own = {"PYTHONPATH": str(ROOT), "QUAVER_URL": server.url, "QUAVER_KEYS_DIR": str(server.folder)}
    words = [str(CHAOS), "--no-version-check", "--settings", str(server.folder / "none"), "run", str(path)]
    return {"args": words, "cwd": server.folder, "env": bare | own}


def run(server: Server, *method: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any]]:
    """Run an experiment to its end; return its exit status and the toolkit's journal."""
    done = subprocess.run(**command(server, *method, **more), capture_output=True, check=False, timeout=60)
    path = server.folder / "journal.json"
    assert path.exists(), done.stderr.decode()
    return done.returncode, json.loads(path.read_text())


def test_a_sound_run_passes_and_is_annotated(server: Server) -> None:
    pause = {"pauses": {"after": 0.3}}
    status, journal = run(
        server,
        action("start_fault", **CUT) | pause,
        probe("faults_in_force", 1, kind="truncation"),
        action("stop_faults", kind="truncation"),
        use=("safeguards", "annotations"),
    )
    assert (status, journal["status"]) == (0, "completed")
    assert journal["quaver"] == {"valid": True, "flaws": []}
    assert server.in_force() == []
    notes = [entry["text"] for entry in server.state()["journal"] if entry["event"] == "note"]
    assert notes[::-1] == ["experiment begins: a test", "experiment ends (completed): a test"]


def test_what_a_run_started_ends_with_it(server: Server) -> None:
    status, _ = run(server, action("start_fault", **CUT) | {"pauses": {"after": 0.3}}, use=())
    assert (status, server.in_force()) == (0, [])
    assert server.state()["ended"][0]["reason"] == "stopped"


@pytest.mark.parametrize("use", [(), ("safeguards",)], ids=["plain", "safeguards"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_fault_that_matched_nothing_fails_the_run(
    server: Server, use: tuple[str, ...], stopped: bool
) -> None:
    nobody = CUT | {"selector": {"tenant": "nobody"}}
    method = [action("start_fault", **nobody)] + [action("stop_faults")] * stopped
    status, _ = run(server, *method, use=use)
    assert status != 0
    assert server.in_force() == []


@pytest.mark.parametrize("use", [(), ("safeguards",)], ids=["plain", "safeguards"])
def test_a_refused_fault_ends_the_run_and_the_faults_before_it(server: Server, use: tuple[str, ...]) -> None:
    refused = {"kind": "noise", "ttl_s": 60, "params": {"sigma": 50}}
    method = (
        action("start_fault", **CUT),
        action("start_fault", **refused),
        action("start_fault", kind="authority", ttl_s=60),
    )
    status, journal = run(server, *method, use=use)
    assert (status, journal["status"]) == (1, "failed" if use else "interrupted")
    assert (server.in_force(), server.began()) == ([], ["truncation"])


@pytest.mark.parametrize("use", [(), ("safeguards",)], ids=["plain", "safeguards"])
@pytest.mark.parametrize(
    "changes",
    [{"ttl_s": float("nan")}, {"params": {"ratio": float("inf")}}, {"at_least": -1}, {"at_least": "many"}],
    ids=str,
)
def test_a_start_that_cannot_even_be_asked_for_fails_the_run(
    server: Server, changes: dict[str, Any], use: tuple[str, ...]
) -> None:
    code, journal = run(server, action("start_fault", **CUT | changes), use=use)
    assert code not in (0, None) and journal["status"] != "completed"
    assert server.in_force() == []


def test_a_probe_of_the_method_counts(server: Server) -> None:
    method = (
        action("start_fault", **CUT) | {"pauses": {"after": 0.2}},
        probe("alert_fires", True, name="L2", within_s=0.1),
    )
    assert run(server, *method, use=())[0] == 0  # the toolkit by itself does not look
    status, journal = run(server, *method)
    assert status == 1
    assert "alert_fires" in journal["quaver"]["flaws"][0]


def test_a_halt_in_between_interrupts_the_run(server: Server) -> None:
    method = (
        action("start_fault", **CUT) | {"pauses": {"after": 0.2}},
        action("halt"),
        action("start_fault", kind="authority", ttl_s=60),
    )
    status, journal = run(server, *method)
    assert status == 1
    assert "halted" in journal["quaver"]["flaws"][0]
    assert server.began() == ["truncation"]


@pytest.mark.parametrize("unsound", ["in force", "halted", "firing"])
def test_nothing_is_started_on_a_server_that_is_not_sound(server: Server, unsound: str) -> None:
    if unsound == "in force":
        server.call("POST", "/quaver/chaos/faults", {"kind": "noise", "ttl_s": 60})
    elif unsound == "halted":
        server.call("POST", "/quaver/chaos/halt")
    else:
        server.active.append({"name": "QuaverJointEvidence", "level": "L2", "route": "qa"})
    status, journal = run(server, action("start_fault", **CUT))
    assert (status, journal["status"]) == (1, "interrupted")
    assert "truncation" not in server.began()


WAITS = {
    "pause": [action("start_fault", **CUT) | {"pauses": {"after": 60}}],
    "probe": [action("start_fault", **CUT), probe("alert_fires", True, name="L2", within_s=60)],
    "background": [
        action("start_fault", **CUT) | {"background": True},
        probe("alert_fires", True, name="L2", within_s=60),
    ],
}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_ends_the_fault_at_once(server: Server, wait: str, signum: signal.Signals) -> None:
    again = action("start_fault", kind="authority", ttl_s=300)
    with subprocess.Popen(**command(server, *WAITS[wait], again), stderr=subprocess.PIPE) as runner:
        wait_for(lambda: server.in_force() == ["truncation"] and server.state()["faults"][0]["touched"])
        time.sleep(0.3)  # the lease is known to the runner, and it waits
        runner.send_signal(signum)
        wait_for(lambda: not server.in_force())
        if runner.poll() is None and wait == "pause":
            runner.send_signal(signum)  # the toolkit sits out a pause that its activity asked for
        _, told = runner.communicate(timeout=30)
    assert runner.returncode != 0, told.decode()
    assert server.began() == ["truncation"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_fault_starts_leaves_none(server: Server, signum: signal.Signals) -> None:
    server.slow_s = 1.0  # between the fault in force and the answer that names it
    pause = {"pauses": {"after": 0.1}}
    with subprocess.Popen(
        **command(server, action("start_fault", **CUT) | pause), stderr=subprocess.PIPE
    ) as runner:
        wait_for(lambda: server.in_force() == ["truncation"])
        runner.send_signal(signum)
        _, told = runner.communicate(timeout=30)
    assert runner.returncode != 0, told.decode()
    assert server.in_force() == []


def test_sigkill_leaves_no_fault_beyond_its_time(server: Server) -> None:
    short = CUT | {"ttl_s": 3}
    with subprocess.Popen(
        **command(server, action("start_fault", **short) | {"pauses": {"after": 60}})
    ) as run:
        wait_for(server.in_force)
        run.kill()
    assert server.in_force() == ["truncation"]
    wait_for(lambda: not server.in_force(), 10)
    assert server.state()["ended"][0]["reason"] == "expired"


def test_the_extension_is_discovered(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "deploy" / "chaostoolkit-quaver", source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    environment = os.environ | {"PYTHONPATH": f"{target}:{ROOT}"}
    words = [str(CHAOS), "--no-version-check", "discover", "--no-install", "chaostoolkit-quaver"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    found = json.loads((tmp_path / "discovery.json").read_text())["activities"]
    actions = {one["name"] for one in found if one["type"] == "action"}
    probes = {one["name"] for one in found if one["type"] == "probe"}
    assert {"start_fault", "stop_faults", "halt"} <= actions
    assert {"prometheus", "canary", "alert_fires", "nothing_fires"} <= probes
    assert all(one["doc"] for one in found)


def test_there_are_experiments() -> None:
    assert len(EXPERIMENTS) >= 5


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_packaged_experiments_are_valid_and_safe(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    ensure_experiment_is_valid(experiment)
    assert "safeguards" in {control["name"] for control in experiment["controls"]}
    steps = [step["provider"] for step in experiment["method"]]
    started = [step["arguments"] for step in steps if step["func"] == "start_fault"]
    assert started
    for fault in started:
        parse_fault(fault["kind"], fault.get("params"))
        assert fault["ttl_s"] <= ChaosSettings().chaos_max_ttl_s
    kinds = {fault["kind"] for fault in started}
    ended = [step["provider"] for step in experiment["rollbacks"]]
    assert {step["arguments"]["kind"] for step in ended} == kinds  # it ends its own kinds only
