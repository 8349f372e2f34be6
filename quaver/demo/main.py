"""The demo from start to end: server, calibration, experiments, finale, scorecard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from chaos.load.questions import right, supply
from chaos.load.readers import Readers
from quaver.demo import calibration, plan, server, webhook
from quaver.demo.control import Control, DemoError, Lease
from quaver.demo.finale import Finale
from quaver.demo.phases import Phases
from quaver.demo.report import CleanWindows, DemoResult, table, verdicts
from quaver.demo.show import Show
from quaver.demo.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `quaver demo` was asked to do."""

    once: bool = False
    json_file: Path | None = None
    target: str | None = None
    operator_key_file: Path | None = None
    dashboard: bool = True
    total_s: float = plan.TOTAL_S


@dataclass(frozen=True)
class Place:
    """Where the demo runs. `keys` is None for a server that somebody else started."""

    url: str
    operator_key: str
    client_key: str
    keys: Path | None
    child: server.Child | None


def run(options: Options, console: Console) -> DemoResult:
    """Run the demo; raises DemoError, and KeyboardInterrupt when it was told to stop.

    Whatever happens, faults are ended and children stopped before this returns.
    """
    return asyncio.run(_until_signal(_demo(options, console)))


async def _until_signal(work: Coroutine[Any, Any, DemoResult]) -> DemoResult:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not task.cancelling():  # a second Ctrl-C must not stop the cleaning up
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _demo(options: Options, console: Console) -> DemoResult:
    show = Show(console)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(_place(options, show))
        dashboard = None
        if options.dashboard and place.keys is not None:
            dashboard = server.start_dashboard(place.keys.parent, place.url, place.keys)
        if dashboard is not None:
            stack.callback(dashboard[0].stop)
        control = Control(place.url, place.operator_key)
        stack.push_async_callback(control.close)
        await server.until_ready(control, place.child)
        _where(show, place, dashboard[1] if dashboard else None)
        result = await _measure(options, control, place, show, began)
        console.print()
        console.print(table(result))
        for line in verdicts(result):
            console.print(f"• {line}", highlight=False)
        if options.json_file is not None:
            options.json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")
            console.print(f"Written: {options.json_file}")
        if not options.once and place.child is not None:
            console.print("\nServer and dashboard stay up; Ctrl-C ends them.")
            _where(show, place, dashboard[1] if dashboard else None)
            with contextlib.suppress(asyncio.CancelledError):  # the run is complete: Ctrl-C is no failure now
                while place.child.running:  # noqa: ASYNC110 - a process, not a coroutine
                    await asyncio.sleep(0.5)
    return result


async def _measure(options: Options, control: Control, place: Place, show: Show, began: float) -> DemoResult:
    """Calibrate, run the experiments and the finale; faults still in force are ended on every way out."""
    clock = time.time()
    model = str((await control.status())["model"])
    chaos = await control.chaos()
    if not chaos["enabled"]:
        raise DemoError("chaos is off on this server: start it with QUAVER_CHAOS=1")
    if chaos["lever"]["blocked"]:
        raise DemoError("chaos is halted on this server: `quaver chaos unblock` lifts that")
    leases: list[list[Lease]] = []
    try:
        pace = await calibration.calibrate(control, place.url, place.client_key, show)
        sizes = plan.make_plan(pace.rate, options.total_s - (time.monotonic() - began))
        _tell(sizes, show)
        async with (
            Readers(place.url, place.client_key, patience=calibration.STEADY, seed=1) as readers,
            Traffic(readers, supply("demo", max_tokens=plan.MAX_TOKENS, seed=1), plan.STREAMS) as traffic,
        ):
            phases = Phases(control, traffic, sizes, right, show)
            leases.append(phases.leases)
            faults = await phases.run()
        async with (
            Readers(place.url, place.client_key, patience=pace.people, seed=2) as readers,
            Traffic(readers, supply("demo", max_tokens=plan.FINALE_TOKENS, seed=2), plan.STREAMS) as traffic,
        ):
            finale = Finale(control, traffic, sizes, show)
            leases.append(finale.leases)
            last = await finale.run()
        arrived = await webhook.arrived(control, clock) if place.child is None else None
    finally:
        await _end_faults(control, [lease for held in leases for lease in held], show)
    clean = CleanWindows(
        responses=phases.clean.responses + finale.clean.responses,
        alerts=phases.clean.alerts + finale.clean.alerts,
    )
    return DemoResult(
        model=model,
        faults=faults,
        clean=clean,
        finale=last,
        seconds=time.monotonic() - began,
        webhook=arrived,
    )


@asynccontextmanager
async def _place(options: Options, show: Show) -> AsyncIterator[Place]:
    """Find the server of `--target`, or start one and end it afterwards."""
    if options.target is not None:
        if options.operator_key_file is None:
            raise DemoError("--target needs --operator-key-file (the server's keys folder has operator.key)")
        try:
            key = options.operator_key_file.read_text().strip()
        except OSError as error:
            raise DemoError(f"cannot read {options.operator_key_file}: {error.strerror}") from None
        yield Place(options.target.rstrip("/"), key, key, None, None)
        return
    state_dir = Path(tempfile.mkdtemp(prefix="quaver-demo-"))
    port = server.free_port(8000)
    show.say(f"Starting `quaver serve` on port {port}; its state and logs are in {state_dir}")
    child = server.start_server(state_dir, port)
    failed = True
    try:
        keys = state_dir / "keys"
        url = f"http://127.0.0.1:{port}"
        await _keys_written(keys, child)
        yield Place(url, _key(keys, "operator"), _key(keys, "client"), keys, child)
        failed = False
    finally:
        child.stop()
        if options.once and not failed:
            shutil.rmtree(state_dir, ignore_errors=True)


async def _keys_written(keys: Path, child: server.Child) -> None:
    end = time.monotonic() + server.READY_S
    while not all((keys / f"{role}.key").exists() for role in ("operator", "client", "viewer")):
        if not child.running or time.monotonic() > end:
            raise DemoError(f"`quaver serve` did not start; its log {child.log} says:\n{child.tail()}")
        await asyncio.sleep(0.1)


def _key(keys: Path, role: str) -> str:
    return (keys / f"{role}.key").read_text().strip()


def _where(show: Show, place: Place, dashboard: str | None) -> None:
    show.say(f"API {place.url}" + (f" · dashboard {dashboard}" if dashboard else ""))
    if place.keys is not None:
        show.say(f"Operator key, for the dashboard's chaos page: {place.keys / 'operator.key'}")


def _tell(sizes: plan.Plan, show: Show) -> None:
    show.say(
        f"Plan: {sizes.rate:.1f} responses/s here; clean windows of {sizes.clean}, faults and controls of "
        f"{sizes.fault}, recovery of {sizes.recovery} responses: about {sizes.seconds / 60:.0f} min"
        + ("" if sizes.fits else " (longer than planned: this machine is slow or busy)")
    )


async def _end_faults(control: Control, leases: list[Lease], show: Show) -> None:
    """End what is still in force; where that fails, halt everything."""
    try:
        for lease in leases:
            await control.end_fault(lease)
    except DemoError as error:
        show.say(f"[red]could not end a fault ({error}); halting all chaos[/red]")
        await control.halt()
