"""`quaver serve`."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="QUAVER_HOST or 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.", show_default="QUAVER_PORT or 8000")
    ] = None,
) -> None:
    """Serve the model: OpenAI-compatible API, signals, alerts, chaos. Ctrl-C ends it.

    Everything else is set by QUAVER_* variables; the README has the table.
    """
    import os

    from quaver.serve import supervise

    if host is not None:
        os.environ["QUAVER_HOST"] = host
    if port is not None:
        os.environ["QUAVER_PORT"] = str(port)
    raise typer.Exit(supervise())
