"""What a step asks of a model, and what the model answers: the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

#: The largest logits that an `Output` lists for each row.
TOP = 32

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Detail:
    """Spans whose last token gets layer detail; that token is one of the batch's `rows`."""

    layers: Ints  # ascending
    spans: Ints  # [D]
    prompt_lengths: Ints  # [D], tokens of each one's prompt


@dataclass(frozen=True, slots=True)
class Batch:
    """One step over T tokens in S spans.

    Span s is `counts[s]` consecutive tokens of one sequence, from place `offsets[s]` of the batch and
    position `starts[s]` of the sequence on. Its pages are in row s of `tables`, which is padded with
    any valid page. Spans lie in order and cover the batch.
    """

    tokens: Ints  # [T]
    slots: NDArray[np.int64]  # [T], page · page size + offset: where keys and values go
    offsets: Ints  # [S]
    counts: Ints  # [S]
    starts: Ints  # [S]
    tables: Ints  # [S, pages]
    rows: Ints  # [R], places whose distribution is wanted
    detail: Detail | None = None


@dataclass(frozen=True, slots=True)
class LayerDetail:
    """`lens_entropy` fp32 [D, layers], `heads` fp32 [D, signals, layers, heads]; what they took."""

    lens_entropy: Floats
    heads: Floats
    seconds: float


@dataclass(frozen=True, slots=True)
class Output:
    """The distributions of a batch's rows at temperature 1, in nats, and their logits where kept.

    `ids` and `values` [R, TOP] are the largest logits, descending; a smaller vocabulary leaves −1 and
    −inf. Row `kept[i]` has its logits in `logits[i]`.
    """

    lse: Floats  # [R], log Σ exp z
    entropy: Floats  # [R]
    ids: Ints
    values: Floats
    kept: list[int]
    logits: Tensor  # fp32 [kept, vocab]
    detail: LayerDetail | None


def output_of(logits: Tensor, entropy: Tensor, kept: list[int], detail: LayerDetail | None) -> Output:
    """Return the Output of rows whose logits [R, V] are all at hand."""
    rows, vocab = logits.shape
    ids = np.full((rows, TOP), -1, np.int32)
    values = np.full((rows, TOP), -np.inf, np.float32)
    top = logits.topk(min(TOP, vocab), dim=-1)
    ids[:, : top.indices.shape[1]] = top.indices.numpy()
    values[:, : top.values.shape[1]] = top.values.numpy()
    lse: Any = logits.logsumexp(-1).numpy()
    return Output(lse, entropy.numpy(), ids, values, kept, logits[kept], detail)
