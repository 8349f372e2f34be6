"""HTTP/1.1 by uvicorn, with bounds on what a client may send before anybody knows who it is, and on how
long it may leave unread what it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0  # for the head of a request, from the connection or from its first byte
MAX_HEAD = 64 * 1024  # bytes of request line and headers


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request head is too slow or too long, or whose reader is `write_s` late.

    Bodies are the endpoints' matter. A head that arrives whole in one read is taken even if it is
    somewhat longer.
    """

    write_s = 60.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head = 0  # bytes of the head so far
        self._patience: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # runs while more is unread than is buffered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._read_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_on()
        self._reading = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._read_on()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._patience is None or self.transport.is_closing():
            return
        self._head += len(data)
        if self._head > MAX_HEAD:
            self._head_is_here()
            self.send_400_response(f"The request line and headers may have {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._patience is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head = 0
        self._patience = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_is_here(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _read_on(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _unsupported_upgrade_warning(self) -> None:
        """There are no WebSockets here: the request is answered as if nobody had asked for one."""
