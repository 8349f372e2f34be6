"""Reference kernels: what every other backend must compute, in plain PyTorch.

Shapes: T tokens of a step, B sequences that decode, R rows, H query heads, G key/value heads
(H a multiple of G), D head width, V vocabulary. Pages are [pages, page size, G, D]; a block
table row lists the pages of one sequence in order and is padded with any valid page. With a
`window` a token attends to that many last ones, itself included. `dead` [pages, page size] marks slots
that hold no token any more (`engine.kv.drop`): nobody attends to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32, in `x`'s dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head: `x` [T, heads, D] with fp32 tables `cos`, `sin` [T, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's activation: silu(gate)·up for a packed [T, 2·width] input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def write_kv(k_pages: Tensor, v_pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store keys and values [T, G, D] at flat slots (page · page size + offset) [T], in place."""
    k_pages.view(-1, *k_pages.shape[2:]).index_copy_(0, slots, k)
    v_pages.view(-1, *v_pages.shape[2:]).index_copy_(0, slots, v)


def gather(pages: Tensor, table: Tensor) -> Tensor:
    """Return [B, G, context, D] for a block table [B, n]; context = n · page size."""
    batch, count = table.shape
    _, size, groups, width = pages.shape
    rows = pages.index_select(0, table.reshape(-1))
    return rows.view(batch, count * size, groups, width).transpose(1, 2)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    window: int | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its own pages.

    `q` [B, H, D], `table` [B, n], `lengths` [B] counts the new token. Returns [B, H, D].
    """
    batch, heads, width = q.shape
    groups = k_pages.shape[2]
    k, v = gather(k_pages, table), gather(v_pages, table)
    mask = _visible(torch.arange(k.shape[2], device=q.device), lengths[:, None] - 1, window)
    mask = _alive(mask, table, dead)
    out = F.scaled_dot_product_attention(
        q.view(batch, groups, heads // groups, width), k, v, attn_mask=mask[:, None, None, :]
    )
    return out.reshape(batch, heads, width)


def prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    start: int,
    *,
    window: int | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk at positions start … start+T−1 of one sequence.

    `q` [T, H, D], `table` [1, n]. Returns [T, H, D].
    """
    count, heads, _ = q.shape
    groups = k_pages.shape[2]
    end = start + count
    k, v = gather(k_pages, table)[:, :, :end], gather(v_pages, table)[:, :, :end]
    repeat = heads // groups
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    query = q.transpose(0, 1)[None]
    if start == 0 and window is None:
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True)
    else:
        positions = torch.arange(end, device=q.device)
        mask = _alive(_visible(positions, positions[start:, None], window), table, dead)
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask)
    return out[0].transpose(0, 1)


