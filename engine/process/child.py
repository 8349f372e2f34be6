"""One life of the model process: its folder, socket, output and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import threading
from typing import Any

import zmq
import zmq.asyncio

from engine.messages import FromModel, Ready, ToModel, decode_from_model, encode
from engine.process.spawn import EngineStartError, Spawned

_TAIL_BYTES = 8000
log = logging.getLogger("quaver.engine")


class ModelProcess:
    """A child process and the socket to it. Made by `adopt`; `close` leaves nothing behind."""

    def __init__(
        self,
        spawned: Spawned,
        socket: zmq.asyncio.Socket,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        self.pid = spawned.process.pid
        self._folder = spawned.folder
        self._process = spawned.process
        self._socket = socket
        self._pipe = pipe
        self._tail = b""
        self._output = asyncio.create_task(self._pass_on(output))
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._await_death, args=(self._death,), daemon=True).start()

    @classmethod
    async def adopt(cls, context: zmq.asyncio.Context, spawned: Spawned) -> ModelProcess:
        """Listen to a spawned process. Kills it and raises EngineStartError when that cannot be."""
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 0
        try:
            socket.bind(spawned.address)
        except zmq.ZMQError as error:
            socket.close()
            spawned.kill()
            raise EngineStartError(
                f"no way to the model process over {spawned.address}: {error} (is TMPDIR writable and short?)"
            ) from error
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), spawned.process.stdout
        )
        return cls(spawned, socket, output, pipe)

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
        either: set[asyncio.Future[Any]] = {first, self._death}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
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
        await asyncio.wait({self._death})
        await asyncio.wait({self._output}, timeout=1)
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        self._pipe.close()
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _await_death(self, death: asyncio.Future[None]) -> None:
        """Run in a thread of its own: reap the process, then tell the loop, if that still runs."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):
            death.get_loop().call_soon_threadsafe(death.set_result, None)

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        while data := await output.read(8192):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()
