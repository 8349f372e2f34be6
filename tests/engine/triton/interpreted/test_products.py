"""Products with weights and the LM head against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import fused, triton
from engine.kernels.fused import Activation
from engine.kernels.triton.launch import Block

TILE = Block(m=16, n=16, k=16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = st.sampled_from(list(TOLERANCE))


@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 40),
    outputs=st.integers(1, 36),
    activation=st.sampled_from([None, "relu", "gelu", "silu_mul"]),
    dtype=dtypes,
    quantized=st.booleans(),
    biased=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_linear(
    *,
    rows: int,
    inner: int,
    outputs: int,
    activation: Activation | None,
    dtype: torch.dtype,
    quantized: bool,
    biased: bool,
) -> None:
    stored = 2 * outputs if activation == "silu_mul" else outputs
    x = torch.randn(rows, inner).to(dtype)
    weight, scale = torch.randn(stored, inner).to(dtype), None
    if quantized:
        weight = torch.randint(-127, 128, (stored, inner), dtype=torch.int8)
        scale = torch.rand(stored) / 64
    bias = torch.randn(stored) if biased else None
    found = triton.linear(x, weight, bias, activation, scale, TILE)
    expected = fused.linear(x, weight, bias, activation, scale)
    assert found.dtype == dtype
    # Relative to the size of the sums: both accumulate in fp32 and round once.
    size = 1 + expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= TOLERANCE[dtype] * size


@pytest.mark.parametrize("rows", [1, 30, 70])
def test_linear_with_the_blocks_of_its_shape(rows: int) -> None:
    x, weight = torch.randn(rows, 72), torch.randn(2 * 40, 72)
    torch.testing.assert_close(
        triton.linear(x, weight, activation="silu_mul"),
        fused.linear(x, weight, activation="silu_mul"),
        atol=1e-4,
        rtol=1e-5,
    )


def test_linear_refuses_what_it_cannot_multiply() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="int8 weights need a scale"):
        triton.linear(x, torch.zeros(4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"float16, inputs .*float32"):
        triton.linear(x, torch.zeros(4, 8, dtype=torch.float16))


@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 40),
    vocab=st.integers(1, 70),
    top=st.integers(1, 5),
    types=st.tuples(dtypes, dtypes),
    spread=st.sampled_from([0.0, 0.3, 20.0]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=30)
def test_lm_head(
    *,
    rows: int,
    inner: int,
    vocab: int,
    top: int,
    types: tuple[torch.dtype, torch.dtype],
    spread: float,
    seed: int,
) -> None:
    source = torch.Generator().manual_seed(seed)
    top = min(top, vocab)
    hidden = torch.randn(rows, inner, generator=source).to(types[0])
    weight = (spread * torch.randn(vocab, inner, generator=source)).to(types[1])
    tokens = torch.randint(-1, vocab, (rows,), generator=source)
    found = triton.lm_head(hidden, weight, tokens, top, TILE)
    expected = fused.lm_head(hidden, weight, tokens, top)
    size = float(1 + expected.top_logits.abs().max())
    for name in ("lse", "top_logits", "chosen"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), atol=2e-6 * size, rtol=1e-6, equal_nan=True
        )
    torch.testing.assert_close(found.entropy, expected.entropy, atol=2e-5 * size, rtol=0)
    logits = hidden.float() @ weight.float().T
    # Tokens may trade places only where their logits tie within rounding.
    torch.testing.assert_close(
        logits.gather(1, found.top_tokens), expected.top_logits, atol=2e-6 * size, rtol=1e-6
    )
    assert all(len(set(row)) == top for row in found.top_tokens.tolist())
    if spread == 0:
        assert found.top_tokens.tolist() == [list(range(top))] * rows


def test_lm_head_refuses_more_than_it_ranks() -> None:
    with pytest.raises(ValueError, match="top is 9"):
        triton.lm_head(torch.randn(2, 4), torch.randn(8, 4), top=9)
