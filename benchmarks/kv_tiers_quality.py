"""What a round trip through host or disk takes from a text's probabilities, and how small it makes its pages.

The first part of each window is computed, packed, unpacked; the rest is then scored with it and compared
with the same rest after pages that stayed where they were: same kernels, same batch, same text. With
dropping, the blocks leave out what QUAVER_KV_DROP=0.65 says: the longer a prompt the more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import intervals
from benchmarks.kv_tiers_drive import Engines
from benchmarks.rows import console
from benchmarks.text import Text
from engine.kv import block_file
from engine.kv.block_file import Label
from engine.kv.drop import DropPolicy
from engine.kv.int8 import BlockLayout, pack, unpack
from engine.kv.pages import BLOCK_PAGES, PagePool
from engine.models.native import NativeLlama
from engine.models.step import Batch, Output
from engine.settings import EngineSettings

DROP = 0.65  # where a third of 1,536 tokens goes
_KEY = bytes(32)
_LABEL = Label(bytes(32), bytes(16), bytes(32), bytes(16))


@dataclass(frozen=True)
class Window:
    """Texts of `length` tokens, of which the first `stored` go through a tier."""

    length: int
    stored: int
    most: int  # texts


WHOLE = (Window(512, 256, 16), Window(2048, 1536, 5))
QUICK = (Window(512, 256, 9),)


#: Log probability of each token after the stored ones but the first, and the likeliest there.
Scores = tuple[NDArray[Any], NDArray[Any]]


@dataclass
class Judged:
    """Of each window: how much more surprised the model is a token, in nats, and where it agrees."""

    more: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    host: list[int] = field(default_factory=list)  # bytes of each block
    disk: list[int] = field(default_factory=list)

    def compare(self, plain: Scores, through: Scores) -> None:
        """Take in a window: its scores after pages that stayed, and after a round trip."""
        self.more.append(float(np.mean(plain[0] - through[0])))
        self.agree += (plain[1] == through[1]).tolist()

    def as_dict(self, block_bytes: int) -> dict[str, Any]:
        """Return it for the JSON; `block_bytes` are those of a block's pages."""
        found = intervals.mean(self.more)
        return {
            "perplexity_delta": math.exp(found.median) - 1,
            "lower95": math.exp(found.lower95) - 1,
            "upper95": math.exp(found.upper95) - 1,
            "top1_agreement": float(np.mean(self.agree)),
            "tokens": len(self.agree),
            "windows": len(self.more),
            "host_bytes_ratio": float(np.mean(self.host)) / block_bytes,
            "disk_bytes_ratio": float(np.mean(self.disk)) / block_bytes,
        }


