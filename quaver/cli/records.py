"""`quaver records`: read what was recorded, with SQL or one request at a time."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Read the recorded requests, tokens and layers.", no_args_is_help=True)
