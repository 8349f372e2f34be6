"""From the chunks of a plan to the arrays of one model call."""

from __future__ import annotations

from itertools import chain

import numpy as np

from engine.models.step import Batch, Detail, Ints
from engine.scheduler import Chunk, Sequence


def batch_of(
    chunks: list[Chunk],
    layers: list[int],
    detailed: list[Sequence],
    page_size: int,
    *,
    scored: int = 0,
    hidden: bool = False,
) -> Batch:
    """Lay `chunks` out as one batch, a span each, in the plan's order.

    `detailed` are the emitting sequences that get detail of `layers`. The last `scored` queries of prompts
    whose pages are kept are asked what they attend to. `hidden`: whether the rows' hidden states are wanted.
    """
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    ends = counts.cumsum(dtype=np.int32)
    offsets = ends - counts
    tables = _tables([c.sequence.pages[: -(-(c.start + c.count) // page_size)] for c in chunks])
    span = np.arange(len(chunks)).repeat(counts)
    positions = np.arange(len(span)) - (offsets - starts)[span]
    tokens: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    places = {id(chunk.sequence): i for i, chunk in enumerate(chunks)} if detailed else {}
    return Batch(
        tokens=np.array(tokens, np.int32),
        slots=tables[span, positions // page_size] * np.int64(page_size) + positions % page_size,
        offsets=offsets,
        counts=counts,
        starts=starts,
        tables=tables,
        rows=ends[[chunk.emits for chunk in chunks]] - 1,
        hidden=hidden,
        detail=Detail(
            layers=np.array(layers, np.int32),
            spans=np.array([places[id(s)] for s in detailed], np.int32),
            prompt_lengths=np.array([s.prompt_length for s in detailed], np.int32),
        )
        if detailed
        else None,
        scored=_scored(chunks, scored),
    )


def _scored(chunks: list[Chunk], queries: int) -> Ints | None:
    """Position of the first query to score, for each chunk; None when none is to be."""
    firsts = [
        chunk.sequence.prompt_length - queries
        if queries and chunk.count > 1 and chunk.sequence.chain is not None
        else chunk.start + chunk.count
        for chunk in chunks
    ]
    some = any(first < chunk.start + chunk.count for first, chunk in zip(firsts, chunks, strict=True))
    return np.array(firsts, np.int32) if some else None


def _tables(used: list[list[int]]) -> Ints:
    """Block tables [sequences, pages of the longest context], each padded with its own first page.

    What a masked place holds may reach a result all the same (0 · NaN), so it is never another's.
    """
    lengths = np.array([len(pages) for pages in used], np.int32)
    first = np.array([pages[0] for pages in used], np.int32)
    tables = first[:, None].repeat(max(lengths, default=0), axis=1)
    there = np.arange(tables.shape[1]) < lengths[:, None]
    tables[there] = np.fromiter(chain.from_iterable(used), np.int32, lengths.sum())
    return tables
