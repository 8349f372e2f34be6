"""`quaver chaos`: start, watch and end faults on a running server."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, ServerError, no_answer, read_key

if TYPE_CHECKING:
    from chaos.client import ChaosClient

_SHOWN = 5  # faults that have ended
_TOLD = (
    "ttl_s",
    "reason",
    "touched",
    "state",
    "why",
    "text",
    "lost",
    "unreadable_lines",
    "by",
)

app = typer.Typer(
    help="Start, watch and end faults on a running server (needs its switch QUAVER_CHAOS=1); score what "
    "detection sees of every fault.",
    no_args_is_help=True,
)


@contextmanager
def _operator(url: str, key_file: Path | None) -> Iterator[ChaosClient]:
    import httpx

    from chaos.client import ChaosClient

    try:
        with ChaosClient(url, read_key("operator", key_file)) as client:
            yield client
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise no_answer(url, error) from None


def _pairs(pairs: list[str], option: str, numbers: Collection[str] | None = None) -> dict[str, Any]:
    """Turn `name=value` texts into a dict; values are JSON where they parse as it, else text.

    With `numbers` all other names are texts, whatever they look like. No name is given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint=option)
        found[name] = value
        if numbers is not None and name not in numbers:
            continue
        with suppress(ValueError):
            found[name] = json.loads(value, parse_constant=_finite, parse_float=_finite)
    return found


