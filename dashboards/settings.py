"""Where the engine is and with which key the dashboard reads from it."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict


class DashboardSettings(BaseSettings):
    """Environment: `QUAVER_URL`, `QUAVER_VIEWER_KEY`, `QUAVER_KEYS_DIR`, `QUAVER_STATE_DIR`,
    `QUAVER_REFRESH_S` (seconds between refreshes of the live parts)."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore")

    url: str = "http://127.0.0.1:8000"
    viewer_key: str | None = None
    keys_dir: Path | None = None
    state_dir: Path = Path("~/.local/state/quaver")
    refresh_s: float = 2.0

    def read_key(self) -> str | None:
        """Return the viewer key: the variable first, then `viewer.key` in the keys folder, else None."""
        if self.viewer_key:
            return self.viewer_key.strip()
        folder = self.keys_dir or self.state_dir / "keys"
        try:
            return (folder.expanduser() / "viewer.key").read_text().strip() or None
        except OSError:
            return None
