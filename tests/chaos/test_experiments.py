"""A packaged experiment on a real server and model, its waits cut short: from `chaos run` to its exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.quaver.server import Server

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
CHAOS = Path(sys.executable).with_name("chaos")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "state")
    yield server
    assert server.stop() == 0


def hurried(name: str, **load: Any) -> dict[str, Any]:
    """The experiment with pauses of half a second and another load."""
    experiment = yaml.safe_load((ROOT / "chaos" / "experiments" / f"{name}.yaml").read_text())
    for step in experiment["method"]:
        if "pauses" in step:
            step["pauses"] = dict.fromkeys(step["pauses"], 0.5)
    for control in experiment["controls"]:
        if control["name"] == "load":
            control["provider"]["arguments"] |= load
    return dict(experiment)


def test_keys_out_of_step_miss_facts_until_they_are_in_step_again(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps(hurried("kv_misalignment", users=2, warm_up_s=1)))
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUAVER_")}
    own = {"PYTHONPATH": str(ROOT), "QUAVER_URL": server.url, "QUAVER_STATE_DIR": str(server.state)}
    done = subprocess.run(
        [CHAOS, "--no-version-check", "--settings", "none", "run", path],
        cwd=tmp_path,
        env=bare | own,
        capture_output=True,
        check=False,
        timeout=90,
    )
    journal = json.loads((tmp_path / "journal.json").read_text())
    assert done.returncode == 0, journal["quaver"]
    assert (journal["status"], journal["deviated"], journal["quaver"]["valid"]) == ("completed", False, True)
    told = {step["activity"]["name"]: step.get("output") for step in journal["run"]}
    assert told["the known question is answered otherwise"] == "differs"
    assert told["facts are missed"].startswith("harmed: facts failed ")
    before, after = (
        {probe["activity"]["name"]: probe["output"] for probe in journal["steady_states"][when]["probes"]}
        for when in ("before", "after")
    )
    assert after["the known question is answered as ever"] == "verified"
    assert min(s["facts of a passage are found in it"] for s in (before, after)) >= 0.75
    state = server.call("GET", "/quaver/chaos").json()
    assert state["faults"] == []
    assert [(f["kind"], f["reason"], f["reverted"]["state"]) for f in state["ended"]] == [
        ("kv_roll", "stopped", "verified")
    ]
