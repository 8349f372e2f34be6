"""`quaver alerts`: what fires, and the files Prometheus and Alertmanager need."""

from __future__ import annotations

import json
from pathlib import Path
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
    for route, why in sorted(state["evaluator"]["blind"].items()):
        typer.echo(f"blind on {route}: {why}")
    problem = state["evaluator"]["baseline_problem"]
    if problem and not state["evaluator"]["blind"]:
        typer.echo(f"blind: {problem}")
    for route, breaker in sorted(state["breaker"].items()):
        if isinstance(breaker, dict):
            typer.echo(f"breaker {route}: {breaker['state']}")


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="Where to write the four files.")],
    engine: Annotated[str, typer.Option(help="HOST:PORT that Prometheus scrapes.")] = "127.0.0.1:8000",
    alertmanager: Annotated[str, typer.Option(help="HOST:PORT of Alertmanager.")] = "127.0.0.1:9093",
    webhook_url: Annotated[
        str | None, typer.Option(help="Our receiver, as Alertmanager sees it; default: on --engine.")
    ] = None,
    webhook_key_file: Annotated[
        Path | None,
        typer.Option(help="The webhook's key, as Alertmanager sees it; default: in the keys folder."),
    ] = None,
) -> None:
    """Write rules.yml, rules_test.yml, alertmanager.yml and prometheus.yml from the alert rules."""
    from alerting.generate import write
    from alerting.rules import load_rules
    from quaver.settings import load_settings

    settings = load_settings()
    paths = write(
        folder,
        load_rules(settings.rules_file),
        webhook_url=webhook_url or f"http://{engine}/quaver/alerts/webhook",
        webhook_key_file=str(webhook_key_file or settings.keys_dir.expanduser() / "webhook.key"),
        engine=engine,
        alertmanager=alertmanager,
    )
    for path in paths:
        typer.echo(path)
