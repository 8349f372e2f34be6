"""`quaver alerts`: what fires, and the files Prometheus and Alertmanager need."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, call, read_key

app = typer.Typer(
    help="List alerts; generate the files for Prometheus and Alertmanager.", no_args_is_help=True
)


@app.command("list")
def list_alerts(
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """List the alerts that fire, those that fired lately, and the breaker of each route."""
    state = call("GET", url, "/quaver/alerts", read_key("viewer", key_file))
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    for title, alerts in (("firing", state["active"]), ("lately", state["history"])):
        typer.echo(f"{title}:" if alerts else f"{title}: none")
        for alert in alerts:
            ends = f" to {alert['endsAt']}" if alert.get("endsAt") else ""
            typer.echo(
                f"  {alert['level']} {alert['name']} on {alert['route']}, from {alert['startsAt']}{ends}"
            )
    for route, breaker in sorted(state["breaker"].items()):
        if isinstance(breaker, dict):
            typer.echo(f"breaker {route}: {breaker['state']}")
