"""What `quaver quality` refuses before it asks anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quaver.cli import app
from tests.chaos.served import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("state"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def keys(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_URL", server.url)
    for role in ("CLIENT", "OPERATOR"):
        monkeypatch.setenv(f"QUAVER_{role}_KEY", "key")


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["quality", *words])
    assert result.exit_code != 0
    return f"{result.exception} {result.output}"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-p", "sigma=2"), "give --fault too"),
        (("--probe", "nope"), "there is no probe 'nope'; give some of facts"),
        (("--against", "/nowhere.json"), "cannot read /nowhere.json: No such file"),
        (("--fault", "noise", "-p", "sigma=1", "-p", "sigma=2"), "sigma is given twice"),
        (("--fault", "gremlin"), "unknown fault 'gremlin'"),
        (("--fault", "host_flip"), "strikes the whole process, not one route: ask with --json clean.json"),
    ],
)
def test_it_says_what_is_wrong(words: tuple[str, ...], why: str) -> None:
    assert why in refused(*words)


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", '{"replies": [], "rates": {"facts": 1}}'])
def test_a_file_that_is_no_result_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cal.log"
    file.write_text(text)
    assert f"{file} is not a result of `quaver quality`" in refused("--against", str(file))
