"""The Llama architecture, and its near relatives, as one step of a continuous batch.

The model owns its weights and nothing else: pages and tables come with each `Batch`. Matrix
products and the KV pages are in `dtype`; the residual stream, norms, softmax, the LM head and
everything after it are fp32, so that entropies and probabilities are what the definitions say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.pages import PagePool
from engine.models import rotary
from engine.models.config import ModelConfig
from engine.models.step import SCORED_LAYERS, Batch, LayerDetail, Output, output_of
from engine.models.weights import StoredWeight


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Tokens [offset, offset + count) are one sequence's positions from `start`, the last ones `scored`."""

    span: int
    offset: int
    count: int
    start: int
    table: Tensor  # int64 [1, pages]
    scored: int


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch as tensors, int64. Decodes are spans of one token each."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    decodes: Tensor  # [B], places of the decodes
    decode_table: Tensor  # [B, pages]
    decode_lengths: Tensor  # [B]
    prefills: list[_Prefill]
    detail: tuple[Tensor, Tensor, Tensor, Tensor]  # [D] places, [D, pages], [D] lengths, [D] prompt lengths
    unseen: dict[str, Any]  # what attention leaves out, as its functions take it

    @classmethod
    def of(cls, batch: Batch, unseen: dict[str, Any]) -> _Work:
        """Take `batch` apart."""
        offsets, counts, starts, tables = (
            torch.from_numpy(a).long() for a in (batch.offsets, batch.counts, batch.starts, batch.tables)
        )
        single = counts == 1
        spans = zip(*(a.tolist() for a in (batch.offsets, batch.counts, batch.starts)), strict=True)
        detailed = torch.from_numpy(batch.detail.spans if batch.detail else batch.rows[:0]).long()
        prompts = torch.from_numpy(batch.detail.prompt_lengths if batch.detail else batch.rows[:0]).long()
        ends = starts + counts
        scored = [0] * len(counts)
        if batch.scored is not None:
            scored = np.clip(batch.starts + batch.counts - batch.scored, 0, batch.counts).tolist()
        return cls(
            tokens=torch.from_numpy(batch.tokens).long(),
            positions=torch.arange(len(batch.tokens)) - (offsets - starts).repeat_interleave(counts),
            slots=torch.from_numpy(batch.slots),
            decodes=offsets[single],
            decode_table=tables[single],
            decode_lengths=ends[single],
            prefills=[
                _Prefill(i, offset, count, start, tables[i : i + 1], scored[i])
                for i, (offset, count, start) in enumerate(spans)
                if count > 1
            ],
            detail=((offsets + counts - 1)[detailed], tables[detailed], ends[detailed], prompts),
            unseen=unseen,
        )


