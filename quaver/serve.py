"""`quaver serve`: a thin supervisor, and the front process that it keeps alive.

The supervisor imports nothing heavy. It restarts the front when it dies, passes signals on, and
ends when the front ends by itself. The front in turn watches the model process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.process.spawn import Spawned

#: The front could not start and would not on a second try: a port in use, no model.
EXIT_CANNOT_START = 2
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_CLOSE_S = 5  # for connections to close once everything that ran has ended
_STEADY_S = 60.0  # a front that ran this long counts as healthy: the backoff begins anew


def supervise() -> int:
    """Run the front until it ends by itself, restarting it when it dies; return its exit status.

    SIGTERM and SIGINT are passed on; the front then finishes or marks what is running.
    """
    child: subprocess.Popen[bytes] | None = None
    stopping = False

    def pass_on(signum: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True
        if child is not None and child.poll() is None:
            child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    deaths = 0
    while not stopping:
        started = time.monotonic()
        # A session of its own: a Ctrl-C in the terminal reaches it once, through us.
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "quaver.serve", str(os.getpid())], start_new_session=True
        )
        status = child.wait()
        if stopping or status in (0, EXIT_CANNOT_START):
            return max(status, 0)
        deaths = 1 if time.monotonic() - started > _STEADY_S else deaths + 1
        print(f"quaver: the front process died ({_cause(status)}); restarting", file=sys.stderr, flush=True)
        until = time.monotonic() + _BACKOFF_S[min(deaths, len(_BACKOFF_S)) - 1]
        while not stopping and time.monotonic() < until:
            time.sleep(0.05)
    return 0


def _cause(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def run_front(supervisor: int) -> int:
    """Run the front until it is told to stop or `supervisor` (a pid) is gone; return its exit status."""
    from chaos import MODEL_HOOK  # noqa: PLC0415 - the supervisor stays small
    from engine.process.spawn import EngineStartError, spawn  # noqa: PLC0415

    def leave(_signum: int, _frame: object) -> None:
        raise SystemExit(0)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, leave)
    try:
        spawned = spawn(None, MODEL_HOOK)  # first of all: the model loads while the front imports itself
    except EngineStartError as error:
        print(f"quaver: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    try:
        return _serve(supervisor, spawned)
    finally:
        spawned.kill()  # whoever has adopted it has ended it by now, as a rule


def _serve(supervisor: int, spawned: Spawned) -> int:
    """Build the front around a model process that is loading, and run it to its end."""
    gc.disable()  # what is imported and built here stays; the collector need not look at it
    import uvicorn  # noqa: PLC0415 - these take a second; the model process has begun before

    from quaver.protocol import PatientProtocol  # noqa: PLC0415
    from quaver.service import Service, StartError  # noqa: PLC0415
    from quaver.settings import load_settings  # noqa: PLC0415

    try:
        settings = load_settings()
        service = Service(settings, spawned)
        listener = socket.create_server((settings.host, settings.port), backlog=512)
    except (StartError, ValueError) as error:
        print(f"quaver: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except OSError as error:
        print(f"quaver: cannot start: {error}; `quaver doctor` tells what to do", file=sys.stderr)
        return EXIT_CANNOT_START

    log = _say(settings.log_level)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                log.info(
                    "listening on %s; model %s is loading; keys in %s; chaos is %s",
                    f"http://{settings.host}:{settings.port}",
                    service.api.model,
                    settings.keys_dir,
                    "on" if settings.chaos else "off",
                )

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or os.getppid() != supervisor

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await service.drain()  # while connections still stand, so that every stream gets its end
            await super().shutdown(sockets)

    class Protocol(PatientProtocol):
        write_s = settings.write_timeout_s

    server = Server(
        uvicorn.Config(
            service.app,
            http=Protocol,
            ws="none",
            log_level=settings.log_level,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )

    def stop(_signum: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal it stopped on again; with a handler in place that ends nothing.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    gc.freeze()
    gc.enable()
    server.run(sockets=[listener])
    return 0 if server.started else EXIT_CANNOT_START


def _say(level: str) -> logging.Logger:
    """Let our own log lines reach stderr, those of libraries from warnings on; return our logger."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s:     %(name)s: %(message)s")
    log = logging.getLogger("quaver")
    log.setLevel(level.upper())
    return log


if __name__ == "__main__":
    raise SystemExit(run_front(int(sys.argv[1])))
