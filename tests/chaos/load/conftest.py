"""A server that streams what the test wrote for it, over real sockets, in the wire form of the API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from chaos.load.reading import now


@dataclass
class Script:
    """What the next answers are, and what became of them."""

    chunks: list[str] = field(default_factory=lambda: ["The ", "capital ", "is ", "Paris."])
    gap_s: float = 0.01
    before_s: float = 0.0
    status: int = 200
    raw: bytes | None = None  # the whole answer, in place of all below
    tokens: int | None = None  # of the usage chunk; None: one a chunk
    cut: bool = False  # close without [DONE]
    stall: tuple[float, float] = (0.0, 0.0)  # `chaos.load.reading.now` between which nothing is answered
    served: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    hung_up: int = 0
    url: str = ""


def _event(**data: object) -> bytes:
    payload = f"data: {json.dumps(data)}\n\n".encode()
    return f"{len(payload):x}\r\n".encode() + payload + b"\r\n"


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        return
    script.served += 1
    length = next(
        int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")
    )
    script.asked.append(json.loads(await reader.readexactly(length)))
    if script.stall[0] <= now() < script.stall[1]:
        await asyncio.sleep(script.stall[1] - now())
    if script.raw is not None:
        writer.write(script.raw)
        return
    if script.status != 200:
        body = b'{"error": {"message": "no", "type": "x", "param": null, "code": "breaker_open"}}'
        writer.write(
            f"HTTP/1.1 {script.status} No\r\nretry-after: 0.05\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        return
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r1\r\n"
        b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    writer.write(_event(id="r1", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
    await writer.drain()
    await asyncio.sleep(script.before_s)
    for chunk in script.chunks:
        writer.write(_event(id="r1", choices=[{"index": 0, "delta": {"content": chunk}}]))
        await writer.drain()
        await asyncio.sleep(script.gap_s)
    if script.cut:
        writer.write(b"0\r\n\r\n")
        return
    tokens = len(script.chunks) if script.tokens is None else script.tokens
    writer.write(_event(id="r1", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    writer.write(_event(id="r1", choices=[], usage={"prompt_tokens": 3, "completion_tokens": tokens}))
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _serve(script: Script, ready: Callable[[int], None], stop: asyncio.Event) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = asyncio.create_task(_answer(script, reader, writer))
        try:
            await answer
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            script.hung_up += 1
        finally:
            writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    ready(server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()


@pytest.fixture
def script() -> Iterator[Script]:
    """A running server with its script; `script.url` is where it listens."""
    script = Script()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def ready(port: int) -> None:
        script.url = f"http://127.0.0.1:{port}"
        started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(script, ready, stop)))
    thread.start()
    started.wait(5)
    yield script
    loop.call_soon_threadsafe(stop.set)
    thread.join(5)
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
