"""`quaver calibrate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from quaver.cli.http import DEFAULT_URL, URL, KeyFile, call, no_answer, read_key

_BLUNT = 0.4  # nats: by so much does noise of σ 2 on the logits move a canary


def calibrate(
    responses: Annotated[
        int, typer.Option(help="Healthy responses to gather: at least 54 for each band of temperatures.")
    ] = 640,
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
        int, typer.Option(help="Times that each canary is asked; 0: no canaries, else 8 … 60.", min=0, max=60)
    ] = 24,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Only end the calibration that runs; nothing is kept of it.")
    ] = False,
    url: URL = DEFAULT_URL,
    key_file: KeyFile = None,
) -> None:
    """Send healthy questions to a running server and build its baseline from what it then sees.

    Further questions are asked four times, twice without their answer in the passage: heads of attention
    that tell these apart become a score. Then the server asks its canaries, known prompts that it will replay
    from time to time, and keeps how they are answered in health. Other traffic that arrives meanwhile is
    taken for healthy too. Takes a few minutes on two cores. While one calibration runs, another is refused.
    """
    import asyncio

    import httpx
    from rich.console import Console
    from rich.progress import Progress

    from quaver.calibrate import calibrate as run
    from quaver.calibrate import calibrate_canaries

    temperatures = tuple(temperature or (0.0, 1.0))
    if not cancel:
        _refuse_too_few(responses, temperatures, canary_rounds)
    key = read_key("operator", key_file)
    if cancel:
        for path in ("/quaver/alerts/calibration", "/quaver/canaries"):
            call("POST", url, path, key, {"action": "cancel"})
        typer.echo("no calibration is running now")
        return
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
                    temperatures=temperatures,
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
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise no_answer(url, error) from None
    _tell_baseline(state["baseline"])
    if canaries is not None:
        _tell_canaries(canaries)


def _refuse_too_few(responses: int, temperatures: Sequence[float], rounds: int) -> None:
    """Refuse, before anything is asked, what could not make a baseline in the end."""
    from alerting.baseline import fewest
    from alerting.canary.baseline import ROUNDS
    from alerting.rules import load_rules
    from alerting.samples import to_collect
    from alerting.statistics import temperature_band
    from quaver.settings import load_settings

    need = to_collect(fewest(load_rules(load_settings().rules_file)))
    count = len(temperatures)
    shares = Counter(temperature_band(one) for one in temperatures)
    least = -(-need * count // min(shares.values()))
    if responses < least:
        raise typer.BadParameter(
            f"{responses} at {count} temperature{'' if count == 1 else 's'} are too few: each band of "
            f"temperatures needs {need}; ask for {least} or more, or name fewer temperatures",
            param_hint="--responses",
        )
    if 0 < rounds < ROUNDS:
        raise typer.BadParameter(
            f"{rounds} are too few: 0 for no canaries, else {ROUNDS} … 60", param_hint="--canary-rounds"
        )


def _tell_baseline(baseline: dict[str, Any]) -> None:
    from alerting.statistics import BANDS

    strata = ", ".join(f"{one['route']} ({one['band']}: {BANDS[one['band']]})" for one in baseline["strata"])
    typer.echo(f"baseline of {baseline['model']} in force, written {baseline['created']}; routes: {strata}")
    for band, scores in baseline["scores"].items():
        heads = "with attention heads" if scores["heads"] else "without layer detail"
        typer.echo(f"scores ({band}: {BANDS[band]}): {scores['tokens']:,} tokens, {heads}")


def _tell_canaries(canaries: dict[str, Any]) -> None:
    limit = canaries["baseline"]["limits"]["entropy"]
    typer.echo(
        f"{len(canaries['canaries'])} canaries in force; 95 of 100 healthy first sentences are within "
        f"{limit:.2f} nats of their usual entropy"
    )
    if limit > _BLUNT:
        typer.secho(
            "warning: that is much, so canaries will tell less: something else was running, or answers "
            "differ from time to time; run `quaver calibrate` again with nothing else running",
            err=True,
            fg=typer.colors.YELLOW,
        )
