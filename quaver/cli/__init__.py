"""The `quaver` command. One file a command group; heavy imports stay inside the commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from quaver.cli import (
    alerts,
    calibrate,
    chaos,
    dashboard,
    demo,
    doctor,
    load,
    model,
    quality,
    records,
    score,
    serve,
    version,
)

app = typer.Typer(
    name="quaver",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        version.version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Observability and chaos engineering for LLM inference."""


app.command("serve")(serve.serve)
app.add_typer(model.app, name="model")
app.command("doctor")(doctor.doctor)
app.add_typer(chaos.app, name="chaos")
chaos.app.command("score")(score.score)
app.add_typer(alerts.app, name="alerts")
app.add_typer(records.app, name="records")
app.command("calibrate")(calibrate.calibrate)
app.command("dashboard")(dashboard.dashboard)
app.command("demo")(demo.demo)
app.command("load")(load.load)
app.command("quality")(quality.quality)
app.command("version")(version.version)


def main() -> None:
    """Run the command; what goes wrong is one line on stderr and exit status 1.

    With `QUAVER_DEBUG` set the traceback is shown as well.
    """
    try:
        app()
    except Exception as error:
        if os.environ.get("QUAVER_DEBUG"):
            raise
        text = str(error).strip() or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            text = f"cannot use {error.filename}: {error.strerror}"
        print(f"quaver: {text}", file=sys.stderr)
        raise SystemExit(1) from None
