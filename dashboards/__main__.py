"""`python -m dashboards [streamlit flags]`: the dashboard with its theme, from a checkout or a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = {
    "theme.base": str(HERE / "theme.toml"),
    "browser.gatherUsageStats": "false",
    "server.headless": "true",
    "server.enableAgentApi": "false",
    "server.fileWatcherType": "none",
    "server.maxUploadSize": "1",
    "client.toolbarMode": "viewer",
    "client.showErrorDetails": "none",
}


def arguments(port: int = 8501, address: str = "127.0.0.1") -> list[str]:
    """Return the arguments of `streamlit run` for this dashboard, theme and flags included."""
    flags = {"server.port": str(port), "server.address": address, **FLAGS}
    return [str(HERE / "app.py"), *(f"--{name}={value}" for name, value in flags.items())]


def command(port: int = 8501, address: str = "127.0.0.1") -> list[str]:
    """Return a command that starts the dashboard as a child process."""
    return [sys.executable, "-m", "dashboards", f"--server.port={port}", f"--server.address={address}"]


def run(argv: list[str] | None = None) -> None:
    """Run the dashboard until it is stopped. Later flags of `argv` win over ours."""
    try:
        from streamlit.web import cli  # noqa: PLC0415
    except ModuleNotFoundError:
        sys.exit("The dashboard needs its extra: pip install 'quaver[dashboard]'")
    sys.argv = ["streamlit", "run", *arguments(), *(sys.argv[1:] if argv is None else argv)]
    cli.main()


if __name__ == "__main__":
    run()
