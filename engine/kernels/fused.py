"""Fused kernels: what they must compute, in plain PyTorch.

Compositions of the reference, by the names and with the contracts that `engine.models.fused` runs
on. Shapes as in `engine.kernels.reference`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.reference import (
    draw,
    entropy,
    gather,
    rms_norm,
    rope,
    silu_mul,
    token_statistics,
    write_kv,
)

__all__ = [
    "Activation",
    "Attended",
    "HeadRows",
    "Packed",
    "add_rms_norm",
    "attend_decode",
    "attend_prefill",
    "draw",
    "head_statistics",
    "linear",
    "lm_head",
    "pack_keys",
    "pack_values",
    "rms_norm",
    "rope_write",
    "token_statistics",
    "unpack_keys",
    "unpack_values",
]

Activation = Literal["relu", "gelu", "silu_mul"]


class Attended(NamedTuple):
    """Output [T, H, D]; fp32 log-sum-exp of the scaled scores and entropy in nats, both [T, H]."""

    out: Tensor
    lse: Tensor
    entropy: Tensor


def attend_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, *, window: int | None = None
) -> Attended:
    """One new token per sequence, as the reference, with what it knows of each head's weights."""
    batch, heads, width = q.shape
    groups = k_pages.shape[2]
    share = heads // groups
    places = (lengths - 1)[:, None].expand(-1, share)
    found = _attend(q.view(batch, groups, share, width), k_pages, v_pages, table, places, window)
    return Attended(*(part.reshape(batch, heads, *part.shape[3:]) for part in found))


def attend_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, start: int, *, window: int | None = None
) -> Attended:
    """A chunk of one sequence, as the reference, with what it knows of each head's weights."""
    count, heads, width = q.shape
    groups = k_pages.shape[2]
    share = heads // groups
    queries = q.view(count, groups, share, width).transpose(0, 1).reshape(1, groups, count * share, width)
    places = torch.arange(start, start + count, device=q.device).repeat_interleave(share)[None]
    found = _attend(queries, k_pages, v_pages, table, places, window)
    return Attended(
        *(
            part.view(groups, count, share, *part.shape[3:])
            .transpose(0, 1)
            .reshape(count, heads, *part.shape[3:])
            for part in found
        )
    )


def _attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, places: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and entropy of queries [N, G, M, D] at `places` [N, M] of N sequences."""
    scores = q.float() @ gather(k_pages, table).float().transpose(-1, -2) * q.shape[-1] ** -0.5
    keys, queries = torch.arange(scores.shape[-1], device=q.device), places[:, None, :, None]
    outside = keys > queries
    if window is not None:
        outside |= keys <= queries - window
    scores = scores.masked_fill(outside, float("-inf"))
    out = (scores.softmax(-1) @ gather(v_pages, table).float()).to(q.dtype)
    return out, scores.logsumexp(-1), entropy(scores)


def head_statistics(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    *,
    window: int | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """The reference's; `lse` [R, H], where attention has kept it, spares some backends a sweep."""
    return reference.head_statistics(q, k_pages, table, lengths, prompt_lengths, window=window)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` to the residual `x` [T, width] in place and return the sum's norm in `dtype`."""
    x += delta
    return rms_norm(x, weight, eps).to(dtype)


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, store keys and values at `slots` [T], return queries [T, H, D].

    `qkv` [T, H+2G, D]; `cos`, `sin` fp32 [positions, 1, D/2] are the whole tables. `norms` are the
    gains [D] of a norm of each query and key head before the rotation, with `eps`.
    """
    groups = k_pages.shape[2]
    q, k, v = qkv[:, : -2 * groups], qkv[:, -2 * groups : -groups], qkv[:, -groups:]
    if norms is not None:
        q, k = rms_norm(q.float(), norms[0].float(), eps), rms_norm(k.float(), norms[1].float(), eps)
    rotation = cos[positions], sin[positions]
    write_kv(k_pages, v_pages, slots, rope(k, *rotation).to(qkv.dtype), v)
    return rope(q, *rotation).to(qkv.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return act(x·Wᵀ·scale + bias) [T, out] in `x`'s dtype, computed in fp32.

    `x` [T, in]; `weight` [out, in] in `x`'s dtype, or int8 with `scale` fp32 [out]. "gelu" is the
    tanh form. "silu_mul" takes `weight` [2·out, in], gates first, and returns silu(gate)·up.
    """
    y = F.linear(x.float(), weight.float())
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias.float()
    if activation == "relu":
        y = F.relu(y)
    elif activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "silu_mul":
        y = silu_mul(y)
    return y.to(x.dtype)


class HeadRows(NamedTuple):
    """Of each row's logits: fp32 log-sum-exp, entropy (nats), largest logits [R, k] and their
    tokens (int64, the lower id first among equals), the chosen token's logit (NaN: none chosen)."""

    lse: Tensor
    entropy: Tensor
    top_logits: Tensor
    top_tokens: Tensor
    chosen: Tensor


def lm_head(hidden: Tensor, weight: Tensor, tokens: Tensor | None = None, top: int = 2) -> HeadRows:
    """Statistics of hidden·Wᵀ for normed rows [R, hidden] and weights [V, hidden].

    `tokens` int64 [R] are chosen tokens, −1 for none.
    """
    logits = F.linear(hidden.float(), weight.float())
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    chosen = torch.full(logits.shape[:1], float("nan"), device=logits.device)
    if tokens is not None:
        found = logits.gather(1, tokens.clamp_min(0)[:, None])[:, 0]
        chosen = found.masked_fill(tokens < 0, float("nan"))
    return HeadRows(logits.logsumexp(-1), entropy(logits), ordered[:, :top], order[:, :top], chosen)


class Packed(NamedTuple):
    """Pages as int8 [n, page size, G, D]; fp32 scales of keys [n, G, D] or of values [n, page size, G]."""

    codes: Tensor
    scales: Tensor


def pack_keys(pages: Tensor, ids: Tensor, used: Tensor) -> Packed:
    """Pack the pages `ids` [n] of keys, a scale per channel of a page, largest magnitude at ±127.

    `used` [n] is how many tokens of each page hold something; the others are packed as zero.
    """
    values = _held(pages, ids, used)
    scales = values.abs().amax(1) / 127
    return Packed(_codes(values, scales[:, None]), scales)


def pack_values(pages: Tensor, ids: Tensor, used: Tensor) -> Packed:
    """Pack the pages `ids` [n] of values, a scale per token; else as `pack_keys`."""
    values = _held(pages, ids, used)
    scales = values.abs().amax(3) / 127
    return Packed(_codes(values, scales[..., None]), scales)


def unpack_keys(pages: Tensor, ids: Tensor, packed: Packed) -> None:
    """Write packed keys back into the pages `ids` [n], in place."""
    pages[ids] = (packed.codes * packed.scales[:, None]).to(pages.dtype)


def unpack_values(pages: Tensor, ids: Tensor, packed: Packed) -> None:
    """Write packed values back into the pages `ids` [n], in place."""
    pages[ids] = (packed.codes * packed.scales[..., None]).to(pages.dtype)


def _held(pages: Tensor, ids: Tensor, used: Tensor) -> Tensor:
    """The pages `ids` in fp32, zero where a page holds nothing."""
    empty = torch.arange(pages.shape[1], device=pages.device) >= used[:, None]
    return pages[ids].float().masked_fill(empty[:, :, None, None], 0)


def _codes(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales.where(scales > 0, 1) + 0.5).floor().clamp(-127, 127).to(torch.int8)
