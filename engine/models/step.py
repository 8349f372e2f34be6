"""What a step asks of a model, and what the model answers: the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.kv.pages import PagePool

#: The largest logits that an `Output` lists for each row.
TOP = 32

#: Attention is scored in every one of so many layers, from the first on.
SCORED_LAYERS = 3

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
    scored: Ints | None = None  # [S], position of a span's first query whose attention is summed; None: none
    hidden: bool = False  # whether the rows' hidden states are wanted


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
    −inf. Row `kept[i]` has its logits in `logits[i]`. `mass` has for each span with scored queries what
    these attend to: fp32 [positions up to the span's end], summed over the queries, of the mean over heads
    and scored layers. It adds up to the number of queries.
    """

    lse: Floats  # [R], log Σ exp z
    entropy: Floats  # [R]
    ids: Ints
    values: Floats
    kept: list[int]
    logits: Tensor  # fp32 [kept, vocab]
    detail: LayerDetail | None
    mass: dict[int, Floats] = field(default_factory=dict)  # by span
    hidden: Tensor | None = None  # fp32 [R, hidden], after the final norm, where wanted


class Ops(Protocol):
    """What is asked of rows whose logits were kept; `engine.kernels.reference` is the specification."""

    def draw(
        self,
        logits: Tensor,
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        points: list[float],
    ) -> list[int]: ...

    def token_statistics(self, logits: Tensor, tokens: Tensor) -> Tensor: ...


class Model(Protocol):
    """Weights that can compute steps. `dtype` and `device` are those of the KV pages it reads and writes.

    Batches and outputs are on the CPU, whatever the device. `drops`: it leaves dead slots of the pool out
    and scores what its batches ask for; others need a pool without dead slots, and score nothing.
    """

    name: str  # of the backend
    drops: bool
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def ops(self) -> Ops: ...

    def step(self, batch: Batch, pool: PagePool, keep: list[int]) -> Output:
        """Compute a batch and write its keys and values; the rows `keep` keep their logits."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocab] of hidden states [R, hidden] as `Output` has them."""
        ...


def output_of(
    logits: Tensor,
    entropy: Tensor,
    kept: list[int],
    detail: LayerDetail | None,
    *,
    mass: dict[int, Floats] | None = None,
    hidden: Tensor | None = None,
) -> Output:
    """Return the Output of rows whose logits [R, V] are all at hand."""
    rows, vocab = logits.shape
    ids = np.full((rows, TOP), -1, np.int32)
    values = np.full((rows, TOP), -np.inf, np.float32)
    top = logits.topk(min(TOP, vocab), dim=-1)
    ids[:, : top.indices.shape[1]] = top.indices.numpy()
    values[:, : top.values.shape[1]] = top.values.numpy()
    lse: Any = logits.logsumexp(-1).numpy()
    return Output(lse, entropy.numpy(), ids, values, kept, logits[kept], detail, mass or {}, hidden)


def with_rows(output: Output, rows: list[int], logits: Tensor, entropy: Tensor) -> Output:
    """Return a copy of `output` whose `rows` have the distributions of `logits` [rows, V] instead."""
    found = output_of(logits, entropy, [], None)
    lse, spread, values = (a.copy() for a in (output.lse, output.entropy, output.values))
    ids = output.ids.copy()
    lse[rows], spread[rows], ids[rows], values[rows] = found.lse, found.entropy, found.ids, found.values
    kept = output.logits.clone()
    for place, row in enumerate(output.kept):
        if row in rows:
            kept[place] = logits[rows.index(row)]
    return replace(output, lse=lse, entropy=spread, ids=ids, values=values, logits=kept)
