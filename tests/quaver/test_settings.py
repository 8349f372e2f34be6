"""Settings: one flat model of every package's, state below one folder, the README's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from quaver.settings import Settings, load_settings
from quaver.settings_table import markdown, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("QUAVER_"):
            monkeypatch.delenv(name)


def test_readme_has_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown() in readme, "run `python -m quaver.settings_table` and put its output into README.md"


def test_every_setting_is_listed_once_and_says_what_it_means() -> None:
    listed = [variable for _, variable, _, _ in rows()]
    assert sorted(listed) == sorted(f"QUAVER_{name.upper()}" for name in Settings.model_fields)
    assert all(meaning for _, _, _, meaning in rows())


def test_state_lives_below_the_state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUAVER_STATE_DIR", str(tmp_path))
    settings = load_settings()
    assert settings.keys_dir == tmp_path / "keys"
    assert settings.records_dir == tmp_path / "records"
    assert settings.baseline_file == tmp_path / "baseline.json"
    monkeypatch.setenv("QUAVER_RECORDS_DIR", str(tmp_path / "elsewhere"))
    assert load_settings().records_dir == tmp_path / "elsewhere"


def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_PORT", "99999")
    monkeypatch.setenv("QUAVER_DTYPE", "float8")
    with pytest.raises(ValueError, match=r"QUAVER_DTYPE.*QUAVER_PORT|QUAVER_PORT.*QUAVER_DTYPE"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("QUAVER_PRIORITIES", "{", "QUAVER_PRIORITIES is not JSON"),
        (
            "QUAVER_PRIORITIES",
            '{"acme": "huge"}',
            r"QUAVER_PRIORITIES\['acme'\]: .*'high', 'normal' or 'low'",
        ),
        ("QUAVER_ROUTES", "chat,search", "QUAVER_ROUTES is not JSON"),
        ("QUAVER_PAGE_SIZE", "100000", "QUAVER_PAGE_SIZE: .*QUAVER_KV_TOKENS"),
        ("QUAVER_THREADS", "100000", "QUAVER_THREADS"),
    ],
)
def test_the_variable_that_is_wrong_is_named(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^settings are not valid: {message}"):
        load_settings()
