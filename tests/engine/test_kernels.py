"""Reference kernels against naive float64 computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import kernels
from engine.kernels import reference
from engine.messages import HEAD_SIGNALS

PAGE = 4


def paged(
    context: int, groups: int, width: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence scattered over a pool of random garbage: pages, table."""
    source = torch.Generator().manual_seed(seed)
    pages = -(-context // PAGE)
    shape = (pages + 3, PAGE, groups, width)
    k, v = torch.randn(shape, generator=source), torch.randn(shape, generator=source)
    return k, v, torch.randperm(pages + 3, generator=source)[:pages][None]


def naive_attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Probabilities [heads, context] of one query [heads, width] over keys [context, groups, width]."""
    share = q.shape[0] // k.shape[1]
    rows = []
    for head, query in enumerate(q):
        scores = k[:, head // share] @ query / math.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        rows.append(weights / weights.sum())
    return np.array(rows)


def flat(pages: torch.Tensor, table: torch.Tensor, length: int) -> np.ndarray:
    return pages[table[0]].reshape(-1, *pages.shape[2:])[:length].double().numpy()


sizes = given(
    context=st.integers(1, 23),
    groups=st.sampled_from([1, 2, 3]),
    share=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)


@sizes
@settings(deadline=None, max_examples=40)
def test_attention_of_decode_and_prefill(context: int, groups: int, share: int, seed: int) -> None:
    k, v, table = paged(context, groups, 8, seed)
    q = torch.randn(context, groups * share, 8, generator=torch.Generator().manual_seed(seed + 1))
    prefill = reference.prefill_attention(q, k, v, table, 0)
    start = context // 2
    rest = reference.prefill_attention(q[start:], k, v, table, start)
    decode = reference.decode_attention(q[-1:], k, v, table, torch.tensor([context]))
    for t in range(context):
        p = naive_attention(q[t].double().numpy(), flat(k, table, t + 1))
        values = flat(v, table, t + 1).repeat(share, axis=1)
        expected = np.einsum("hc,chd->hd", p, values)
        np.testing.assert_allclose(prefill[t], expected, atol=1e-5)
        if t >= start:
            np.testing.assert_allclose(rest[t - start], expected, atol=1e-5)
    np.testing.assert_allclose(decode[0], expected, atol=1e-5)


@sizes
@settings(deadline=None, max_examples=40)
def test_a_window_is_attention_over_the_last_tokens(context: int, groups: int, share: int, seed: int) -> None:
    window = seed % 7 + 1
    k, v, table = paged(context, groups, 8, seed)
    q = torch.randn(context, groups * share, 8, generator=torch.Generator().manual_seed(seed + 1))
    prefill = reference.prefill_attention(q, k, v, table, 0, window=window)
    start = context // 2
    rest = reference.prefill_attention(q[start:], k, v, table, start, window=window)
    length = torch.tensor([context])
    decode = reference.decode_attention(q[-1:], k, v, table, length, window=window)
    for t in range(context):
        first = max(0, t + 1 - window)
        p = naive_attention(q[t].double().numpy(), flat(k, table, t + 1)[first:])
        values = flat(v, table, t + 1)[first:].repeat(share, axis=1)
        expected = np.einsum("hc,chd->hd", p, values)
        np.testing.assert_allclose(prefill[t], expected, atol=1e-5)
        if t >= start:
            np.testing.assert_allclose(rest[t - start], expected, atol=1e-5)
    np.testing.assert_allclose(decode[0], expected, atol=1e-5)
    found = reference.head_statistics(q[-1:], k, table, length, length, window=window)
    found = dict(zip(HEAD_SIGNALS, found[0].double().numpy(), strict=True))
    divergence = (p * np.log(p / p.mean(0))).sum(1)
    np.testing.assert_allclose(found["head_kl"], divergence, atol=1e-4)
    np.testing.assert_allclose(found["sink_mass"], p[:, 0] if first == 0 else 0, atol=1e-5)


@sizes
@settings(deadline=None, max_examples=60)
def test_head_statistics(context: int, groups: int, share: int, seed: int) -> None:
    k, _, table = paged(context, groups, 8, seed)
    heads = groups * share
    q = 3 * torch.randn(1, heads, 8, generator=torch.Generator().manual_seed(seed + 1))
    prompt = seed % context + 1
    found = (
        reference.head_statistics(q, k, table, torch.tensor([context]), torch.tensor([prompt]))
        .double()
        .numpy()[0]
    )
    p = naive_attention(q[0].double().numpy(), flat(k, table, context))
    mean = p.mean(0)
    kl = (p * np.log(p / mean)).sum(1)
    sink, sink_mean = p[:, 0], mean[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(sink < 1, (1 - sink) * np.log((1 - sink) / (1 - sink_mean)), 0)
    bernoulli = sink * np.log(sink / sink_mean) + np.nan_to_num(rest)
    columns = dict(zip(HEAD_SIGNALS, found, strict=True))
    np.testing.assert_allclose(columns["head_kl"], kl, atol=2e-5)
    np.testing.assert_allclose(columns["head_kl_nonsink"], kl - bernoulli, atol=5e-5)
    np.testing.assert_allclose(columns["sink_mass"], sink, atol=1e-5)
    assert (columns["head_kl"] <= math.log(heads) + 1e-5).all()
    if context > 1:
        np.testing.assert_allclose(columns["prev_attention"], p[:, -2], atol=1e-5)
    else:
        assert np.isnan(columns["prev_attention"]).all()
    if context > prompt:
        on_prompt, on_answer = p[:, :prompt].mean(1), p[:, prompt:].mean(1)
        np.testing.assert_allclose(columns["lookback"], on_prompt / (on_prompt + on_answer), atol=1e-5)
    else:
        assert np.isnan(columns["lookback"]).all()


def test_head_statistics_ignore_what_lies_beyond_the_context() -> None:
    k, _, table = paged(10, 2, 8, 3)
    q = torch.randn(1, 4, 8)
    lengths, prompts = torch.tensor([10]), torch.tensor([6])
    clean = reference.head_statistics(q, k, table, lengths, prompts)
    k[table[0, -1], 2:] = float("inf")
    assert torch.equal(reference.head_statistics(q, k, table, lengths, prompts), clean)


@given(
    st.lists(st.floats(-60, 60, allow_subnormal=False), min_size=2, max_size=40),
    st.integers(0, 39),
    st.floats(0.1, 5),
)
@settings(deadline=None)
def test_token_statistics(values: list[float], token: int, scale: float) -> None:
    z = np.array(values, np.float32).astype(np.float64) * np.float64(np.float32(scale))
    token %= len(z)
    p = np.exp(z - z.max())
    p /= p.sum()
    ordered = np.sort(p)[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum()
    row = torch.tensor(z, dtype=torch.float32)[None]
    surprisal, confidence, margin, rank, found = reference.token_statistics(row, torch.tensor([token]))[0]
    assert surprisal == pytest.approx(np.log(np.exp(z - z.max()).sum()) - z[token] + z.max(), abs=1e-3)
    assert confidence == pytest.approx(p[token], abs=1e-5)
    assert margin == pytest.approx(ordered[0] - ordered[1], abs=1e-5)
    assert rank == (row[0] > row[0, token]).sum() + 1
    assert found == pytest.approx(entropy, abs=1e-4)
    assert reference.entropy(row)[0] == pytest.approx(entropy, abs=1e-4)


def test_statistics_survive_forbidden_tokens() -> None:
    logits = torch.full((1, 50), float("-inf"))
    logits[0, 3] = 2.0
    surprisal, confidence, margin, rank, entropy = reference.token_statistics(logits, torch.tensor([3]))[0]
    assert (surprisal, confidence, margin, rank, entropy) == (0, 1, 1, 1, 0)


def test_uniform_logits_reach_the_greatest_entropy() -> None:
    assert reference.entropy(torch.zeros(1, 49152))[0] == pytest.approx(math.log(49152), abs=1e-4)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*reference"):
        kernels.load("cuda")
