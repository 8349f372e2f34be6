"""`quaver quality`: are the answers right? Known questions, rates with intervals, clean and under a fault."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaver.cli.chaos import _operator, _pairs
from quaver.cli.http import DEFAULT_URL, URL, KeyFile, call, read_key

if TYPE_CHECKING:
    from rich.table import Table


def quality(
    n: Annotated[int, typer.Option(help="Questions of each probe.", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the questions; the same seed asks the same.")] = 0,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="facts, absent, citation, instruction, role or format; again for more. Default: all."
        ),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            help="Ask clean, then under this fault, which strikes these questions alone, and compare."
        ),
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", help="With --fault: NAME=VALUE of the fault.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with an earlier run's --json file: same n, seed and probes.")
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Tell the server, which exports prompt_accuracy (operator's key)."),
    ] = False,
    every: Annotated[
        float, typer.Option(help="With --report: again so many seconds later, until Ctrl-C.", min=0)
    ] = 0.0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write everything, replies included, to this file.")
    ] = None,
    readers: Annotated[int, typer.Option(help="Questions asked at once.", min=1)] = 8,
    route: Annotated[str, typer.Option(help="Route label of the questions.")] = "quality",
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    operator_key_file: Annotated[
        Path | None,
        typer.Option(
            help="The operator's key for --fault and --report; default: the one in the keys folder."
        ),
    ] = None,
) -> None:
    """Ask a running server questions with known answers, and print how often each probe found them right.

    facts: the answer has the passage's fact. absent: what the passage does not have is not invented.
    citation: every document cited is one of the prompt's. instruction: a rule that can be checked was kept
    (words, case, JSON …). role: the persona keeps its name and its subject. format: a card has its lines.

    Intervals are 95 %, over families of questions. A comparison pairs the same questions. Exits with 1 when
    the measurement means nothing: nobody answered, or the fault struck nothing.
    """
    from rich.console import Console

    from chaos.quality.faulted import under_fault
    from chaos.quality.measure import compare
    from chaos.quality.measure import quality as measure
    from chaos.quality.tasks import PROBES

    if fault and (against or report):
        raise typer.BadParameter(
            "is a comparison of its own: leave out --against and --report", param_hint="--fault"
        )
    if every and not report:
        raise typer.BadParameter("repeats --report: give both", param_hint="--every")
    if param and not fault:
        raise typer.BadParameter("is of a fault: give --fault too", param_hint="--param")
    if unknown := set(probe or ()) - set(PROBES):
        raise typer.BadParameter(
            f"there is no probe {min(unknown)!r}; give some of {', '.join(PROBES)}", param_hint="--probe"
        )
    earlier = None if against is None else _earlier(against)
    console, key = Console(markup=False, emoji=False), read_key("client", key_file)

    if not fault:  # with one, its dry start says so
        call("GET", url, "/v1/models", key)  # nobody there, a wrong key: said at once

    def ask() -> dict[str, Any]:
        chosen: Any = tuple(probe or PROBES)
        return measure(url, key, n, seed, probes=chosen, route=route, readers=readers)

    while True:
        if fault:
            with _operator(url, operator_key_file) as server:
                found = under_fault(
                    server, fault, _pairs(param or [], "--param"), ask, seed=seed, route=route
                )
            console.print(changes(found["clean"], found["faulted"], found["changes"]))
            console.print(f"{fault} struck {found['fault']['touched']} requests of the route {route} alone")
        else:
            found = ask()
            shown = rates(found) if earlier is None else changes(earlier, found, compare(earlier, found))
            console.print(shown)
        if as_json is not None:
            as_json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        if report:
            body = {name: found[name] for name in ("rates", "prompt_accuracy")}
            told = call("POST", url, "/quaver/quality", read_key("operator", operator_key_file), body)
            console.print(
                f'Reported: prompt_accuracy{{env="{told["env"]}"}} {_share(found["prompt_accuracy"])}'
            )
        if not every:
            return
        time.sleep(every)
        seed += 1


def _earlier(file: Path) -> dict[str, Any]:
    """Return what an earlier run has written with --json."""
    from chaos.quality.measure import QualityError, replies_of

    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        replies_of(found)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--against") from None
    except (ValueError, RecursionError, QualityError):
        raise typer.BadParameter(
            f"{file} is not a result of `quaver quality`, as --json writes it", param_hint="--against"
        ) from None
    return found


def rates(found: dict[str, Any]) -> Table:
    """Return rates by probe, with the parts of those that have several."""
    from rich.table import Table

    out = Table(
        title=f"{found['n']} questions of each probe in {found['seconds']:.0f} s", title_justify="left"
    )
    out.add_column("probe", no_wrap=True)
    for column in ("asked", "good", "rate", "95 %"):
        out.add_column(column, justify="right", no_wrap=True)
    for name, row in found["rates"].items():
        out.add_row(name, str(row["n"]), str(row["good"]), _share(row["rate"]), _between(row))
        for part, one in found["parts"].items():
            if name in ("instruction", "role") and part.startswith(f"{name}/"):
                out.add_row(
                    f"  {part.partition('/')[2]}", str(one["n"]), str(one["good"]), _share(one["rate"]), ""
                )
    if found["unanswered"]:
        out.caption = f"{found['unanswered']} questions were not answered and are not counted"
    return out


def changes(before: dict[str, Any], after: dict[str, Any], found: dict[str, Any]) -> Table:
    """Return rates before and after by probe, and what changed on the same questions."""
    from rich.table import Table

    out = Table(title="The same questions twice", title_justify="left")
    out.add_column("probe", no_wrap=True)
    for column in ("pairs", "clean", "then", "change", "95 %", "worse", "better"):
        out.add_column(column, justify="right", no_wrap=True)
    for name, row in found.items():
        out.add_row(
            name,
            str(row["n"]),
            _share(before["rates"][name]["rate"]),
            _share(after["rates"][name]["rate"]),
            "–" if row["change"] is None else f"{100 * row['change']:+.0f} pt",
            _between(row, "+"),
            str(row["worse"]),
            str(row["better"]),
            style="red" if row["harmed"] else None,
        )
    return out


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _between(row: dict[str, Any], sign: str = "") -> str:
    if row["low"] is None:
        return "–"
    return f"{100 * row['low']:{sign}.0f} … {100 * row['high']:{sign}.0f}"
