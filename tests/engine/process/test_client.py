"""EngineClient with a real child process, killed, stopped and starved."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.messages import AttachFault, RequestMeta, SamplingParams, StepOutput, Submit
from engine.process.channel import Channel
from engine.process.client import EngineClient, EngineLostError
from engine.process.spawn import EngineStartError, spawn
from engine.settings import EngineSettings


class Listener:
    """Keeps what an observer hears."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.tokens = 0

    def on_engine(self, state: str) -> None:
        self.states.append(state)

    def on_step(self, output: StepOutput) -> None:
        self.tokens += len(output.request_ids)
        raise RuntimeError("an observer that fails disturbs nobody")


def settings_of(write_folder: Callable) -> EngineSettings:
    folder, _ = write_folder(max_position_embeddings=200_000)
    return EngineSettings(
        model=str(folder), max_context=200_000, kv_tokens=200_000, threads=1, dtype="float32"
    )


@asynccontextmanager
async def running(settings: EngineSettings, **options) -> AsyncIterator[EngineClient]:
    client = EngineClient(settings, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.stop(grace_s=0)


def request(request_id: str, tokens: int, choice: int = 0) -> Submit:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Submit(meta=RequestMeta(request_id=request_id), choice=choice, token_ids=[5, 6], params=params)


async def drain(channel: Channel, choices: int = 1) -> tuple[list[int], list[str]]:
    """Return tokens per batch and finish reasons."""
    tokens: list[int] = []
    reasons: list[str] = []
    while len(reasons) < choices:
        batch = await asyncio.wait_for(channel.get(), 20)
        assert batch is not None
        tokens.append(len(batch.tokens))
        reasons += [finish.reason for finish in batch.finished]
    return tokens, reasons


async def ready_again(client: EngineClient, pid: int) -> None:
    async with asyncio.timeout(30):
        while client.ready is None or client.pid == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_a_process_that_loads_already_becomes_the_first(write_folder: Callable, monkeypatch) -> None:
    """It has its settings from the environment; the ones that follow get them from the client."""
    settings = settings_of(write_folder)
    for name in settings.model_fields_set:
        monkeypatch.setenv(f"QUAVER_{name.upper()}", str(getattr(settings, name)))
    spawned = spawn(None, None)
    for name in settings.model_fields_set:
        monkeypatch.delenv(f"QUAVER_{name.upper()}")
    async with running(settings, spawned=spawned) as client:
        assert client.pid == spawned.process.pid
        assert client.ready is not None
        assert client.ready.max_context == 200_000
        os.kill(spawned.process.pid, signal.SIGKILL)
        await ready_again(client, spawned.process.pid)
        assert client.ready.max_context == 200_000
        assert not spawned.folder.exists()
    assert gone(spawned.process.pid)


def test_a_process_that_nobody_adopts_leaves_nothing() -> None:
    spawned = spawn(None, None)
    spawned.kill()
    assert gone(spawned.process.pid)
    assert not spawned.folder.exists()


async def test_death_and_silence_end_requests_and_bring_a_new_process(write_folder: Callable) -> None:
    listener = Listener()
    async with running(settings_of(write_folder), observers=[listener], hung_s=3.0) as client:
        channel = client.submit(request("a", 5), request("a", 3, choice=1))
        tokens, reasons = await drain(channel, 2)
        client.release("a")
        assert (sum(tokens), sorted(reasons), listener.tokens) == (8, ["length", "length"], 8)
        assert client.open_choices == 0

        first = client.pid
        channel = client.submit(request("b", 100_000), request("b", 100_000, choice=1))
        await channel.get()
        os.kill(first, signal.SIGKILL)
        assert (await drain(channel, 2))[1] == ["error", "error"]
        with pytest.raises(EngineLostError):
            client.submit(request("c", 1))
        await ready_again(client, first)
        assert listener.states == ["ready", "lost", "restarting", "ready"]
        assert gone(first)

        second = client.pid
        channel = client.submit(request("d", 100_000))
        await channel.get()
        os.kill(second, signal.SIGSTOP)
        assert (await drain(channel))[1] == ["error"]
        await ready_again(client, second)
        assert gone(second)

        assert (await drain(client.submit(request("e", 3))))[1] == ["length"]
        channel = client.submit(request("f", 100_000))
        await channel.get()
        client.abort("f")
        assert (await drain(channel))[1] == ["abort"]
        last = client.submit(request("g", 100_000))
        pid, folder = client.pid, client._process._folder
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert (await drain(last))[1] == ["abort"]
    assert gone(pid)
    assert not folder.exists()
    assert listener.states[-1] == "stopped"


async def test_faults_are_confirmed_by_the_model_process(write_folder: Callable) -> None:
    heard: list[list[str]] = []
    async with running(settings_of(write_folder), hook="chaos.model_hook:factory") as client:
        client.fault_listeners.append(heard.append)
        fault = AttachFault(fault_id="f", kind="noise", params={"sigma": 2.0}, ttl_s=60)
        assert await client.attach_fault(fault)
        assert not await client.attach_fault(AttachFault(fault_id="g", kind="unheard of", ttl_s=60))
        assert client.faults_active == ["f"]
        with pytest.raises(OverflowError):
            await client.attach_fault(
                AttachFault(fault_id="h", kind="noise", params={"sigma": 10**30}, ttl_s=60)
            )
        assert await client.detach_fault("f")
        assert await client.detach_fault(None)
    assert heard[:2] == [["f"], ["f"]]
    assert client.faults_active == []


async def test_a_model_that_cannot_be_loaded_is_said_so_at_start() -> None:
    client = EngineClient(EngineSettings(model="/nowhere/model.gguf"))
    with pytest.raises(EngineStartError, match=r"did not start \(exit status 1\)(.|\n)*/nowhere/model.gguf"):
        await client.start()
    assert client.pid is None


def test_the_model_process_dies_with_the_front(write_folder: Callable, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from engine.process.client import EngineClient\n"
        "from engine.settings import EngineSettings\n"
        "async def main():\n"
        "    client = EngineClient(EngineSettings.model_validate_json(sys.argv[1]))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, str(script), settings_of(write_folder).model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        pid = int(front.stdout.readline())
        front.kill()
    until = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert gone(pid)
