"""`quaver load`: readers with patience, by Locust, without its web page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, ServerError, read_key

if TYPE_CHECKING:
    from rich.table import Table


def load(
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
    users: Annotated[int, typer.Option(help="Readers at once.", min=1)] = 8,
    rate: Annotated[
        float, typer.Option(help="Requests a second, scheduled ahead; 0: no schedule.", min=0)
    ] = 0.0,
    seconds: Annotated[float, typer.Option(help="How long.", min=1)] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder for readers.json, readers.csv and Locust's CSV.")] = Path(
        "load"
    ),
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 48,
    patience: Annotated[float, typer.Option(help="Median seconds a reader stays.", min=0.1)] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of questions, arrivals and patience.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the final table.")] = False,
) -> None:
    """Run Locust headless against a server and print first-token, inter-token and end-to-end times.

    When the time is over nobody asks any more; answers still running get up to 30 seconds to finish.
    """
    from rich.console import Console

    from chaos.load.run import LoadError, run_headless

    console = Console(markup=False, emoji=False)
    try:
        report = run_headless(
            url,
            read_key("client", key_file),
            users=users,
            rate=rate,
            seconds=seconds,
            out_dir=out,
            max_tokens=max_tokens,
            patience_s=patience,
            seed=seed,
            quiet=quiet,
        )
    except (LoadError, ServerError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(table(report))
    console.print(f"Written: {out / 'readers.json'}, {out / 'readers.csv'}")


def table(report: dict[str, Any]) -> Table:
    """Return the report as a table: one row per duration, outcomes in the caption."""
    from rich.table import Table

    out = Table(title=f"{report['requests']} requests in {report['seconds']:.0f} s", title_justify="left")
    out.add_column("seconds")
    columns = ("count", "mean", "p50", "p95", "p99", "max")
    for column in columns:
        out.add_column(column, justify="right")
    for name, what in {
        "first_token_s": "first token",
        "inter_token_s": "between tokens",
        "end_to_end_s": "whole answer",
        "start_delay_s": "start delay",
        "cut_after_s": "left after",
        "failed_after_s": "failed after",
    }.items():
        row = report[name]
        values = (
            "–" if row[c] is None else f"{row[c]:.3f}" if c != "count" else str(row[c]) for c in columns
        )
        out.add_row(what, *values)
    out.caption = ", ".join(_outcomes(report)) or "no requests"
    return out


def _outcomes(report: dict[str, Any]) -> Iterator[str]:
    """Yield each outcome with its count and, in brackets, what that count is made of."""
    reasons = {"left": "left_because", "shed": "shed_because", "failed": "errors"}
    for name, count in report["outcomes"].items():
        why = report[reasons[name]] if name in reasons else {}
        parts = ", ".join(f"{times} {reason}" for reason, times in why.items())
        shown = "ended with the run" if name == "ended" else name
        yield f"{shown}: {count}" + (f" ({parts})" if parts else "")
