"""The Llama architecture as one step of a continuous batch.

The model owns its weights and nothing else: pages and tables come with each `Batch`. Matrix
products and the KV pages are in `dtype`; the residual stream, norms, softmax, the LM head and
everything after it are fp32, so that entropies and probabilities are what the definitions say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.pages import PagePool
from engine.models.config import ModelConfig
from engine.models.weights import StoredWeight


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens [offset, offset + count) of the batch are one sequence's positions from `start`."""

    offset: int
    count: int
    start: int
    table: Tensor  # int64 [1, pages]


@dataclass(frozen=True, slots=True)
class Detail:
    """Rows whose layers and heads are wanted: `tokens` are their places in the batch."""

    layers: list[int]
    tokens: Tensor  # int64 [rows]
    table: Tensor  # int64 [rows, pages]
    lengths: Tensor  # int64 [rows], context including the row's own token
    prompt_lengths: Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: T tokens, the first `len(decode_lengths)` of them decodes of one token each."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], where keys and values go
    decode_table: Tensor  # int64 [B, pages]
    decode_lengths: Tensor  # int64 [B]
    prefills: list[Prefill]
    rows: Tensor  # int64 [R], places whose logits are wanted
    detail: Detail | None


@dataclass(frozen=True, slots=True)
class LayerDetail:
    """`lens_entropy` fp32 [rows, layers], `heads` fp32 [rows, signals, layers, heads], and what they took."""

    lens_entropy: Tensor
    heads: Tensor
    seconds: float


class Llama:
    """Weights of one model, ready to step. Safe to share between engines of one process."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, StoredWeight], dtype: torch.dtype, ops: ModuleType
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.ops = ops
        embedding = weights["model.embed_tokens.weight"].tensor()
        self.embedding = embedding.to(dtype)
        self.head = embedding if config.tied_embeddings else weights["lm_head.weight"].tensor()
        self.final_norm = weights["model.norm.weight"].tensor()
        self.layers = [_Layer(weights, f"model.layers.{i}.", dtype) for i in range(config.layers)]
        frequency = config.rope_theta ** -(
            torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        angles = torch.arange(config.max_context, dtype=torch.float64)[:, None] * frequency
        self.cos = angles.cos().float()[:, None]
        self.sin = angles.sin().float()[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: residual [rows, hidden] → fp32 logits [rows, vocab]."""
        return F.linear(self.ops.rms_norm(hidden, self.final_norm, self.config.norm_eps), self.head)

    @torch.inference_mode()
    def step(self, batch: Batch, pool: PagePool) -> tuple[Tensor, LayerDetail | None]:
        """Compute a batch, write its keys and values, return logits [R, V] and layer detail."""
        detail = batch.detail
        lens, heads, seconds = [], [], 0.0
        x = self.embedding[batch.tokens].float()
        rotation = self.cos[batch.positions], self.sin[batch.positions]
        for index, layer in enumerate(self.layers):
            keys, values = pool.keys[index], pool.values[index]
            q = self._attend(layer, x, rotation, batch, (keys, values))
            self._feed_forward(layer, x)
            if detail is not None and index in detail.layers:
                began = time.perf_counter()
                heads.append(
                    self.ops.head_statistics(
                        q[detail.tokens], keys, detail.table, detail.lengths, detail.prompt_lengths
                    )
                )
                lens.append(self.ops.entropy(self.logits(x[detail.tokens])))
                seconds += time.perf_counter() - began
        found = LayerDetail(torch.stack(lens, 1), torch.stack(heads, 2), seconds) if lens else None
        return self.logits(x[batch.rows]), found

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        pages: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Add attention to the residual `x` in place; returns the rotated queries [T, H, D]."""
        config, ops = self.config, self.ops
        keys, values = pages
        count = x.shape[0]
        normed = ops.rms_norm(x, layer.attention_norm, config.norm_eps).to(self.dtype)
        qkv = F.linear(normed, layer.qkv).view(count, -1, config.head_dim)
        rotated: Tensor = ops.rope(qkv[:, : config.heads + config.kv_heads], *rotation)
        q, k = rotated[:, : config.heads], rotated[:, config.heads :]
        v = qkv[:, config.heads + config.kv_heads :]
        ops.write_kv(keys, values, batch.slots, k, v)
        decodes = len(batch.decode_lengths)
        parts = []
        if decodes:
            parts.append(
                ops.decode_attention(q[:decodes], keys, values, batch.decode_table, batch.decode_lengths)
            )
        for chunk in batch.prefills:
            query = q[chunk.offset : chunk.offset + chunk.count]
            parts.append(ops.prefill_attention(query, keys, values, chunk.table, chunk.start))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        x += F.linear(attended.reshape(count, -1), layer.output)
        return q

    def _feed_forward(self, layer: _Layer, x: Tensor) -> None:
        """Add the feed-forward block to the residual `x` in place."""
        normed = self.ops.rms_norm(x, layer.feed_forward_norm, self.config.norm_eps).to(self.dtype)
        x += F.linear(self.ops.silu_mul(F.linear(normed, layer.gate_up)), layer.down)


class _Layer:
    """One block's weights, projections that share an input packed together."""

    def __init__(self, weights: Mapping[str, StoredWeight], prefix: str, dtype: torch.dtype) -> None:
        def packed(*names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}{name}.weight"].tensor().to(dtype) for name in names])

        self.attention_norm = weights[f"{prefix}input_layernorm.weight"].tensor()
        self.qkv = packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = packed("self_attn.o_proj")
        self.feed_forward_norm = weights[f"{prefix}post_attention_layernorm.weight"].tensor()
        self.gate_up = packed("mlp.gate_proj", "mlp.up_proj")
        self.down = packed("mlp.down_proj")
