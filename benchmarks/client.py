"""Streams from a server with as little work as possible: bytes are counted, nothing is decoded.

Reads what to ask as JSON on standard input: port, key, prompts (token ids), tokens for each. Writes
`tokens_per_s` while all streams were running, and the processor's and the clock's seconds of it all.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field

_EVENT = b"data: {"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class Stream:
    """When events came, and how many tokens they stand for."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0

    def rate(self, start: float, end: float) -> float:
        """Tokens per second between two times; an event stands for its share of all tokens."""
        events = sum(start < at <= end for at in self.times)
        return events * (self.tokens / len(self.times)) / (end - start)


async def stream(port: int, key: str, prompt: list[int], tokens: int) -> Stream:
    """Ask for a completion and read it to its end."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    found, kept = Stream(), b""
    while data := await reader.read(1 << 16):
        events = (kept + data).count(_EVENT) - kept.count(_EVENT)
        found.times += [time.perf_counter()] * events
        kept = (kept + data)[-1000:]
    writer.close()
    usage = _USAGE.findall(kept)
    if not usage:
        raise RuntimeError(f"the stream did not end well: {kept[-500:].decode(errors='replace')}")
    found.times.pop()  # the usage came in an event of its own
    found.tokens = int(usage[-1])
    return found


async def main() -> None:
    """Stream everything at once."""
    asked = json.load(sys.stdin)
    began, used = time.perf_counter(), time.process_time()
    streams = await asyncio.gather(
        *(stream(asked["port"], asked["key"], prompt, asked["tokens"]) for prompt in asked["prompts"])
    )
    start, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    answer = {
        "tokens_per_s": sum(s.rate(start, end) for s in streams),
        "cpu_s": time.process_time() - used,
        "wall_s": time.perf_counter() - began,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    asyncio.run(main())