class Bench:
    """A model, and a pool with one text in it."""

    def __init__(self, engines: Engines, longest: int) -> None:
        config, page = engines.model.config, EngineSettings().page_size
        sizes = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
        self.layout = BlockLayout(**sizes, tokens=BLOCK_PAGES * page)
        self.block_bytes = self.layout.tokens * engines.token_bytes
        self._model = engines.model
        self._kernels = engines.model.kernels if isinstance(engines.model, NativeLlama) else None
        self.pool = PagePool(**sizes, pages=-(-longest // page), page_size=page, dtype=engines.model.dtype)
        self._table = self.pool.take(self.pool.pages)
        self._file = memoryview(bytearray(block_file.file_bytes(self.layout.size)))

    def step(self, text: Sequence[int], start: int, end: int, scored: int = 0) -> Output:
        """Compute tokens [start, end) of a text; the last `scored` are asked what they attend to."""
        positions = np.arange(start, end)
        page = self.pool.page_size
        batch = Batch(
            tokens=np.array(text[start:end], np.int32),
            slots=np.array(self._table)[positions // page] * page + positions % page,
            offsets=np.array([0], np.int32),
            counts=np.array([end - start], np.int32),
            starts=np.array([start], np.int32),
            tables=np.array([self._table], np.int32),
            rows=np.arange(end - start, dtype=np.int32) if start else np.empty(0, np.int32),
            scored=np.array([end - scored], np.int32) if scored else None,
        )
        self.pool.revive(batch.slots)
        return self._model.step(batch, self.pool, list(range(len(batch.rows))))

    def scores(self, text: Sequence[int], window: Window) -> Scores:
        """Score a text after its stored tokens."""
        logprobs = self.step(text, window.stored, window.length).logits[:-1].log_softmax(-1)
        wanted = torch.tensor(text[window.stored + 1 :])
        return logprobs.gather(-1, wanted[:, None])[:, 0].numpy(), logprobs.argmax(-1).numpy()

    def round_trip(self, keep: NDArray[np.bool_], found: Judged) -> None:
        """Take of a text's first tokens those to `keep` through host and disk; note the blocks' bytes."""
        for at in range(0, len(keep) // self.pool.page_size, BLOCK_PAGES):
            pages = self._table[at : at + BLOCK_PAGES]
            mine = keep[at * self.pool.page_size :][: self.layout.tokens]
            block = np.empty(self.layout.partial_size(int(mine.sum())), np.uint8)
            if not pack(self.pool, pages, self.layout, block, keep=mine, kernels=self._kernels):
                raise ValueError("a page of the text has values that no code stands for")
            read, size = self._through_file(block)
            if not np.array_equal(read, block):
                raise ValueError("a block came back from its file as another")
            there = unpack(self.pool, read, pages, self.layout, kernels=self._kernels)
            self.pool.dead[pages] = ~there.reshape(BLOCK_PAGES, -1)
            found.host.append(block.size)
            found.disk.append(size)

    def _through_file(self, block: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
        header = block_file.encode(self._file, block, _LABEL, _KEY)
        return block_file.decode(self._file[: header.file_bytes], header, _KEY), header.file_bytes


def measure(engines: Engines, text: Text, windows: Sequence[Window]) -> dict[str, Any]:
    """Return what round trips do to each kind of window, and the bytes of blocks ÷ those of their pages."""
    bench = Bench(engines, max(window.length for window in windows))
    ways = {"without dropping": DropPolicy(0.0)}
    if engines.model.drops:
        ways["with dropping"] = DropPolicy(DROP)
    judged: dict[str, dict[str, Any]] = {way: {} for way in ways}
    for window in windows:
        found = {way: Judged() for way in ways}
        for ids in _texts(text, window):
            console.print(f"[dim]round trips: {window.stored} of {window.length} tokens")
            mass = bench.step(ids, 0, window.stored, DropPolicy(0.0).window).mass.get(0)
            whole = bench.pool.keys.clone(), bench.pool.values.clone()
            plain = bench.scores(ids, window)
            for way, policy in ways.items():
                bench.pool.keys.copy_(whole[0])
                bench.pool.values.copy_(whole[1])
                judgement = None if mass is None else policy.judge(mass)
                keep = np.ones(window.stored, np.bool_) if judgement is None else judgement.keep
                bench.round_trip(keep, found[way])
                found[way].compare(plain, bench.scores(ids, window))
                bench.pool.dead[:] = False
        name = f"{window.stored} of {window.length} tokens"
        for way, one in found.items():
            judged[way][name] = one.as_dict(bench.block_bytes)
    return {"drop": DROP, **judged}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The figures of the issue: without dropping the worst window's, with it the longest's, as more is left
    out of longer prompts. The disk gives back the bytes that it got: its perplexity is the host's."""
    rows = list(found["without dropping"].values())
    figures = {
        "host_bytes_ratio": max(row["host_bytes_ratio"] for row in rows),
        "disk_bytes_ratio": max(row["disk_bytes_ratio"] for row in rows),
        "host_perplexity_delta": max(row["perplexity_delta"] for row in rows),
    }
    if dropping := list(found.get("with dropping", {}).values()):
        figures["disk_bytes_ratio_dropping"] = dropping[-1]["disk_bytes_ratio"]
    return figures


def _texts(text: Text, window: Window) -> list[list[int]]:
    starts = range(0, len(text.tokens) - window.length + 1, window.length)
    return [text.tokens[start : start + window.length] for start in starts][: window.most]
