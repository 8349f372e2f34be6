"""What the commands refuse before they ask a server, and what they say when none answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quaver.cli import app
from quaver.cli.calibrate import _refuse_too_few, _tell_canaries
from quaver.cli.http import ServerError, call


@pytest.fixture
def key(tmp_path: Path) -> str:
    file = tmp_path / "operator.key"
    file.write_text("key")
    return str(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--responses", "60"], "ask for 108 or more"),
        (["--responses", "79", "--temperature", "0.7"], None),
        (["--responses", "100", "--temperature", "0", "--temperature", "0", "--temperature", "1"], "for 162"),
        (["--responses", "60", "--temperature", "0.2", "--temperature", "0.4"], None),
        (["--canary-rounds", "3"], "0 for no canaries, else 8"),
    ],
)
def test_a_calibration_that_cannot_end_well_is_not_begun(
    options: list[str], said: str | None, key: str
) -> None:
    ended = CliRunner().invoke(
        app, ["calibrate", *options, "--key-file", key, "--url", "http://127.0.0.1:9"], env={"COLUMNS": "300"}
    )
    if said is None:
        assert isinstance(ended.exception, ServerError)
    else:
        assert ended.exit_code == 2
        assert said in " ".join(ended.stderr.replace("│", " ").split())


def test_enough_is_enough() -> None:
    _refuse_too_few(108, (0.0, 1.0), 8)
    _refuse_too_few(640, (0.0, 1.0), 0)


@pytest.mark.parametrize(("limit", "warned"), [(0.08, False), (0.9, True)])
def test_canaries_that_differ_in_health_are_a_warning(
    limit: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell_canaries({"canaries": ["a"] * 24, "baseline": {"limits": {"entropy": limit}}})
    told = capsys.readouterr()
    assert f"within {limit:.2f} nats" in told.out
    assert ("nothing else running" in told.err) == warned


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:8000", "http://", "ftp://x", "http://x:port"])
def test_what_is_no_url_is_called_so(url: str, key: str) -> None:
    with pytest.raises(ServerError, match="is no URL; --url or QUAVER_URL"):
        call("GET", url, "/quaver/alerts", "key")
    for words in (["calibrate"], ["chaos", "list"], ["quality"]):
        ended = CliRunner().invoke(app, [*words, "--key-file", key, "--url", url])
        assert "is no URL" in str(ended.exception)


def test_no_answer_names_the_ways_to_another_server() -> None:
    with pytest.raises(ServerError, match=r"--url or QUAVER_URL .*QUAVER_PORT"):
        call("GET", "http://127.0.0.1:9", "/quaver/alerts", "key")


def test_hours_before_now_and_a_missing_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_STATE_DIR", str(tmp_path))
    for hours in ("-1", "inf", "nan"):
        assert CliRunner().invoke(app, ["alerts", "backtest", "--hours", hours]).exit_code == 2
    (tmp_path / "records").mkdir()
    ended = CliRunner().invoke(app, ["alerts", "backtest", "--baseline", str(tmp_path / "none")])
    assert "cannot read the baseline" in str(ended.exception)
    for words in (["show"], ["diff"]):
        ended = CliRunner().invoke(app, ["alerts", "baseline", *words])
        assert "`quaver calibrate` makes one" in str(ended.exception)
