"""`quaver dashboard`."""

from __future__ import annotations

from typing import Annotated

import typer


def dashboard(
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8501,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Run the dashboard of the server at QUAVER_URL. It reads with the viewer key and stores no other."""
    from dashboards.__main__ import run

    run([f"--server.port={port}", f"--server.address={address}"])
