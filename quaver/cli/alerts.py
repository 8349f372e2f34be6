"""`quaver alerts`: what fires, and the files Prometheus and Alertmanager need."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, call, read_key

app = typer.Typer(
    help="List alerts, explain a response, see what canaries say, try rules on records, compare baselines; "
    "generate the files for Prometheus and Alertmanager.",
    no_args_is_help=True,
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
    for route, evidence in sorted(state["evaluator"]["routes"].items()):
        if lost := evidence.get("degraded_recent", 0):
            typer.echo(
                f"{route}: telemetry lost part of {lost} of the last 50 responses; "
                "see quaver_telemetry_dropped_total"
            )
    problem = state["evaluator"]["baseline_problem"]
    if problem and not state["evaluator"]["blind"]:
        typer.echo(f"blind: {problem}")
    for route in state["evaluator"]["too_calm"]:
        typer.echo(
            f"{route}: answers are surer than the baseline's; look at some, then `quaver calibrate` again"
        )
    for route, breaker in sorted(state["breaker"].items()):
        if isinstance(breaker, dict):
            typer.echo(f"breaker {route}: {breaker['state']}")


@app.command()
def canaries(
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Show what the known prompts say: the evidence on each route, and the latest answers."""
    state = call("GET", url, "/quaver/canaries", read_key("viewer", key_file))
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    every = state["every_s"]
    asked = f"one every {every:g} s" if every else "none is asked: QUAVER_CANARY_EVERY_S is 0"
    typer.echo(f"{len(state['canaries'])} canaries, {asked}")
    if state["why_not"]:
        typer.echo(f"not in use: {state['why_not']}")
    for one in state["guarded"]:
        fires = ", fires" if one["firing"] else ""
        typer.echo(f"{one['route']} ({one['tenant']}): ln evidence {one['evidence_log']:.2f}{fires}")
    if state["recent"]:
        typer.echo(
            "the latest, with their score: -ln of the share of healthy answers that are as far off; what "
            "exceeds a limit counts as evidence"
        )
    for seen in state["recent"][:10]:
        time = datetime.fromtimestamp(seen["time"], UTC).isoformat(timespec="seconds")
        failed = ", ".join(name for name, test in seen["tests"].items() if test) or "healthy"
        cache = "cached" if seen["cached"] else "uncached"
        answer = "right" if seen["right"] else "wrong"
        whom = f"{seen['route']} ({seen['tenant']})"
        typer.echo(
            f"  {time}  {whom:24}{seen['canary']:24}{cache:10}{answer:7}{seen['score']:8.2f}  {failed}"
        )


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


@app.command()
def backtest(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The records' folder; default: QUAVER_RECORDS_DIR.")
    ] = None,
    rules_file: Annotated[
        Path | None, typer.Option("--rules", help="Rules to try; default: those in force.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset that pages; default: the rules'.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Baseline file; default: the one in force.")] = None,
    hours: Annotated[
        float | None, typer.Option(help="Only what ended in the last so many hours.", min=0, max=1e6)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Try rules on the recorded responses: which alerts would have fired, how often, on which route."""
    import time

    import msgspec

    from alerting.backtest import backtest as run
    from alerting.baseline import load
    from alerting.rules import load_rules
    from quaver.settings import load_settings

    settings = load_settings()
    rules = load_rules(rules_file or settings.rules_file)
    folder = (folder or settings.records_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"no records folder {folder}; --dir names another")
    path = baseline or _baseline_file()
    known = load(path) if baseline is not None or path.exists() else None
    since = None if hours is None else time.time() - 3600 * hours
    name = preset or settings.alert_preset or rules.default
    report = run(folder, rules, name, known, since=since)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    if not report.routes:
        typer.echo("no responses are recorded that this baseline is about")
    for route, seen in report.routes.items():
        word = "response" if seen.responses == 1 else "responses"
        l1 = ", ".join(f"{count} by {preset}" for preset, count in seen.l1.items())
        typer.echo(f"{route}: {seen.responses} {word}, {seen.interrupted} broken off; L1: {l1}")
        for alert, count in sorted(seen.alerts.items()):
            typer.echo(f"  {alert} would have fired {count} {'time' if count == 1 else 'times'}")
        if seen.blind:
            typer.echo(f"  blind: {seen.blind}")
    for fired in report.fired:
        typer.echo(f"{fired.time} {fired.level} {fired.name} on {fired.route}, response {fired.responses}")


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Id of the request: header x-request-id of its answer.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The records' folder; default: QUAVER_RECORDS_DIR.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Baseline file; default: the one in force.")] = None,
    causes: Annotated[Path | None, typer.Option(help="Patterns; default: the packaged causes.yaml.")] = None,
) -> None:
    """Name the causes that the signals of one recorded response point to, with the evidence."""
    from alerting.baseline import load
    from alerting.causes import load_causes
    from alerting.recorded import explain_recorded
    from quaver.settings import load_settings

    folder = (folder or load_settings().records_dir).expanduser()
    known = load(baseline or _baseline_file())
    found = explain_recorded(folder, request_id, known, load_causes(causes))
    for cause in found:
        evidence = ", ".join(f"{name} {value:g}" for name, value in cause.evidence.items())
        typer.echo(f"{cause.name}: {cause.cause} ({evidence}); look at {cause.look_at}")
    if not found:
        typer.echo("no pattern fits")


baseline_app = typer.Typer(help="Look at baselines and compare them.", no_args_is_help=True)
app.add_typer(baseline_app, name="baseline")


@baseline_app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="Baseline file; default: the one in force.")] = None,
) -> None:
    """Print what a baseline is of and how often health exceeds its limits, as JSON."""
    from alerting.baseline import load
    from alerting.statistics import BANDS

    summary = load(file or _baseline_file()).summary()
    typer.echo(json.dumps({"bands": BANDS} | summary, indent=2))


@baseline_app.command()
def diff(
    before: Annotated[
        Path | None, typer.Argument(help="Earlier baseline; default: the latest that was replaced.")
    ] = None,
    after: Annotated[Path | None, typer.Argument(help="Later baseline; default: the one in force.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole comparison as JSON.")] = False,
) -> None:
    """Show which statistics of healthy responses moved from one baseline to another."""
    import msgspec

    from alerting.baseline import archived, load
    from alerting.compare import compare
    from alerting.statistics import BANDS

    after = after or _baseline_file()
    if before is None and after.exists():
        earlier = archived(after)
        if not earlier:
            raise FileNotFoundError(f"{after} has replaced no other yet; name two files")
        before = earlier[-1]
    later = load(after)
    found = compare(load(before or after), later)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    for note in found.notes:
        typer.echo(note)
    for title, names in (("gone", found.gone), ("new", found.new)):
        if names:
            typer.echo(f"{title}: {', '.join(names)}")
    bands = [
        f"{band}: {what}" for band, what in BANDS.items() if any(s.band == band for s in found.statistics)
    ]
    if bands:
        typer.echo(f"bands: {', '.join(bands)}")
    for one in found.statistics:
        typer.echo(
            f"{'moved ' if one.moved else '      '}{one.route}/{one.band} {one.statistic}: "
            f"median {one.before:.4g} → {one.after:.4g}, distance {one.distance:.2f}"
        )


def _baseline_file() -> Path:
    from quaver.settings import load_settings

    settings = load_settings()
    return (settings.baseline_file or settings.state_dir / "baseline.json").expanduser()
