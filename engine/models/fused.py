"""A model's step in fused operations on one device: what the GPU runs.

The same weights and the same numbers as `engine.models.llama`, in fewer launches: residual add and
norm together, rotation with the page write, products with their activation, one LM head for the
step's rows and all sampled layers' rows stacked, from which no logits are written.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.graphs import Axes, Graphs, Recorder, Tensors
from engine.kernels.fused import Attended, HeadRows
from engine.models.llama import Llama

#: Axes of a decode step's tensors, for `Graphs`.
INPUTS: Axes = {
    "tokens": ("batch",),
    "positions": ("batch",),
    "slots": ("batch",),
    "table": ("batch", "pages"),
    "lengths": ("batch",),
    "places": ("detail",),
    "prompt_lengths": ("detail",),
}
OUTPUTS: Axes = {
    "lse": ("batch",),
    "entropy": ("batch",),
    "top_logits": ("batch",),
    "top_tokens": ("batch",),
    "hidden": ("batch",),
    "lens_entropy": ("detail",),
    "heads": ("detail",),
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [offset, offset + count) are one sequence's positions from `start`."""

    offset: int
    count: int
    start: int
    table: Tensor  # [1, pages]


@dataclass(frozen=True, slots=True)
class Watch:
    """Layers and the places in the batch whose heads and lens are wanted."""

    layers: tuple[int, ...]
    places: Tensor  # [D]
    table: Tensor  # [D, pages]
    lengths: Tensor  # [D], context including the token itself
    prompt_lengths: Tensor  # [D]


@dataclass(frozen=True, slots=True)
class Work:
    """One step on the device: the first `len(lengths)` tokens are decodes, the others in `prefills`."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    table: Tensor  # [B, pages]
    lengths: Tensor  # [B]
    rows: Tensor | None = None  # [R], places whose distribution is wanted; None: all
    prefills: list[Chunk] = field(default_factory=list)
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """`rows` of the wanted places and their normed hidden states, fp32 [R, hidden]; `lens_entropy`
    [D, layers] and `heads` [D, signals, layers, H]."""

    rows: HeadRows
    hidden: Tensor
    lens_entropy: Tensor | None
    heads: Tensor | None


class Fused:
    """The weights of `model` on `device`, run by the fused operations of `ops`.

    With `apart` the LM head takes the wanted rows by themselves, reading its weights once more for the
    rows of sampled layers: its tiles, and so the last bits, depend on how many rows it is given.
    """

    def __init__(
        self, model: Llama, ops: ModuleType, device: torch.device, top: int = 32, *, apart: bool = False
    ) -> None:
        self.config = model.config
        self.dtype = model.dtype
        self.device = device
        self.ops = ops
        self.top = min(top, model.config.vocab)
        self.apart = apart
        self.embedding, self.head = model.embedding.to(device), model.head_weight.to(device)
        self.final_norm = model.final_norm.to(device)
        self.cos, self.sin = model.cos.to(device), model.sin.to(device)
        self.layers = [_moved(layer, device) for layer in model.layers]

    @torch.inference_mode()
    def run(self, work: Work, keys: Tensor, values: Tensor) -> Step:
        """Compute `work`; pages `keys`, `values` [layers, pages, page size, G, D] are written in place."""
        ops, eps, watch, window = self.ops, self.config.norm_eps, work.watch, self.config.sliding_window
        x = self.embedding[work.tokens].float()
        delta = torch.zeros_like(x, dtype=self.dtype)
        stacked, heads = [], []
        for index, layer in enumerate(self.layers):
            normed = ops.add_rms_norm(x, delta, layer.attention_norm, eps, self.dtype)
            qkv = ops.linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
            pages = keys[index], values[index]
            rotation = (self.cos, self.sin, work.positions, work.slots)
            q = ops.rope_write(qkv, *rotation, *pages, layer.qk_norm, eps)
            attended = self._attend(q, work, *pages)
            delta = ops.linear(attended.out.reshape(len(x), -1), layer.output)
            normed = ops.add_rms_norm(x, delta, layer.feed_forward_norm, eps, self.dtype)
            delta = ops.linear(ops.linear(normed, layer.gate_up, activation="silu_mul"), layer.down)
            if watch is not None and index in watch.layers:
                at = watch.places
                stacked.append(x[at] + delta[at])
                context = (watch.table, watch.lengths, watch.prompt_lengths)
                heads.append(
                    ops.head_statistics(q[at], keys[index], *context, window=window, lse=attended.lse[at])
                )
        return self._read(x, delta, work.rows, stacked, heads)

    def _attend(self, q: Tensor, work: Work, keys: Tensor, values: Tensor) -> Attended:
        parts, pages, window = [], (keys, values), self.config.sliding_window
        decodes = len(work.lengths)
        if decodes:
            parts.append(self.ops.attend_decode(q[:decodes], *pages, work.table, work.lengths, window=window))
        for chunk in work.prefills:
            query = q[chunk.offset : chunk.offset + chunk.count]
            parts.append(self.ops.attend_prefill(query, *pages, chunk.table, chunk.start, window=window))
        return parts[0] if len(parts) == 1 else Attended(*map(torch.cat, zip(*parts, strict=True)))

    def _read(
        self, x: Tensor, delta: Tensor, rows: Tensor | None, stacked: list[Tensor], heads: list[Tensor]
    ) -> Step:
        """LM head of the wanted rows of x + delta and of the stacked ones, together unless `apart`."""
        last = x + delta if rows is None else x[rows] + delta[rows]
        normed = self.ops.rms_norm(torch.cat((last, *stacked)), self.final_norm, self.config.norm_eps)
        hidden, others = normed[: len(last)], normed[len(last) :]
        found: HeadRows = self.ops.lm_head(hidden if self.apart else normed, self.head, None, self.top)
        wanted = HeadRows(*(part[: len(last)] for part in found))
        if not stacked:
            return Step(wanted, hidden, None, None)
        entropy = found.entropy[len(last) :]
        if self.apart:
            entropy = self.ops.lm_head(others, self.head, None, 1).entropy
        return Step(wanted, hidden, entropy.view(len(stacked), -1).T, torch.stack(heads, 2))

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head of normed hidden states [rows, hidden]: fp32 logits [rows, vocab]."""
        return F.linear(hidden, self.head)

    def graphs(self, keys: Tensor, values: Tensor, recorder: Recorder, bound: int = 32) -> Graphs:
        """Recorded decode steps over these pages. The condition of a call is a tuple of layers to watch."""

        def run(given: Tensors, layers: Hashable) -> Tensors:
            assert isinstance(layers, tuple)
            at, table, lengths = given["places"], given["table"], given["lengths"]
            watch = (
                Watch(layers, at, table[at], lengths[at], given["prompt_lengths"])
                if layers and len(at)
                else None
            )
            work = Work(given["tokens"], given["positions"], given["slots"], table, lengths, watch=watch)
            step = self.run(work, keys, values)
            found = step.rows._asdict() | {"hidden": step.hidden}
            del found["chosen"]
            if step.lens_entropy is not None and step.heads is not None:
                found |= {"lens_entropy": step.lens_entropy, "heads": step.heads}
            return found

        return Graphs(run, recorder, inputs=INPUTS, outputs=OUTPUTS, bound=bound)


def _moved(layer: T, device: torch.device) -> T:
    """A copy of a layer with its tensors, and tuples of them, on `device`."""
    moved = copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, tuple):
            setattr(moved, name, tuple(part.to(device) for part in value))
        elif value is not None:
            setattr(moved, name, value.to(device))
    return moved
