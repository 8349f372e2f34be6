from __future__ import annotations

from pathlib import Path

import pytest
from chaoslib.exceptions import ActivityFailed

from chaos import toolkit


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("URL", "STATE_DIR", "KEYS_DIR", "OPERATOR_KEY_FILE"):
        monkeypatch.delenv(f"QUAVER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        (None, "", ".local/state/quaver/keys"),
        ("QUAVER_STATE_DIR", "~/state", "state/keys"),
        ("QUAVER_KEYS_DIR", "~/keys", "keys"),
        ("QUAVER_OPERATOR_KEY_FILE", "~/own/operator.key", "own"),
    ],
)
def test_the_key_is_found_by_the_environment(
    variable: str | None, value: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("QUAVER_URL", "http://127.0.0.1:9")
    file = tmp_path / folder / "operator.key"
    with pytest.raises(ActivityFailed, match=f"{file}.*QUAVER_OPERATOR_KEY_FILE"):
        toolkit.faults_in_force()
    file.parent.mkdir(parents=True)
    file.write_text("key\n")
    with pytest.raises(ActivityFailed, match="refused"):  # the key is read: the connection fails
        toolkit.faults_in_force()
