"""One life of the model process: its folder, socket, output and end."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from engine.messages import FromModel, Ready, ToModel, decode_from_model, encode
from engine.settings import EngineSettings

_TAIL_BYTES = 8000
#: Compute threads that spin while they wait starve whoever shares their cores, and are starved in turn:
#: beside a process that takes half a core, two spinning threads decode 12 times slower than two that sleep.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

log = logging.getLogger("quaver.engine")


class EngineStartError(RuntimeError):
    """The model process did not become ready; the message ends with what it wrote last."""


class ModelProcess:
    """A child process and the socket to it. Made by `launch`; `close` leaves nothing behind."""

    def __init__(self, folder: Path, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._folder = folder
        self._socket = socket
        self._process = process
        self._tail = b""
        self._output = asyncio.create_task(self._pass_on_output())
        self._death = asyncio.create_task(process.wait())

    @classmethod
    async def launch(
        cls, context: zmq.asyncio.Context, settings: EngineSettings, hook: str | None
    ) -> ModelProcess:
        """Spawn the process with a socket of its own in a folder that only this user can enter."""
        folder = Path(tempfile.mkdtemp(prefix="quaver-"))
        address = f"ipc://{folder}/model"
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 0
        fields = settings.model_dump_json(include=set(EngineSettings.model_fields))
        command = ["--socket", address, "--parent", str(os.getpid()), "--settings", fields]
        try:
            socket.bind(address)
            # A session of its own: a Ctrl-C in the terminal reaches the front alone.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "engine.process.worker", *command),
                *(("--hook", hook) if hook else ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=_ENVIRONMENT | os.environ,
            )
        except (zmq.ZMQError, OSError) as error:
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineStartError(
                f"the model process cannot be started over {address}: {error} (is TMPDIR writable and short?)"
            ) from error
        return cls(folder, socket, process)

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    @property
    def cause(self) -> str:
        """How it ended, in words."""
        status = self._process.returncode
        if status is None:
            return "still running"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    async def hello(self, timeout_s: float) -> Ready:
        """Return the first message; raises EngineStartError with the process's last words."""
        first = asyncio.create_task(self.receive())
        await asyncio.wait({first, self._death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            ready = first.result()
            assert isinstance(ready, Ready)
            return ready
        first.cancel()
        why = f"not ready after {timeout_s:.0f} s"
        if self.dead:
            why = self.cause
            await asyncio.wait({self._output}, timeout=1)
        tail = self._tail.decode(errors="replace")
        raise EngineStartError(f"the model process did not start ({why}):\n{tail}")

    async def receive(self) -> FromModel:
        """Return the next message."""
        return decode_from_model(await self._socket.recv())

    def send(self, message: ToModel) -> None:
        """Queue a message. With no high-water mark the socket takes it at once, without a wait."""
        sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
        error = sent.exception() if sent.done() else None
        if error is not None and not isinstance(error, zmq.Again):  # Again: the process is gone
            log.error("a message to the model process was lost: %s", error)

    async def ended(self, timeout_s: float) -> bool:
        """Wait for the process's end, for at most `timeout_s`; True when it has ended."""
        await asyncio.wait({self._death}, timeout=timeout_s)
        return self.dead

    def terminate(self) -> None:
        """Ask for an orderly end."""
        if not self.dead:
            self._process.terminate()

    async def close(self) -> None:
        """Kill what still runs and remove every trace."""
        if not self.dead:
            self._process.kill()
        await self._death
        await asyncio.wait({self._output}, timeout=1)
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _pass_on_output(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(8192):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
