"""`quaver demo`: a real model observed, broken on purpose and caught."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from quaver.demo.plan import TOTAL_S

WIDTH = 120  # of the table in a log file


def demo(
    once: Annotated[bool, typer.Option("--once", help="End when the table is shown.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A running server with QUAVER_CHAOS=1, instead of one of our own."),
    ] = None,
    operator_key_file: Annotated[Path | None, typer.Option(help="Operator key of --target.")] = None,
    dashboard: Annotated[bool, typer.Option(help="Start the dashboard beside the server.")] = True,
    minutes: Annotated[float, typer.Option(help="What the whole run may take.", min=3)] = TOTAL_S / 60,
) -> None:
    """Start a server, calibrate it on healthy traffic, break it in four ways, and show what was caught."""
    from rich.console import Console

    from quaver.demo.control import DemoError
    from quaver.demo.main import Options, run

    if target is None:
        from quaver.cli.model import pull

        pull()
    options = Options(
        once=once,
        json_file=json_file,
        target=target,
        operator_key_file=operator_key_file,
        dashboard=dashboard,
        total_s=60.0 * minutes,
    )
    try:
        run(options, Console(width=None if sys.stdout.isatty() else WIDTH))
    except DemoError as error:
        Console(stderr=True).print(f"quaver demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped; every fault is ended.")
        raise typer.Exit(130) from None
