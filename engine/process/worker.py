"""The model process: owns the engine, obeys the front, ends with it.

    python -m engine.process --socket ipc:///… --parent PID --began SECONDS [--settings JSON]
        [--hook module:factory]

`--began` is `time.monotonic()` at the start, a clock that the processes of a machine share. Without
`--settings` those of the environment hold.

One thread does everything: take all control messages that have arrived, compute one step, send what
it produced. It never waits for the front to read.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import time
from types import FrameType

import torch
import zmq

from engine.core import Engine, RequestError, load_engine
from engine.hooks import ModelHook
from engine.messages import (
    Abort,
    AttachFault,
    DetachFault,
    FaultsActive,
    Finish,
    FromModel,
    Ping,
    Shutdown,
    Submit,
    decode_to_model,
    encode,
)
from engine.settings import EngineSettings

#: Without a Ping for this long the front counts as gone: no fault, no request outlives it.
HEARTBEAT_S = 2.0
_IDLE_MS = 100
_RECONNECT_MS = 20  # a front that is still starting binds its end a little later
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("quaver.model")


class Worker:
    """The loop around one engine and one socket. `parent` is the pid it must not outlive."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], parent: int) -> None:
        self.engine = engine
        self.socket = socket
        self.parent = parent
        self.stopping = False
        self._hook = engine.hook
        self._running: set[tuple[str, int]] = set()
        self._pinged = time.monotonic()
        self._alone = False
        self._obeyed = 0

    def run(self) -> None:
        """Serve until told to stop or the parent is gone; then answer what runs with `abort`."""
        self._pinged = time.monotonic()
        self._send(self.engine.ready())
        while not self.stopping and os.getppid() == self.parent:
            self._listen()
            self._watch()
            if self.engine.has_work:
                self._step()
            elif (report := self.engine.report()) is not None:
                self._send(report)
        self._abort_all()
        if self.engine.has_work:
            self._step()

    def stop(self, _signum: int, _frame: FrameType | None) -> None:
        """Signal handler: end after the current step."""
        self.stopping = True

    def _listen(self) -> None:
        """Take every message that has arrived; while there is nothing to compute, wait a little."""
        if not self.socket.poll(0 if self.engine.has_work else _IDLE_MS):
            return
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(data)

    def _obey(self, data: bytes) -> None:
        match decode_to_model(data):
            case Ping(_, signals_s):
                self.engine.charge(signals_s)
                self._pinged = time.monotonic()
                self._alone = False
            case Submit() as request:
                self._submit(request)
            case Abort(request_id, choice):
                self.engine.abort(request_id, choice)
            case AttachFault() as fault:
                self._attach(fault)
                self._obeyed += 1
                self._send_faults()
            case DetachFault(fault_id):
                self._detach(fault_id)
                self._obeyed += 1
                self._send_faults()
            case Shutdown():
                self.stopping = True

    def _submit(self, request: Submit) -> None:
        try:
            self.engine.submit(request)
        except RequestError as error:
            finish = Finish(
                request_id=request.meta.request_id,
                choice=request.choice,
                reason="error",
                error=f"{error.code}: {error}",
                prompt_tokens=len(request.token_ids),
                completion_tokens=0,
                queued_s=0.0,
                prefill_s=0.0,
            )
            self._send(self.engine.aside(finished=[finish]))
        else:
            self._running.add((request.meta.request_id, request.choice))

    def _attach(self, fault: AttachFault) -> None:
        if self._hook is None:
            log.error("fault %s refused: this model process has no fault hook", fault.fault_id)
        else:
            try:
                self._hook.attach(fault)
            except Exception:
                log.exception("fault %s (%s) could not be attached", fault.fault_id, fault.kind)

    def _detach(self, fault_id: str | None) -> None:
        if self._hook is not None:
            try:
                self._hook.detach(fault_id)
            except Exception:
                log.exception("fault %s could not be detached", fault_id or "(all)")

    def _watch(self) -> None:
        """End leases that are over and, when the front has gone silent, everything."""
        now = time.monotonic()
        if self._hook is not None and self._hook.active and self._hook.expire(now):
            self._send_faults()
        if now - self._pinged > HEARTBEAT_S and not self._alone:
            self._alone = True
            log.error("no heartbeat for %.0f s: all faults end, all requests are aborted", HEARTBEAT_S)
            self._detach(None)
            self._send_faults()
            self._abort_all()

    def _abort_all(self) -> None:
        for request_id in {request_id for request_id, _ in self._running}:
            self.engine.abort(request_id)

    def _step(self) -> None:
        output = self.engine.step()
        self._running.difference_update((f.request_id, f.choice) for f in output.finished)
        self._send(output)
        if not self.engine.has_work:
            self.engine.check()  # a lost page ends this process loudly rather than the pool slowly

    def _send_faults(self) -> None:
        fault_ids = self._hook.fault_ids() if self._hook is not None else []
        self._send(FaultsActive(fault_ids, self._obeyed))

    def _send(self, message: FromModel) -> None:
        self.socket.send(encode(message), zmq.NOBLOCK)


def load_hook(path: str) -> ModelHook:
    """Return what `package.module:factory` makes."""
    module, _, name = path.partition(":")
    hook: ModelHook = getattr(importlib.import_module(module), name)()
    return hook


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the front process is gone")


def main() -> None:
    """Load the model, connect, serve. Exits non-zero when a step fails; the front restarts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--settings")
    parser.add_argument("--began", required=True, type=float)
    parser.add_argument("--hook")
    arguments = parser.parse_args()
    end_with_parent(arguments.parent)
    # A Ctrl-C reaches the whole terminal group; the front decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    imported = time.monotonic()
    given = arguments.settings
    settings = EngineSettings.model_validate_json(given) if given else EngineSettings()
    torch.set_num_threads(settings.cores)
    engine = load_engine(settings, load_hook(arguments.hook) if arguments.hook else None)
    gc.freeze()
    gc.enable()
    log.info(
        "loaded in %.2f s, of which libraries %.2f s",
        time.monotonic() - arguments.began,
        imported - arguments.began,
    )

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.reconnect_ivl = _RECONNECT_MS
    socket.connect(arguments.socket)
    worker = Worker(engine, socket, arguments.parent)
    signal.signal(signal.SIGTERM, worker.stop)
    try:
        with torch.inference_mode():
            worker.run()
            engine.close()
    except Exception:
        log.exception("the engine failed")
        raise SystemExit(1) from None
    finally:
        socket.close()
        zmq.Context.instance().term()
