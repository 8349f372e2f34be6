from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from alerting import generate
from alerting.rules import load_rules

CHECKED_IN = Path(generate.__file__).with_name("generated")


def run(tool: str, *arguments: str, cwd: Path) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not on PATH")
    done = subprocess.run([path, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def files(tmp_path: Path) -> Path:
    generate.write(tmp_path)
    return tmp_path


def test_checked_in_copy_is_up_to_date(files: Path) -> None:
    for path in files.iterdir():
        assert (CHECKED_IN / path.name).read_text() == path.read_text(), (
            "run: python -c 'from pathlib import Path; from alerting.generate import write; "
            'write(Path("alerting/generated"))\''
        )
    assert {p.name for p in CHECKED_IN.iterdir()} == {p.name for p in files.iterdir()}


def test_promtool_accepts_the_rules_and_they_pass_their_tests(files: Path) -> None:
    assert "SUCCESS" in run("promtool", "check", "rules", "rules.yml", cwd=files)
    run("promtool", "test", "rules", "rules_test.yml", cwd=files)
    run("promtool", "check", "config", "prometheus.yml", cwd=files)


def test_amtool_accepts_the_configuration_and_routes_by_team(files: Path) -> None:
    run("amtool", "check-config", "alertmanager.yml", cwd=files)
    for labels, receiver in (
        (["team=prompt-eng", "alertname=PromptAccuracyDrop"], "quaver-prompt-eng"),
        (["team=mlops", "alertname=QuaverLowConfidenceRate"], "quaver-mlops"),
        (["team=sre", "alertname=QuaverUsersLeaving"], "quaver-sre"),
        (["team=sre", "alertname=QuaverWatchdog"], "quaver-watchdog"),
        (["alertname=Other"], "quaver-sre"),
    ):
        out = run("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", *labels, cwd=files)
        assert out.strip() == receiver


def test_addresses_and_key_file_are_the_callers(tmp_path: Path) -> None:
    generate.write(
        tmp_path,
        webhook_url="http://h:1/quaver/alerts/webhook",
        webhook_key_file="/k/webhook.key",
        engine="e:2",
        alertmanager="a:3",
    )
    config = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())
    for receiver in config["receivers"]:
        hook = receiver["webhook_configs"][0]
        assert hook["url"] == "http://h:1/quaver/alerts/webhook"
        assert hook["http_config"]["authorization"]["credentials_file"] == "/k/webhook.key"
    prometheus = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["e:2"]}]
    assert prometheus["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["a:3"]}]


def test_names_and_numbers_come_from_the_rules(tmp_path: Path) -> None:
    rules = load_rules()
    renamed = rules.model_copy(
        update={
            "alerts": rules.alerts.model_copy(
                update={"l1_rate": rules.alerts.l1_rate.model_copy(update={"name": "Mine", "team": "sre"})}
            ),
            "slo": rules.slo.model_copy(update={"accuracy": 0.5, "latency_p95_s": 2.5}),
        }
    )
    generate.write(tmp_path, renamed)
    text = (tmp_path / "rules.yml").read_text()
    assert "alert: Mine" in text
    assert "< 0.5" in text
    assert "> 2.5" in text
    if shutil.which("promtool"):
        run("promtool", "test", "rules", "rules_test.yml", cwd=tmp_path)
