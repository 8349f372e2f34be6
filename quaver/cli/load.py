"""`quaver load`: readers with patience who come when they are due, and a report of what they met."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, call, read_key

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chaos.load.plan import Plan
    from chaos.load.recorder import Recorder

_EXIT_CODES = {"stopped by SIGINT": 130, "stopped by SIGTERM": 143}


def load(
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    rate: Annotated[
        float, typer.Option(help="Open loop: requests a second, Poisson, whatever the server does.", min=0)
    ] = 0.0,
    burst_rate: Annotated[
        float, typer.Option(help="With --rate: requests a second within bursts.", min=0)
    ] = 0.0,
    burst_s: Annotated[float, typer.Option(help="Seconds a burst lasts.", min=0.1)] = 5.0,
    burst_every: Annotated[float, typer.Option(help="Seconds from burst to burst.", min=0.2)] = 30.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Open loop: replay a CSV or JSON-lines file with arrival_s, prompt_tokens, output_tokens "
            "(lengths may be missing; Azure's and Mooncake's published columns are understood too)."
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="How many times as fast a trace is replayed.", min=0.001)
    ] = 1.0,
    users: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: so many readers, each asking again once it has read.",
            min=1,
            show_default="8, without --rate and --trace",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long requests are sent, at most.", min=1)] = 60.0,
    count: Annotated[int, typer.Option(help="How many requests are sent, at most.", min=1)] = 10_000,
    at_once: Annotated[
        int, typer.Option(help="Open requests at most; what is due beyond waits, and its times count.", min=1)
    ] = 512,
    slo: Annotated[
        str,
        typer.Option(
            help="Limits for goodput, in seconds or ms: ttft (first token), itl (longest gap of tokens), "
            "tpot (mean per output token), e2e (whole answer), as in ttft=0.8,tpot=50ms."
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder for readers.html, readers.json, readers.csv and requests.csv.")
    ] = Path("load"),
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 48,
    patience: Annotated[
        float, typer.Option(help="Median seconds a reader stays before hanging up.", min=0.1)
    ] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of questions, arrivals and patience.")] = 0,
    locust: Annotated[
        bool, typer.Option("--locust", help="Let Locust drive; its own CSV files are written too.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the final table.")] = False,
) -> None:
    """Send readers to a server and report what they met.

    Give --rate or --trace for an open loop: requests are sent when they are due, and every time counts
    from then, so that a server that stalls cannot hide it. Without them a closed loop asks as fast as answers
    come.

    Readers see text and timing only; they close the socket when patience ends or the text turns unreadable.
    Failed, shed, cut-short and unfinished requests are counted apart. When the time is over nobody asks any
    more; answers still running get up to 30 seconds. The report is kept up to date on disk while the run goes
    on, and is there after Ctrl-C, SIGTERM or SIGKILL as well.

    Exit status: 0, or 1 when nothing was answered or nothing could be written, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    from rich.console import Console

    from chaos.load.headless import run_headless
    from chaos.load.plan import Plan, PlanError
    from chaos.load.run import run

    if users is not None and (rate or trace):
        raise PlanError("--users is a closed loop, --rate and --trace are open ones: give one of them")
    plan = Plan(
        seconds=seconds,
        count=count,
        users=users or 8,
        rate=rate,
        burst_rate=burst_rate,
        burst_s=burst_s,
        burst_every_s=burst_every,
        trace="" if trace is None else str(trace),
        speed=speed,
        at_once=at_once,
        max_tokens=max_tokens,
        patience_s=patience,
        slo=slo,
        seed=seed,
        out=str(out),
    )
    key = read_key("client", key_file)
    plan.check()
    _folder(out)
    call("GET", url, "/v1/models", key)
    if locust:
        report = run_headless(plan, url, key, quiet=quiet)
    else:
        with _progress(plan, quiet) as watch:
            report = run(plan, url, key, watch)
    _tell(Console(markup=False, emoji=False), report, out)
    raise typer.Exit(_exit_code(report))