def head_statistics(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    *,
    window: int | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    """What each head looks at: [R, 5, H] fp32 in the order of `HEAD_SIGNALS`; NaN is absent.

    `q` [R, H, D] are the queries at positions `lengths`−1 [R]. Divergences are
    KL(p_h ‖ p̄) in nats with p̄ the mean over the heads, so at most ln H. The non-sink part is
    what remains of the divergence after position 0 is split off by the chain rule:
    KL = KL_Bernoulli(sink) + non-sink part. A position outside the `window`, or dead, has no mass, be it
    the sink; attention to a previous token that is dead is absent. Formulas: docs/signals.md.
    """
    rows, heads, width = q.shape
    groups = k_pages.shape[2]
    k = gather(k_pages, table).float()
    scores = q.float().view(rows, groups, heads // groups, width) @ k.transpose(-1, -2)
    scores = scores.view(rows, heads, -1) * width**-0.5
    positions = torch.arange(k.shape[2], device=q.device)
    visible = _alive(_visible(positions, lengths[:, None] - 1, window), table, dead)
    p = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    mean = p.mean(1, keepdim=True)
    divergence = torch.where((p > 0) & (mean > 0), p * (p.log() - mean.log()), 0.0)  # a mean may underflow
    kl = divergence.sum(-1)
    rest, rest_mean = 1 - p[..., 0], 1 - mean[..., 0]
    split = torch.where(rest > 0, rest * (rest.log() - rest_mean.log()), 0.0)
    nonsink = (divergence[..., 1:].sum(-1) - split).clamp_min(0)
    previous = p.gather(2, (lengths - 2).clamp_min(0)[:, None, None].expand(-1, heads, 1))[..., 0]
    lost = lengths < 2
    if dead is not None:
        lost |= dead[table].flatten(1).gather(1, (lengths - 2).clamp_min(0)[:, None])[:, 0]
    previous = previous.masked_fill(lost[:, None], float("nan"))
    in_prompt = (positions < prompt_lengths[:, None]).float()
    on_prompt = (p * in_prompt[:, None]).sum(-1)
    generated = lengths - prompt_lengths
    per_prompt = on_prompt / prompt_lengths[:, None]
    per_generated = (1 - on_prompt).clamp_min(0) / generated[:, None]  # NaN or inf while none is
    lookback = (per_prompt / (per_prompt + per_generated)).masked_fill((generated < 1)[:, None], float("nan"))
    return torch.stack((kl.clamp_min(0), nonsink, p[..., 0], previous, lookback), dim=1)


def attention_mass(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    start: int,
    *,
    window: int | None = None,
    dead: Tensor | None = None,
) -> Tensor:
    """Attention that a chunk's queries at positions start … start+T−1 pay to each token, summed.

    `q` [T, H, D], `table` [1, n]. Returns the mean over heads, fp32 [start+T].
    """
    count, _, width = q.shape
    end = start + count
    k = gather(k_pages, table)[0, :, :end].float()
    scores = q.float().view(count, k.shape[0], -1, width).permute(1, 2, 0, 3) @ k[:, None].transpose(-1, -2)
    positions = torch.arange(end, device=q.device)
    visible = _alive(_visible(positions, positions[start:, None], window), table, dead)
    p = (scores * width**-0.5).masked_fill(~visible, float("-inf")).softmax(-1)
    found: Tensor = p.sum(2).mean((0, 1))
    return found


def _alive(visible: Tensor, table: Tensor, dead: Tensor | None) -> Tensor:
    """Visible positions [rows, context] of tables [rows or 1, n] without those in `dead` slots."""
    return visible if dead is None else visible & ~dead[table].flatten(1)[:, : visible.shape[1]]


def _visible(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which key positions [context] each query position [rows, 1] attends to: bool [rows, context]."""
    past = keys <= queries
    return past if window is None else past & (keys > queries - window)


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits), fp32 [R, V] → [R]: lse − Σ p·z."""
    shifted = logits - logits.amax(-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(-1)
    return total.log() - (weights * shifted.masked_fill(weights == 0, 0)).sum(-1) / total


def token_statistics(logits: Tensor, tokens: Tensor) -> Tensor:
    """Surprisal, confidence, margin, rank, entropy of emitted tokens: [R, V], [R] → [R, 5]."""
    top2 = logits.topk(2, dim=-1).values
    shifted = logits - top2[:, :1]
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    chosen = shifted.gather(1, tokens[:, None])
    surprisal = log_total - chosen[:, 0]
    margin = (1 - (top2[:, 1] - top2[:, 0]).exp()) / total
    rank = (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1
    expected = (weights * shifted.masked_fill(weights == 0, 0)).sum(-1) / total
    return torch.stack((surprisal, (-surprisal).exp(), margin, rank.float(), log_total - expected), dim=1)


def draw(
    logits: Tensor, temperature: list[float], top_k: list[int], top_p: list[float], points: list[float]
) -> list[int]:
    """Draw a token from each row of fp32 logits [R, V]; the lists have an entry a row.

    Temperature 0 takes the largest logit. Otherwise the row's distribution at that temperature is cut
    to the `top_k` most likely tokens (0: all; ties at the cut stay), then to the smallest set whose
    renormalised probability reaches `top_p` (1: all), and its cumulative distribution is inverted at
    the row's point in [0, 1).
    """
    rows = zip(logits, temperature, top_k, top_p, points, strict=True)
    return [
        int(row.argmax()) if heat == 0 else _draw(row / heat, k, p, point) for row, heat, k, p, point in rows
    ]


def _draw(scaled: Tensor, top_k: int, top_p: float, point: float) -> int:
    probabilities = scaled.softmax(-1)
    if 0 < top_k < scaled.numel():
        cut = probabilities.topk(top_k).values[-1]
        probabilities = probabilities.where(probabilities >= cut, 0)
    if top_p < 1:
        probabilities = probabilities.where(_nucleus(probabilities, top_p), 0)
    cumulative = probabilities.double().cumsum(-1)
    place = torch.searchsorted(cumulative, point * cumulative[-1], right=True)
    return int(place.clamp_max(scaled.numel() - 1))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Mask of the smallest set of tokens whose renormalised probability reaches `top_p`."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    keep[order] = before < top_p * ordered.sum()
    return keep
