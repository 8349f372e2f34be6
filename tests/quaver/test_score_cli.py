"""`quaver chaos score` refuses what could not be written before it computes for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quaver.cli import app


@pytest.mark.parametrize("option", ["--json", "--html", "--junit"])
@pytest.mark.parametrize(("name", "why"), [("nowhere/card", "there is no folder"), (".", "is a folder")])
def test_what_cannot_be_written_is_said_at_once(option: str, name: str, why: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["chaos", "score", option, str(tmp_path / name)])
    assert result.exit_code == 2
    assert why in result.output
