"""What a client may send before anybody knows who it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from quaver import protocol


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b"got " + (await receive())["body"]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(app: Any, http: type[protocol.PatientProtocol]) -> AsyncIterator[int]:
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=0, http=http, ws="none", lifespan="off", log_level="error", timeout_keep_alive=1
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "HEAD_S", 0.5)
    async with served(echo, protocol.PatientProtocol) as port:
        yield port


async def talk(port: int, *pieces: bytes | float, end: bool = True) -> bytes:
    """Send pieces (numbers are pauses) and return everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""
    finally:
        writer.close()


GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n"


async def test_ordinary_requests_pass(port: int) -> None:
    keep = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    assert (await talk(port, GET + b"\r\n")).endswith(b"got ")
    assert (await talk(port, keep, 0.3, keep, 0.3, GET, 0.2, b"\r\n")).count(b"200 OK") == 3
    assert (await talk(port, POST + b"\r\n", 0.8, b"hi")).endswith(b"got hi")
    assert (await talk(port, GET + b"x-long: " + b"a" * 60_000, 0.1, b"\r\n\r\n")).endswith(b"got ")


@pytest.mark.parametrize("begun", [b"", GET, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /"])
async def test_a_head_that_does_not_come_closes_the_connection(port: int, begun: bytes) -> None:
    start = asyncio.get_running_loop().time()
    answer = await talk(port, begun)
    assert 0.3 < asyncio.get_running_loop().time() - start < 2
    assert answer.count(b"200 OK") == begun.count(b"\r\n\r\n")


async def test_an_endless_head_is_cut_off(port: int) -> None:
    lines = (b"x-%d: " % i + b"a" * 1000 + b"\r\n" for i in range(1000))
    assert b"200 OK" not in await talk(port, GET, *lines)
    assert b"200 OK" not in await talk(port, GET + b"x: ", *[b"a" * 10_000] * 100)
    assert (await talk(port, GET + b"x: " + b"a" * 70_000, 0.2)).startswith(b"HTTP/1.1 400")


async def test_who_asks_for_a_websocket_is_answered_without(port: int) -> None:
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    assert b"200 OK" in await talk(port, upgrade)


async def test_a_reader_who_takes_nothing_is_gone_and_a_slow_one_is_not() -> None:
    class Impatient(protocol.PatientProtocol):
        write_s = 0.5

    told: list[str] = []

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watcher = asyncio.create_task(receive())
        for _ in range(24):
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
            if watcher.done():
                told.append(watcher.result()["type"])
                return
        watcher.cancel()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async with served(flood, Impatient) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\r\n")
        got = 0
        while data := await reader.read(1_000_000):
            got += len(data)
            await asyncio.sleep(0.01)
        assert got > 24_000_000
        writer.close()
        assert told == []

        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(GET + b"\r\n")
        async with asyncio.timeout(10):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        writer.close()
        assert told == ["http.disconnect"]