class Llama:
    """Weights of one model, ready to step. Safe to share between engines of one process.

    `max_context` is the longest sequence that will come, where that is shorter than the model's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, StoredWeight],
        dtype: torch.dtype,
        ops: ModuleType,
        max_context: int | None = None,
    ) -> None:
        self.config = config
        self.name = ops.__name__.rpartition(".")[2]
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.ops = ops
        self.drops = True
        embedding = weights["model.embed_tokens.weight"].tensor()
        self.embedding = embedding.to(dtype)
        self.head_weight = embedding if config.tied_embeddings else weights["lm_head.weight"].tensor()
        self.final_norm = weights["model.norm.weight"].tensor()
        self.layers = [_Layer(config, weights, f"model.layers.{i}.", dtype) for i in range(config.layers)]
        length = min(config.max_context, max_context or config.max_context)
        self.cos, self.sin = rotary.tables(config, length)
        self._window = {} if config.sliding_window is None else {"window": config.sliding_window}

    def head(self, hidden: Tensor) -> Tensor:
        """LM head: normed hidden states [rows, hidden] → fp32 logits [rows, vocab]."""
        return F.linear(hidden, self.head_weight)

    def logits(self, residual: Tensor) -> Tensor:
        """Final norm and LM head: residual [rows, hidden] → fp32 logits [rows, vocab]."""
        return self.head(self._normed(residual))

    def _normed(self, residual: Tensor) -> Tensor:
        normed: Tensor = self.ops.rms_norm(residual, self.final_norm, self.config.norm_eps)
        return normed

    @torch.inference_mode()
    def step(self, batch: Batch, pool: PagePool, keep: list[int]) -> Output:
        """Compute a batch and write its keys and values; the rows `keep` keep their logits."""
        wanted = batch.detail.layers.tolist() if batch.detail else []
        work = _Work.of(batch, self._unseen(pool))
        mass = {p.span: torch.zeros(p.start + p.count) for p in work.prefills if p.scored}
        layers = len(range(0, self.config.layers, SCORED_LAYERS))
        lens, heads, seconds = [], [], 0.0
        x = self.embedding[work.tokens].float()
        rotation = self.cos[work.positions], self.sin[work.positions]
        for index, layer in enumerate(self.layers):
            keys, values = pool.keys[index], pool.values[index]
            q = self._attend(layer, x, rotation, work, (keys, values))
            for chunk in work.prefills if index % SCORED_LAYERS == 0 else ():
                if chunk.scored:
                    end = chunk.offset + chunk.count
                    start = chunk.start + chunk.count - chunk.scored
                    own = q[end - chunk.scored : end]
                    found = self.ops.attention_mass(own, keys, chunk.table, start, **work.unseen)
                    mass[chunk.span] += found / layers
            self._feed_forward(layer, x)
            if index in wanted:
                began = time.perf_counter()
                places, *context = work.detail
                heads.append(self.ops.head_statistics(q[places], keys, *context, **work.unseen))
                lens.append(self.ops.entropy(self.logits(x[places])))
                seconds += time.perf_counter() - began
        detail = _detail(lens, heads, seconds) if lens else None
        hidden = self._normed(x[torch.from_numpy(batch.rows).long()])
        logits = self.head(hidden)
        scores = {span: found.numpy() for span, found in mass.items()}
        kept = hidden if batch.hidden else None
        return output_of(logits, self.ops.entropy(logits), keep, detail, mass=scores, hidden=kept)

    def _unseen(self, pool: PagePool) -> dict[str, Any]:
        """Window and dead slots, only where there are some: a backend without says so, at the first step."""
        if not pool.dead.any():
            return dict(self._window)
        return {**self._window, "dead": torch.from_numpy(pool.dead)}

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        work: _Work,
        pages: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Add attention to the residual `x` in place; returns the rotated queries [T, H, D]."""
        config, ops = self.config, self.ops
        keys, values = pages
        count = x.shape[0]
        normed = ops.rms_norm(x, layer.attention_norm, config.norm_eps).to(self.dtype)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(count, -1, config.head_dim)
        qk, v = qkv[:, : config.heads + config.kv_heads], qkv[:, config.heads + config.kv_heads :]
        if layer.qk_norm is not None:
            ends = qk[:, : config.heads].float(), qk[:, config.heads :].float()
            heads = [ops.rms_norm(x, w, config.norm_eps) for x, w in zip(ends, layer.qk_norm, strict=True)]
            qk = torch.cat(heads, dim=1).to(self.dtype)
        rotated: Tensor = ops.rope(qk, *rotation)
        q, k = rotated[:, : config.heads], rotated[:, config.heads :]
        ops.write_kv(keys, values, work.slots, k, v)
        attended = torch.empty_like(q)
        if len(work.decodes):
            attended[work.decodes] = ops.decode_attention(
                q[work.decodes], keys, values, work.decode_table, work.decode_lengths, **work.unseen
            )
        for chunk in work.prefills:
            places = slice(chunk.offset, chunk.offset + chunk.count)
            attended[places] = ops.prefill_attention(
                q[places], keys, values, chunk.table, chunk.start, **work.unseen
            )
        x += F.linear(attended.reshape(count, -1), layer.output)
        return q

    def _feed_forward(self, layer: _Layer, x: Tensor) -> None:
        """Add the feed-forward block to the residual `x` in place."""
        normed = self.ops.rms_norm(x, layer.feed_forward_norm, self.config.norm_eps).to(self.dtype)
        x += F.linear(self.ops.silu_mul(F.linear(normed, layer.gate_up)), layer.down)


def _detail(lens: list[Tensor], heads: list[Tensor], seconds: float) -> LayerDetail:
    return LayerDetail(torch.stack(lens, 1).numpy(), torch.stack(heads, 2).numpy(), seconds)


class _Layer:
    """One block's weights, projections that share an input packed together."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, StoredWeight], prefix: str, dtype: torch.dtype
    ) -> None:
        def whole(name: str) -> Tensor:
            return weights[prefix + name].tensor()

        def packed(*names: str) -> Tensor:
            return torch.cat([whole(name).to(dtype) for name in names])

        projections = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        self.attention_norm = whole("input_layernorm.weight")
        self.qkv = packed(*(f"{name}.weight" for name in projections))
        self.qkv_bias = packed(*(f"{name}.bias" for name in projections)) if config.qkv_bias else None
        self.qk_norm = (
            (whole("self_attn.q_norm.weight"), whole("self_attn.k_norm.weight")) if config.qk_norm else None
        )
        self.output = packed("self_attn.o_proj.weight")
        self.feed_forward_norm = whole("post_attention_layernorm.weight")
        self.gate_up = packed("mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = packed("mlp.down_proj.weight")
