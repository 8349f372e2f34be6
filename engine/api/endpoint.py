"""The ASGI endpoint of a generation: read, prepare, run, answer, and notice when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from engine.api.body import DisconnectedError, read_body
from engine.api.errors import ApiError
from engine.api.generation import Generation
from engine.api.jobs import Job
from engine.api.meta import request_meta
from engine.api.replies import Reply
from engine.api.state import ApiState
from engine.hooks import StreamHook
from engine.messages import RequestMeta
from engine.process.client import notify

Prepare = Callable[[ApiState, bytes, RequestMeta], Awaitable[Job]]

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


class GenerationEndpoint:
    """POST /v1/chat/completions or /v1/completions."""

    def __init__(self, state: ApiState, prefix: str, prepare: Prepare, reply: type[Reply]) -> None:
        self.state = state
        self.prefix = prefix
        self.prepare = prepare
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.state
        headers = Headers(scope=scope)
        principal = scope.get("state", {}).get("principal")
        meta = request_meta(
            headers, principal, state.route_labels, state.settings.priorities, prefix=self.prefix
        )
        try:
            body = await read_body(
                headers, receive, state.settings.max_body_bytes, state.settings.body_timeout_s
            )
            state.require_ready()
            with state.slot(meta):
                job = await self.prepare(state, body, meta)
                state.admit(meta, len(job.submits))
                with Generation(state, job) as generation:
                    await self._serve(generation, receive, _Writer(send, generation, state.stream_hook))
        except DisconnectedError:
            return
        except ApiError as error:
            notify(state.observers, "on_rejected", meta, error.status, error.code)
            error.headers["x-request-id"] = meta.request_id
            await error.response()(scope, receive, send)

    async def _serve(self, generation: Generation, receive: Receive, writer: _Writer) -> None:
        """Answer; a client that leaves ends the generation, a failure after the start ends the stream."""
        watcher = asyncio.create_task(_watch(receive, generation))
        reply = self.reply(self.state, generation)
        try:
            if generation.job.stream:
                await _stream(generation, reply, writer)
            else:
                await _whole(generation, reply, writer)
        except DisconnectedError:
            await generation.settle()
        except ApiError as error:
            await generation.settle()
            await writer.fail(error)
        finally:
            watcher.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.disconnect()


async def _whole(generation: Generation, reply: Reply, writer: _Writer) -> None:
    deltas = []
    while not generation.over:
        deltas += await generation.next()
    await writer.whole(reply.whole(deltas))


async def _stream(generation: Generation, reply: Reply, writer: _Writer) -> None:
    """Send events as they come. The 200 waits for the engine's first word, so that refusals can be errors."""
    deltas = await generation.next()
    await writer.start()
    events = reply.opening() + [reply.chunk(delta) for delta in deltas]
    while not generation.over:
        if events:
            await writer.events(events)
        events = [reply.chunk(delta) for delta in await generation.next()]
    if generation.job.include_usage:
        events.append(reply.usage_chunk())
    await writer.events(events, last=True)


class _Writer:
    """Writes the response; a client that is gone becomes DisconnectedError. The server ends slow readers."""

    def __init__(self, send: Send, generation: Generation, hook: StreamHook | None) -> None:
        self._send_raw = send
        self._generation = generation
        self._hook = hook
        self._pieces = 0
        self._id = (b"x-request-id", generation.job.meta.request_id.encode())
        self._started = False

    async def whole(self, content: object) -> None:
        await self._respond(200, [(b"content-type", b"application/json")], _encode(content))

    async def start(self) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_SSE, self._id]})

    async def events(self, events: list[dict[str, object]], *, last: bool = False) -> None:
        data = b"".join(b"data: " + _encode(event) + b"\n\n" for event in events)
        data = await self._out(data + b"data: [DONE]\n\n" if last else data)
        await self._body(data, more=not last)

    async def _out(self, data: bytes) -> bytes:
        """Let faults act on a piece of a stream. A cut looks like a client that is gone."""
        generation, number = self._generation, self._pieces
        self._pieces += 1
        if self._hook is None or not self._hook.active:
            return data
        meta = generation.job.meta
        found, faults = await self._hook.piece(meta, number, data, lambda: generation.broken)
        generation.touch(faults)
        if found is None:
            generation.disconnect()
            raise DisconnectedError
        return found

    async def fail(self, error: ApiError) -> None:
        """Answer with the error: as a response, or as the last event of a stream."""
        if self._started:
            await self._body(b"data: " + _encode(error.body()) + b"\n\n", more=False)
            return
        response = error.response()
        await self._respond(error.status, list(response.raw_headers), bytes(response.body))

    async def _respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._started = True
        kept = [(name, value) for name, value in headers if name != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*kept, length, self._id]}
        )
        await self._body(body, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            await self._send_raw(message)
        except OSError:
            self._generation.disconnect()
            raise DisconnectedError from None
