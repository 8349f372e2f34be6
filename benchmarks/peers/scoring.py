"""Logits of every position of a text from our model, by either of its ways through the kernels."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.base import Prompt
from engine.kv.pages import PagePool
from engine.models.config import ModelConfig
from engine.models.step import Batch, Ints, Output

_PAGE = 16


class Model(Protocol):
    """What an engine needs of a model, whatever its backend."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def step(self, batch: Batch, pool: PagePool, keep: list[int]) -> Output: ...


def score(
    model: Model, windows: list[Prompt], path: Literal["prefill", "decode"]
) -> dict[str, list[float] | list[int]]:
    """Return log-probabilities and likeliest tokens (see Subject.score), window after window.

    `prefill` takes each window as one prompt; `decode` takes all windows together, token by token,
    so that the kernels for few rows are judged too. Windows are of one length.
    """
    logits = _by_prompt(model, windows) if path == "prefill" else _by_token(model, windows)
    return {"logprobs": logits[0].flatten().tolist(), "top1": logits[1].flatten().tolist()}


def _by_prompt(model: Model, windows: list[Prompt]) -> tuple[Tensor, Tensor]:
    found = []
    for window in windows:
        pool, tables = _pages(model, 1, len(window))
        batch = Batch(
            tokens=np.asarray(window, np.int32),
            slots=np.arange(len(window), dtype=np.int64),
            offsets=np.zeros(1, np.int32),
            counts=np.array([len(window)], np.int32),
            starts=np.zeros(1, np.int32),
            tables=tables,
            rows=np.arange(len(window) - 1, dtype=np.int32),
        )
        found.append(_judge(_logits(model, batch, pool), torch.tensor(window[1:])))
    return torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])


def _by_token(model: Model, windows: list[Prompt]) -> tuple[Tensor, Tensor]:
    tokens = np.asarray(windows, np.int32)
    count, length = tokens.shape
    pool, tables = _pages(model, count, length)
    places = np.arange(count, dtype=np.int32)
    found = []
    for position in range(length - 1):
        page, offset = divmod(position, _PAGE)
        batch = Batch(
            tokens=tokens[:, position].copy(),
            slots=tables[:, page].astype(np.int64) * _PAGE + offset,
            offsets=places,
            counts=np.ones(count, np.int32),
            starts=np.full(count, position, np.int32),
            tables=np.ascontiguousarray(tables[:, : page + 1]),
            rows=places,
        )
        found.append(_judge(_logits(model, batch, pool), torch.tensor(tokens[:, position + 1]).long()))
    return torch.stack([f[0] for f in found], 1), torch.stack([f[1] for f in found], 1)


def _logits(model: Model, batch: Batch, pool: PagePool) -> Tensor:
    """Logits [rows, vocabulary] of a batch. The one place that knows what a step returns."""
    return model.step(batch, pool, list(range(len(batch.rows)))).logits


def _judge(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each `wanted` token, and the likeliest one."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, wanted[:, None])[:, 0], logits.argmax(-1)


def _pages(model: Model, sequences: int, length: int) -> tuple[PagePool, Ints]:
    """A pool that just holds `sequences` of `length` tokens, and their tables [sequences, pages]."""
    config = model.config
    each = -(-length // _PAGE)
    pool = PagePool(
        layers=config.layers,
        pages=each * sequences,
        page_size=_PAGE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )
    return pool, np.arange(each * sequences, dtype=np.int32).reshape(sequences, each)