def _finite(text: str) -> float:
    """Return a number of JSON; raises ValueError on what is beyond all, as `NaN` and `1e999`."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select", "-s", help="Whom it strikes: share=0.5, tenant=…, route=…, header=x-name=value."
    ),
]


@app.command()
def start(
    kind: Annotated[str, typer.Argument(help="A kind from `quaver chaos list`.")],
    param: Annotated[list[str] | None, typer.Option("--param", "-p", help="NAME=VALUE of the fault.")] = None,
    select: Select = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            help="Halt chaos when alert=NAME or alert=L2 fires, promql=EXPRESSION holds, or readers break "
            "off more than interruptions=SHARE of the answers.",
        ),
    ] = None,
    ttl: Annotated[
        float, typer.Option(help="Seconds until the fault ends by itself.", min=0, max=1e9)
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random in the fault.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Start nothing; tell whom it would reach.")
    ] = False,
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
) -> None:
    """Start a fault; prints its id and when it ends by itself."""
    params, selector = _pairs(param or [], "--param"), _pairs(select or [], "--select", {"share"})
    conditions = _pairs(stop or [], "--stop", {"interruptions"})
    with _operator(url, key_file) as server:
        lease = server.start(kind, ttl, params, selector, seed=seed, stop=conditions, dry=dry_run)
    if dry_run:
        fault = lease["fault"]
        typer.echo(f"{kind} may be started: {_given(fault['params'])}")
        typer.echo(_reach(lease))
    else:
        typer.echo(f"{lease['fault_id']}: in force, ends by itself in {lease['remaining_s']:.0f} s")
    others = [
        fault_id for fault_id in lease["chain"] if fault_id != (lease.get("fault") or lease)["fault_id"]
    ]
    if others:
        typer.echo(f"acts on requests with {', '.join(others)}, in the order of `quaver chaos list`")


@app.command()
def preview(select: Select = None, url: URL = DEFAULT_URL, key_file: KeyFile = None) -> None:
    """Tell how many of the latest requests a selector would have reached."""
    with _operator(url, key_file) as server:
        typer.echo(_reach(server.preview(_pairs(select or [], "--select", {"share"}))))


def _reach(seen: dict[str, Any]) -> str:
    if seen.get("fault", {}).get("scope") == "process":
        return "it strikes the whole model process, whatever the requests"
    if not seen["recent"]:
        return "no request has been seen so far, so it is not known whom it would reach"
    return (
        f"of the latest {seen['recent']} requests {seen['admitted']} match, "
        f"and about {seen['expected']:.0f} would be struck"
    )


@app.command("list")
def list_faults(
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """List the faults in force and the kinds that can be started."""
    with _operator(url, key_file) as server:
        state = server.status()
    if as_json:
        typer.echo(json.dumps(state, indent=2))
        return
    typer.echo("chaos is " + ("on" if state["enabled"] else "off (start the server with QUAVER_CHAOS=1)"))
    if state["lever"]["blocked"]:
        typer.echo(f"blocked: {state['lever']['reason']}; `quaver chaos unblock` lifts it")
    typer.echo("in force:" if state["faults"] else "in force: none")
    for fault in state["faults"]:
        typer.echo(f"  {fault['fault_id']}: {fault['remaining_s']:.0f} s left{_touched(fault)}")
        typer.echo(f"    {_aim(fault)}")
        if fault.get("stop"):
            typer.echo(f"    halts when: {_given(fault['stop'])}")
        if len(fault.get("chain", ())) > 1:
            typer.echo(f"    acts together with others, in this order: {', '.join(fault['chain'])}")
    if state.get("stop"):
        typer.echo(f"every fault halts when: {_given(state['stop'])}")
    if state.get("ended"):
        typer.echo("ended:")
    for fault in state.get("ended", ())[:_SHOWN]:
        typer.echo(f"  {fault['fault_id']}: {fault['reason']}{_touched(fault)}")
        typer.echo(f"    {_revert(fault['reverted'])}")
    caps = state["caps"]
    typer.echo(
        f"allowed here: {caps['faults']} faults at a time, a ttl of at most {caps['ttl_s']:g} s, "
        f"a share of at most {caps['share']:g} of the requests"
    )
    typer.echo("kinds:")
    for kind in state["kinds"]:
        typer.echo(f"  {kind['kind']}: {kind['description']}")
        for name, schema in kind["params"]["properties"].items():
            typer.echo(f"    -p {name}={_default(schema)}: {schema.get('description', '')}{_choices(schema)}")


def _touched(fault: dict[str, Any]) -> str:
    """Say how many requests a fault changed; nothing for one that strikes no request but the process."""
    return "" if fault["touched"] is None else f", touched {fault['touched']} requests"


def _aim(fault: dict[str, Any]) -> str:
    """Say what a fault does and whom it strikes, as a listing or the journal has it."""
    whom = "the whole model process" if fault.get("scope") == "process" else _given(fault.get("selector", {}))
    return f"what: {_given(fault.get('params', {}))}; whom: {whom}"


def _revert(verdict: dict[str, Any]) -> str:
    """Say how the answer after a fault compared with the one before."""
    return f"reverted: {verdict['state']}" + (f" ({verdict['why']})" if verdict.get("why") else "")


def _given(values: dict[str, Any]) -> str:
    """Show parameters or conditions as they would be typed."""
    return ", ".join(f"{name}={_typed(value)}" for name, value in values.items()) or "–"


def _typed(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _default(schema: dict[str, Any]) -> str:
    return _typed(schema["default"]) if "default" in schema else "…"


def _choices(schema: dict[str, Any]) -> str:
    """Show what a parameter may be: its words, or the numbers that this server allows."""
    from chaos.faults.base import MAX_COUNT

    words = [_typed(word) for word in schema.get("enum", ()) if word != ""]
    limits = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    words += [f"{sign} {schema[name]:g}" for name, sign in limits if schema.get(name, MAX_COUNT) != MAX_COUNT]
    return f" ({', '.join(words)})" if words else ""


@app.command()
def journal(
    number: Annotated[int, typer.Option("-n", help="Entries at most, the newest last.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
) -> None:
    """Print what was started, ended, halted, verified and noted."""
    with _operator(url, key_file) as server:
        entries = server.status()["journal"][:number]
    for entry in reversed(entries):
        if as_json:
            typer.echo(json.dumps(entry))
            continue
        when = datetime.fromtimestamp(entry["time"]).strftime("%Y-%m-%d %H:%M:%S")
        typer.echo(" ".join(filter(None, (when, entry["event"], entry.get("fault_id"), _facts(entry)))))


def _facts(entry: dict[str, Any]) -> str:
    """Return what an entry tells beside its event and fault, each fact with its name and told once."""
    told = [_aim(entry)] if "params" in entry else []
    if str(entry.get("reason", "")).endswith(f"by {entry.get('by')}"):
        entry = entry | {"by": None}
    told += [f"{name}: {_typed(entry[name])}" for name in _TOLD if entry.get(name) not in (None, [])]
    return "; ".join(told)


@app.command()
def stop(
    fault: Annotated[str, typer.Argument(help="Id from `quaver chaos list`.")],
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
) -> None:
    """End one fault. Ending it twice is harmless; an id that the server never had is an error."""
    with _operator(url, key_file) as server:
        answer = server.stop(fault)
    if not answer["known"]:
        raise ServerError(f"this server never had a fault {fault!r}; `quaver chaos list` has their ids")
    if not answer["ended"]:
        typer.echo(f"{fault}: was over already")
        return
    typer.echo(f"{fault}: ended{_touched(answer)}")
    if not answer["confirmed"]:
        typer.echo("the model process has not confirmed it; its lease ends there by itself", err=True)


@app.command()
def halt(url: URL = DEFAULT_URL, key_file: KeyFile = None) -> None:
    """End every fault at once and refuse new ones until `quaver chaos unblock`."""
    with _operator(url, key_file) as server:
        answer = server.halt()
    typer.echo("every fault is ended; new ones are refused until `quaver chaos unblock`")
    if not answer["confirmed"]:
        typer.echo("the model process has not confirmed it; leases end there by themselves", err=True)


@app.command()
def unblock(url: URL = DEFAULT_URL, key_file: KeyFile = None) -> None:
    """Allow faults again after a halt."""
    with _operator(url, key_file) as server:
        server.unblock()
    typer.echo("faults may be started again")
