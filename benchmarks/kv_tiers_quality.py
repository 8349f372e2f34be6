"""What a round trip through host or disk takes from a text's probabilities, and how small it makes its pages.

The first part of each window is computed, packed, unpacked; the rest is then scored with it and compared
with the same rest after pages that stayed where they were: same kernels, same batch, same text.
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
from engine.kv.int8 import BlockLayout, pack, unpack
from engine.kv.pages import PagePool
from engine.kv.tiers import BLOCK_PAGES
from engine.models.native import NativeLlama
from engine.models.step import Batch
from engine.settings import EngineSettings

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


@dataclass
class Judged:
    """Of each window: how much more surprised the model is a token, in nats, and where it agrees."""

    more: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it for the JSON."""
        found = intervals.mean(self.more)
        return {
            "perplexity_delta": math.exp(found.median) - 1,
            "lower95": math.exp(found.lower95) - 1,
            "upper95": math.exp(found.upper95) - 1,
            "top1_agreement": float(np.mean(self.agree)),
            "tokens": len(self.agree),
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
        self._pool = PagePool(**sizes, pages=-(-longest // page), page_size=page, dtype=engines.model.dtype)
        self._table = self._pool.take(self._pool.pages)
        self._file = memoryview(bytearray(block_file.file_bytes(self.layout.size)))

    def rest(self, text: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Compute tokens [start, end) of a text; return their log probabilities [end − start, V]."""
        positions = np.arange(start, end)
        page = self._pool.page_size
        batch = Batch(
            tokens=np.array(text[start:end], np.int32),
            slots=np.array(self._table)[positions // page] * page + positions % page,
            offsets=np.array([0], np.int32),
            counts=np.array([end - start], np.int32),
            starts=np.array([start], np.int32),
            tables=np.array([self._table], np.int32),
            rows=np.arange(end - start, dtype=np.int32),
        )
        return self._model.step(batch, self._pool, list(range(end - start))).logits.log_softmax(-1)

    def round_trip(self, tokens: int) -> tuple[list[int], list[int]]:
        """Take the first `tokens` through host and disk; return the bytes of every block in each."""
        host, disk = [], []
        for at in range(0, tokens // self._pool.page_size, BLOCK_PAGES):
            pages = self._table[at : at + BLOCK_PAGES]
            block = np.empty(self.layout.size, np.uint8)
            if not pack(self._pool, pages, self.layout, block, kernels=self._kernels):
                raise ValueError("a page of the text has values that no code stands for")
            read, size = self._through_file(block)
            if not np.array_equal(read, block):
                raise ValueError("a block came back from its file as another")
            unpack(self._pool, read, pages, self.layout, kernels=self._kernels)
            host.append(block.size)
            disk.append(size)
        return host, disk

    def _through_file(self, block: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
        header = block_file.encode(self._file, block, _LABEL, _KEY)
        return block_file.decode(self._file[: header.file_bytes], header, _KEY), header.file_bytes


def measure(engines: Engines, text: Text, windows: Sequence[Window]) -> dict[str, Any]:
    """Return what round trips do to each kind of window, and the bytes of blocks ÷ those of their pages."""
    bench = Bench(engines, max(window.length for window in windows))
    judged, host, disk = {}, [], []
    for window in windows:
        found = Judged()
        texts = _texts(text, window)
        for ids in texts:
            console.print(f"[dim]round trips: {window.stored} of {window.length} tokens")
            bench.rest(ids, 0, window.stored)
            plain = _scored(bench, ids, window)
            sizes = bench.round_trip(window.stored)
            host += sizes[0]
            disk += sizes[1]
            through = _scored(bench, ids, window)
            found.more.append(float(np.mean(plain[0] - through[0])))
            found.agree += (plain[1] == through[1]).tolist()
        judged[f"{window.stored} of {window.length} tokens"] = found.as_dict() | {"windows": len(texts)}
    return {
        "without dropping": judged,
        "bytes_ratio": {
            "host": float(np.mean(host)) / bench.block_bytes,
            "disk": float(np.mean(disk)) / bench.block_bytes,
        },
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The figures of the issue; perplexity after the worst of the round trips. The disk gives back the bytes
    that it got, so that the host's figure is its own too."""
    return {
        "host_bytes_ratio": found["bytes_ratio"]["host"],
        "disk_bytes_ratio": found["bytes_ratio"]["disk"],
        "host_perplexity_delta": max(row["perplexity_delta"] for row in found["without dropping"].values()),
    }


def _texts(text: Text, window: Window) -> list[list[int]]:
    starts = range(0, len(text.tokens) - window.length + 1, window.length)
    return [text.tokens[start : start + window.length] for start in starts][: window.most]


def _scored(bench: Bench, ids: Sequence[int], window: Window) -> tuple[NDArray[Any], NDArray[Any]]:
    """Log probability of each token after the stored ones but the first, and the likeliest there."""
    logprobs = bench.rest(ids, window.stored, window.length)[:-1]
    wanted = torch.tensor(ids[window.stored + 1 :])
    return logprobs.gather(-1, wanted[:, None])[:, 0].numpy(), logprobs.argmax(-1).numpy()
