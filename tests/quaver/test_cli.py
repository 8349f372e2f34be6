"""The command line: what the documentation shows exists, help is fast, errors are one line."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from quaver.cli import app

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def quaver(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quaver", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin", **env}
    )


def documented() -> Iterator[str]:
    for page in DOCS:
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
            for line in block.splitlines():
                found = re.match(r"(?:[A-Z_]+=\S+ )*(quaver .*)", line)
                if found:
                    yield found[1]


def commands() -> Iterator[list[str]]:
    def walk(command: object, path: list[str]) -> Iterator[list[str]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield path
        for name, child in (children or {}).items():
            yield from walk(child, [*path, name])

    yield from walk(get_command(app), [])


@pytest.mark.parametrize("line", sorted(set(documented())))
def test_documented_command_exists(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    while getattr(command, "commands", None):
        assert words, f"{line!r} names a group, not a command"
        assert words[0] in command.commands, f"{line!r}: no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= options | {"--help"}, f"{line!r}: {used - options}"
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if any(argument.required for argument in arguments):
        assert [word for word in words if not word.startswith("-")], f"{line!r} lacks an argument"


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_says_what_it_does(path: list[str]) -> None:
    command = get_command(app)
    for name in path:
        command = command.commands[name]
    assert command.help
    for parameter in command.params:
        assert parameter.name == "help" or getattr(parameter, "help", None), parameter.name


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from quaver.cli import app; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    shown = quaver("--help")
    assert shown.returncode == 0
    assert {"serve", "model", "doctor", "chaos", "alerts", "records"} <= set(shown.stdout.split())


def test_errors_are_one_line_without_traceback(tmp_path: Path) -> None:
    state = {"HOME": str(tmp_path), "QUAVER_STATE_DIR": str(tmp_path)}
    failed = quaver("chaos", "list", **state)
    assert failed.returncode == 1
    assert "operator.key" in failed.stderr and "Traceback" not in failed.stderr
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "operator.key").write_text("qv-operator-0000000000000000\n")
    failed = quaver("chaos", "list", "--url", "http://127.0.0.1:9", **state)
    assert failed.returncode == 1
    assert "is `quaver serve` running?" in failed.stderr and len(failed.stderr.splitlines()) == 1
    wrong = quaver("doctor", QUAVER_PORT="many", **state)
    assert wrong.returncode == 1
    assert "QUAVER_PORT" in wrong.stderr and "Traceback" not in wrong.stderr


def test_what_was_recorded_is_shown_as_it_is(tmp_path: Path) -> None:
    sql = "SELECT '[red]x[/red] [/y] :smile:' AS \"[b]\""
    shown = quaver("records", "query", sql, "--dir", str(tmp_path), HOME=str(tmp_path))
    assert shown.stdout.split("\n")[0].strip() == "[b]"
    assert "[red]x[/red] [/y] :smile:" in shown.stdout


@pytest.mark.parametrize("words", [["query"], ["show", "r1"]])
def test_a_missing_records_folder_is_said(words: list[str], tmp_path: Path) -> None:
    failed = quaver("records", *words, HOME=str(tmp_path))
    assert failed.returncode == 1
    assert "is QUAVER_STATE_DIR that of the server?" in failed.stderr and "Traceback" not in failed.stderr


def test_chaos_list_shows_parameters_and_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos.client import ChaosClient
    from chaos.faults.registry import describe

    fault = {
        "fault_id": "noise-1",
        "remaining_s": 9.0,
        "touched": 3,
        "params": {"sigma": 2.0, "from_token": 0},
        "selector": {"share": 0.5, "route": "search"},
    }
    lever = {"blocked": False, "reason": None}
    caps = {"faults": 4, "ttl_s": 600.0, "share": 1.0}
    state = {"enabled": True, "lever": lever, "faults": [fault], "kinds": describe(), "caps": caps}
    monkeypatch.setattr(ChaosClient, "status", lambda self: state)
    monkeypatch.setenv("QUAVER_OPERATOR_KEY", "k")
    shown = CliRunner().invoke(app, ["chaos", "list"])
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.output.splitlines()]
    assert "what: sigma=2.0, from_token=0; whom: share=0.5, route=search" in lines
    assert (
        "allowed here: 4 faults at a time, a ttl of at most 600 s, a share of at most 1 of the requests"
        in lines
    )
    assert any(line.startswith("-p sigma=2.0: standard deviation, in logits (nats)") for line in lines)
    assert any("(middle, needle, prefix, suffix)" in line for line in lines)


def test_version_is_a_command_and_an_option() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output == CliRunner().invoke(app, ["version"]).output != ""


def test_traceback_on_request(tmp_path: Path) -> None:
    failed = quaver("doctor", HOME=str(tmp_path), QUAVER_PORT="many", QUAVER_DEBUG="1")
    assert "Traceback" in failed.stderr


def test_pairs_are_json_where_they_parse() -> None:
    from quaver.cli.chaos import _pairs

    assert _pairs(["sigma=2", "side=prefix", "harmless=true", "header=x-a=b"], "-p") == {
        "sigma": 2,
        "side": "prefix",
        "harmless": True,
        "header": "x-a=b",
    }
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        _pairs(["sigma"], "-p")
