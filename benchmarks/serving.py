"""What HTTP costs, and how long a start takes: the real server, with real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import intervals
from benchmarks.peers.process import PeerError, clean_environment
from benchmarks.rows import Peers, Variant, console
from benchmarks.speed import PROMPT
from benchmarks.text import Text

STREAMS = 16
_POLL_S = 0.01
_PATIENCE_S = 120


@dataclass(frozen=True)
class Server:
    """A `quaver serve` that runs, and what it took to become ready."""

    port: int
    key: str
    ready_s: float


@contextlib.contextmanager
def served(threads: int) -> Iterator[Server]:
    """Run `quaver serve` with the default settings and `threads` threads. Raises PeerError."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quaver-bench-") as folder, Path(folder, "log").open("wb") as log:
        environment = clean_environment(
            QUAVER_PORT=str(port), QUAVER_STATE_DIR=folder, QUAVER_THREADS=str(threads)
        )
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "quaver", "serve"], env=environment, stdout=log, stderr=log
        )
        try:
            while not _ready(port):
                if process.poll() is not None or time.monotonic() - began > _PATIENCE_S:
                    raise PeerError(f"the server does not start:\n{Path(log.name).read_text()[-3000:]}")
                time.sleep(_POLL_S)
            spent = time.monotonic() - began
            yield Server(port, Path(folder, "keys", "client.key").read_text().strip(), spent)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def starts(threads: int, times: int) -> list[float]:
    """Seconds from the start of the command to an answer 200 of /ready, after one start that warms caches."""
    found = []
    for number in range(-1, times):
        console.print(f"[dim]start to ready: {'warming up' if number < 0 else f'{number + 1} of {times}'}")
        with served(threads) as server:
            found.append(server.ready_s)
    return found[1:]


def overhead(peers: Peers, bare: Variant, text: Text, rounds: int, tokens: int) -> dict[str, Any]:
    """Throughput of 16 streams over HTTP beside that of the engine alone just before and just after.

    Both decode the same prompts over the same lengths with the same settings; the engine alone has
    nobody who listens. Only the time in which all sequences are decoded counts.
    """
    shares, streamed, alone, clients = [], [], [], []
    with served(peers.threads) as server:
        for number in range(-1, rounds):
            console.print(f"[dim]http: {'warming up' if number < 0 else f'round {number + 1} of {rounds}'}")
            prompts = [text.prompt(PROMPT, (number + 1) * STREAMS + i) for i in range(STREAMS)]
            before = _speed_of(peers, bare, prompts, tokens)
            seen = stream_all(server, prompts, tokens)
            speed = (before + _speed_of(peers, bare, prompts, tokens)) / 2
            if number >= 0:
                streamed.append(seen["tokens_per_s"])
                alone.append(speed)
                clients.append(seen["cpu_s"] / seen["wall_s"] / (os.cpu_count() or 1))
                shares.append(1 - seen["tokens_per_s"] / speed)
    return {
        "overhead": intervals.of(shares).median,
        "upper95": intervals.of(shares).upper95,
        "streamed_tokens_per_s": streamed,
        "engine_tokens_per_s": alone,
        "client_share_of_all_cores": intervals.of(clients).median,
    }


def _speed_of(peers: Peers, bare: Variant, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of the engine alone, all prompts side by side."""
    peer, steps = peers.of(bare), tokens - len(prompts)
    peer.ask("prepare", prompts=prompts, steps=tokens, observed=False, **bare.how)
    return len(prompts) * steps / float(peer.ask("decode", steps=steps, observed=False, **bare.how))


def stream_all(server: Server, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Stream `tokens` tokens of every prompt at once; see benchmarks.client for what is found."""
    asked = {"port": server.port, "key": server.key, "prompts": prompts, "tokens": tokens}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.client"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise PeerError(f"the streaming client failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
