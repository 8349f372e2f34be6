"""`quaver calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, ServerError, read_key


def calibrate(
    responses: Annotated[int, typer.Option(help="Healthy responses to gather.", min=40)] = 640,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Temperatures of your traffic; default: 0 and 1.", min=0, max=2),
    ] = None,
    contrast: Annotated[
        int,
        typer.Option(
            help="Questions asked with and without their answer in the passage, for the contrast.", min=0
        ),
    ] = 80,
    readers: Annotated[int, typer.Option(help="Questions asked at once.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the questions' order.")] = 0,
    canary_rounds: Annotated[
        int, typer.Option(help="Times that each canary is asked; 0: no canaries, else 6 … 60.", min=0, max=60)
    ] = 12,
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
) -> None:
    """Send healthy questions to a running server and build its baseline from what it then sees.

    Further questions are asked four times, twice without their answer in the passage: heads of attention
    that tell these apart become a score. Then the server asks its canaries, known prompts that it will replay
    from time to time, and keeps how they are answered in health. Other traffic that arrives meanwhile is
    taken for healthy too. Takes a few minutes on two cores.
    """
    import asyncio

    import httpx
    from rich.console import Console
    from rich.progress import Progress

    from quaver.calibrate import calibrate as run
    from quaver.calibrate import calibrate_canaries

    key = read_key("operator", key_file)
    try:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("healthy responses", total=responses + 4 * contrast)
            state = asyncio.run(
                run(
                    url,
                    key,
                    responses=responses,
                    readers=readers,
                    max_tokens=max_tokens,
                    seed=seed,
                    temperatures=temperature or (0.0, 1.0),
                    contrast=contrast,
                    progress=lambda read: bar.update(task, completed=read),
                )
            )
            canaries = None
            if canary_rounds:
                own = bar.add_task("canaries", total=None)
                canaries = asyncio.run(
                    calibrate_canaries(
                        url,
                        key,
                        rounds=canary_rounds,
                        progress=lambda asked, total: bar.update(own, completed=asked, total=total),
                    )
                )
    except httpx.TransportError as error:
        raise ServerError(f"no answer from {url} ({error}); is `quaver serve` running?") from None
    baseline = state["baseline"]
    strata = ", ".join(f"{stratum['route']} ({stratum['band']})" for stratum in baseline["strata"])
    typer.echo(f"baseline of {baseline['model']} in force, written {baseline['created']}; routes: {strata}")
    for band, scores in baseline["scores"].items():
        heads = "with attention heads" if scores["heads"] else "without layer detail"
        typer.echo(f"scores ({band}): {scores['tokens']:,} tokens, {heads}")
    if canaries is not None:
        failed = canaries["baseline"]["failed_in_health"]["signals@0.05"]
        typer.echo(
            f"{len(canaries['canaries'])} canaries in force; {failed[0]} of {failed[1]} healthy answers pass "
            "their 5 % limit"
        )
