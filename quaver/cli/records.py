"""`quaver records`: read what was recorded. Works beside a running server, and after a crash."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Read the recorded requests, tokens and layers.", no_args_is_help=True)

_TIMES = {"time", "started", "ended"}  # columns of unix seconds
_LATEST = (
    "SELECT ended, request_id, route, outcome, completion_tokens AS tokens, faults, alerts "
    "FROM requests WHERE {} ORDER BY ended DESC LIMIT 20"
)

Folder = Annotated[
    Path | None, typer.Option("--dir", help="The records' folder; default: QUAVER_RECORDS_DIR.")
]


@app.command()
def query(
    sql: Annotated[
        str | None, typer.Argument(help="DuckDB SQL over the views `requests`, `tokens` and `layers`.")
    ] = None,
    folder: Folder = None,
    canaries: Annotated[
        bool, typer.Option("--canaries", help="Without SQL: list the canaries instead of users' requests.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
) -> None:
    """Run one SQL query over the records; without one, list the latest requests of users.

    In a query of your own `WHERE NOT canary` leaves out what the server asked itself.
    """
    from telemetry.query import select

    if sql is None:
        sql = _LATEST.format("canary" if canaries else "NOT canary")
    elif canaries:
        raise typer.BadParameter("goes without SQL; yours can say WHERE canary", param_hint="--canaries")
    rows = select(_folder(folder), sql)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, default=str))
    elif rows:
        _print_table(rows)
    else:
        typer.echo("no rows")


@app.command()
def show(
    request_id: Annotated[str, typer.Argument(help="Id of the request: header x-request-id of its answer.")],
    folder: Folder = None,
) -> None:
    """Print everything recorded of one request as JSON: request, tokens, layers."""
    from telemetry.query import request

    found = request(_folder(folder), request_id)
    if found is None:
        raise LookupError(f"nothing is recorded of {request_id}")
    typer.echo(json.dumps(found, default=str, indent=2))


def _folder(folder: Path | None) -> Path:
    """Return the folder to read; raises FileNotFoundError when there is none."""
    from quaver.settings import load_settings

    folder = (folder or load_settings().records_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no records folder {folder}; is QUAVER_STATE_DIR that of the server? --dir names another folder"
        )
    return folder


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False, highlight=False)  # what was recorded is no markup
    table = Table(*rows[0], box=None, header_style="bold")
    for row in rows:
        table.add_row(*(_shown(name, value) for name, value in row.items()))
    if not console.is_terminal:
        console.width = 10_000  # for grep and friends: a row is a line
    console.print(table)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in _TIMES and isinstance(value, float):
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
    return f"{value:.6g}" if isinstance(value, float) else str(value)
