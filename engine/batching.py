"""From the chunks of a plan to the arrays of one model call."""

from __future__ import annotations

import numpy as np

from engine.models.step import Batch, Detail
from engine.scheduler import Chunk, Sequence


def batch_of(chunks: list[Chunk], layers: list[int], detailed: list[Sequence], page_size: int) -> Batch:
    """Lay `chunks` out as one batch, a span each, in the plan's order.

    `detailed` are the emitting sequences that get detail of `layers`.
    """
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    offsets = ends - counts
    tables = _tables([(c.sequence, c.start + c.count) for c in chunks], page_size)
    positions = np.arange(ends[-1] if len(ends) else 0) - np.repeat(offsets - starts, counts)
    pages = tables[np.repeat(np.arange(len(chunks)), counts), positions // page_size]
    tokens: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    spans = {chunk.sequence.key: i for i, chunk in enumerate(chunks)}
    return Batch(
        tokens=np.array(tokens, np.int32),
        slots=pages.astype(np.int64) * page_size + positions % page_size,
        offsets=offsets,
        counts=counts,
        starts=starts,
        tables=tables,
        rows=np.array([end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.emits], np.int32),
        detail=Detail(
            layers=np.array(layers, np.int32),
            spans=np.array([spans[s.key] for s in detailed], np.int32),
            prompt_lengths=np.array([s.prompt_length for s in detailed], np.int32),
        )
        if detailed
        else None,
    )


def _tables(contexts: list[tuple[Sequence, int]], page_size: int) -> np.ndarray:
    """Block tables [sequences, pages of the longest context], padded with page 0."""
    used = [sequence.pages[: -(-length // page_size)] for sequence, length in contexts]
    tables = np.zeros((len(used), max(map(len, used), default=0)), np.int32)
    for row, pages in zip(tables, used, strict=True):
        row[: len(pages)] = pages
    return tables