def table(report: dict[str, Any]) -> Table:
    """Return the report as a table: one row per duration, outcomes in the caption."""
    from rich.table import Table

    from chaos.load.page import COLUMNS, ROWS

    out = Table(title=f"{report['requests']} requests in {report['seconds']:.0f} s", title_justify="left")
    out.add_column("seconds")
    for column in COLUMNS:
        out.add_column(column, justify="right")
    for name, what in ROWS.items():
        row = report[name]
        if row["count"]:
            out.add_row(what, *(str(row[c]) if c == "count" else f"{row[c]:.3f}" for c in COLUMNS))
    out.caption = ", ".join(_outcomes(report)) or "no requests"
    out.caption_justify = "left"
    return out


def _outcomes(report: dict[str, Any]) -> Iterator[str]:
    """Yield each outcome with its count and, in brackets, what that count is made of."""
    reasons = {"left": "left_because", "shed": "shed_because", "failed": "errors"}
    for name, count in report["outcomes"].items():
        why = report[reasons[name]] if name in reasons else {}
        parts = ", ".join(f"{times} {reason}" for reason, times in why.items())
        shown = "ended with the run" if name == "ended" else name
        yield f"{shown}: {count}" + (f" ({parts})" if parts else "")


def _tell(console: Console, report: dict[str, Any], out: Path) -> None:
    """Print the table, the goodput, what is doubtful, and where the files are."""
    from chaos.load.page import late

    tell = partial(console.print, soft_wrap=True)
    console.print(table(report))
    goodput = report["goodput"]
    if goodput["share"] is not None:
        limits = (
            ", ".join(f"{name} ≤ {limit:g} s" for name, limit in goodput["slo"].items()) or "no limits given"
        )
        missed = ", ".join(f"{count} {name}" for name, count in goodput["missed"].items())
        tell(
            f"Goodput {goodput['per_s']:.2f}/s, {goodput['share']:.1%} of requests ({limits})"
            + (f"; missed by {missed}" if missed else "")
        )
    if report["left_before_first_token"]:
        tell(f"{report['left_before_first_token']} left before a first token and are in no first-token time")
    if (behind := late(report)) is not None:
        tell(behind)
    if report["state"] != "finished":
        tell(f"The run was {report['state']}")
    if report.get("trouble"):
        tell(f"Nothing could be written to {out}: {report['trouble']}", style="red")
    else:
        tell(f"Written: {', '.join(str(out / n) for n in ('readers.html', 'readers.json'))}, CSV beside")


def _exit_code(report: dict[str, Any]) -> int:
    answered = report["outcomes"].get("read", 0) + report["outcomes"].get("left", 0)
    if report["state"] in _EXIT_CODES:
        return _EXIT_CODES[report["state"]]
    return int(bool(report.get("trouble")) or (report["requests"] > 0 and not answered))


@contextmanager
def _progress(plan: Plan, quiet: bool) -> Iterator[Callable[[Recorder], None]]:
    """Show how far a run is in one line of a terminal; silent when asked, or when nobody looks."""
    from rich.console import Console
    from rich.live import Live

    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    console = Console(stderr=True, markup=False, emoji=False)
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda recorder: live.update(_line(plan, recorder))


def _line(plan: Plan, recorder: Recorder) -> str:
    """Return how far a run is, in one line."""
    from chaos.load.reading import now

    report = recorder.report
    first = report.times["first_token_s"].quantile(0.95)
    ends = ", ".join(f"{count} {name}" for name, count in report.outcomes.items()) or "no answer yet"
    shown = f", first token p95 {first:.3f} s" if first is not None else ""
    return f"{now() - (report.began or now()):.0f} of {plan.seconds:g} s: {ends}{shown}"


def _folder(out: Path) -> None:
    """Make the folder of the report, so that it is known to be usable before anything is sent."""
    from chaos.load.plan import PlanError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--out: cannot make the folder {out}: {error.strerror}") from None
