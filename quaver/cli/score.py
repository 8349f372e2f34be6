"""`quaver chaos score`: the scorecard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer


def score(
    quick: Annotated[
        bool, typer.Option("--quick", help="24 answers a cell: minutes, and wide intervals.")
    ] = False,
    n: Annotated[
        int | None, typer.Option("--n", help="Answers a cell; 24 with --quick, else 96.", min=8, max=1000)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the card as JSON to this file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the card as a page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the targets as JUnit XML.")] = None,
    gate: Annotated[
        float | None,
        typer.Option(help="Fail (exit 1) when a smaller share of the harm pages.", min=0, max=1),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where answers are kept; default: score in the state folder.")
    ] = None,
) -> None:
    """Strike the model in this process with every fault, and tell what sees it, how fast, and what it costs.

    Needs no server and touches none. A run that is broken off goes on where it was. On two cores it takes
    under eight minutes with --quick and about twenty without.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from chaos.score.junit import junit as as_junit
    from chaos.score.page import page
    from chaos.score.run import Sizes, score
    from engine.settings import EngineSettings
    from quaver.settings import load_settings

    settings = load_settings()
    sizes = Sizes.quick(n or 24) if quick else Sizes(n=n or 96)
    own = EngineSettings(**settings.model_dump(include=set(EngineSettings.model_fields)))
    engine = own.model_copy(update={"signal_budget": 1.0, "kv_host_mb": 0, "kv_disk_dir": None})
    for path in (json_file, html, junit):
        if path is not None:
            _check(path)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model")

        def advance(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        card = score(engine, sizes, folder or settings.state_dir.expanduser() / "score", advance)
    for line in _lines(card):
        typer.echo(line)
    for path, text in (
        (json_file, json.dumps(card, indent=2, allow_nan=False) + "\n"),
        (html, page(card)),
        (junit, as_junit(card)),
    ):
        if path is not None:
            _write(path, text)
    if gate is not None and (card["resilience"] or 0.0) < gate:
        typer.echo(f"below the gate of {gate:.0%}", err=True)
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk says no name by itself
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check(path: Path) -> None:
    """Raise typer.BadParameter where nothing could be written to `path` after all the minutes."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")


def _lines(card: dict[str, Any]) -> list[str]:
    names = {"right": 12, "passive": 9, "tap": 6, "canary": 8, "control": 9, "responses": 11, "canaries": 10}
    lines = [" " * 46 + "".join(f"{name:>{width}}" for name, width in names.items())]
    for fault in card["faults"].values():
        accuracy = f"{fault['accuracy']['clean']:.0%}→{fault['accuracy']['struck']:.0%}"
        control = fault["fpr_numeric"] or fault["fpr_semantic"]
        lines.append(
            f"{fault['title']:46}{accuracy:>12}"
            f"{_cell(fault['passive']['auroc']):>9}{_cell(fault['tap']['auroc']):>6}"
            f"{_cell(fault['canary']['auroc']):>8}{_cell(control['value'], '{:.0%}'):>9}"
            f"{_cell(fault['responses_to_detect'], '{:.0f}'):>11}"
            f"{_cell(fault['canary_responses_to_detect'], '{:.0f}'):>10}"
        )
    clean = card["clean"]
    lines += [
        "",
        "AUROC of struck answers against healthy ones; responses and canaries until the page (–: none came).",
        f"healthy: {clean['paged']} pages in {clean['responses']} responses; with 95 % confidence fewer than "
        f"one in {1 / clean['upper95']:.0f}",
        f"{_cell(card['resilience'], '{:.0%}')} of the harm comes from faults that page",
    ]
    return lines


def _cell(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)
