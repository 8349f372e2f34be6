"""`quaver version`."""

from __future__ import annotations

from importlib.metadata import version as installed

import typer


def version() -> None:
    """Print the version of Quaver."""
    typer.echo(installed("quaver"))
