"""Logits of every position of a text from our model, by either of its ways through the kernels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from benchmarks.peers.base import Prompt
from engine.kv.pages import PagePool
from engine.models.llama import Batch, Llama, Prefill

_PAGE = 16


def score(
    model: Llama, windows: list[Prompt], path: Literal["prefill", "decode"]
) -> dict[str, list[float] | list[int]]:
    """Return log-probabilities and likeliest tokens (see Subject.score), window after window.

    `prefill` takes each window as one prompt; `decode` takes all windows together, token by token,
    so that the kernels for few rows are judged too. Windows are of one length.
    """
    logits = _by_prompt(model, windows) if path == "prefill" else _by_token(model, windows)
    return {"logprobs": logits[0].flatten().tolist(), "top1": logits[1].flatten().tolist()}


def _by_prompt(model: Llama, windows: list[Prompt]) -> tuple[Tensor, Tensor]:
    found = []
    for window in windows:
        pool, tables = _pages(model, 1, len(window))
        positions = torch.arange(len(window))
        batch = Batch(
            tokens=torch.tensor(window),
            positions=positions,
            slots=positions,
            decode_table=tables[:0],
            decode_lengths=torch.empty(0, dtype=torch.int64),
            prefills=[Prefill(0, len(window), 0, tables)],
            rows=positions,
            detail=None,
        )
        found.append(_judge(_logits(model, batch, pool)[:-1], torch.tensor(window[1:])))
    return torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])


def _by_token(model: Llama, windows: list[Prompt]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(windows)
    count, length = tokens.shape
    pool, tables = _pages(model, count, length)
    found = []
    for position in range(length - 1):
        slots = tables[:, position // _PAGE] * _PAGE + position % _PAGE
        batch = Batch(
            tokens=tokens[:, position],
            positions=torch.full((count,), position),
            slots=slots,
            decode_table=tables[:, : position // _PAGE + 1],
            decode_lengths=torch.full((count,), position + 1),
            prefills=[],
            rows=torch.arange(count),
            detail=None,
        )
        found.append(_judge(_logits(model, batch, pool), tokens[:, position + 1]))
    return torch.stack([f[0] for f in found], 1), torch.stack([f[1] for f in found], 1)


def _logits(model: Llama, batch: Batch, pool: PagePool) -> Tensor:
    """Logits [rows, vocabulary] of a batch. The one place that knows what a step returns."""
    logits, _ = model.step(batch, pool)
    return logits


def _judge(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each `wanted` token, and the likeliest one."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, wanted[:, None])[:, 0], logits.argmax(-1)


def _pages(model: Llama, sequences: int, length: int) -> tuple[PagePool, Tensor]:
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
    pool.take(each * sequences)
    return pool, torch.arange(each * sequences).view(sequences, each)
