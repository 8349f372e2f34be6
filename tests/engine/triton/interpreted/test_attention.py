"""Paged attention and head statistics against the reference."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import fused, reference, triton
from engine.kernels.fused import Attended
from engine.kernels.triton.launch import Block

TILE = Block(m=16, n=16)
windows = st.one_of(st.none(), st.integers(1, 35))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """Sequences of random lengths in a pool whose unused places hold infinities."""

    q: Tensor  # [B, H, D]
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    prompts: Tensor

    def widened(self) -> Case:
        """The same numbers in fp32, with zeros where nothing is held."""
        return self._replace(
            q=self.q.float(),
            keys=self.keys.float().nan_to_num(0, 0, 0),
            values=self.values.float().nan_to_num(0, 0, 0),
        )


@st.composite
def cases(draw: Any, batch: int = 3, most: int = 30) -> Case:
    page, groups = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 3))
    share, width = draw(st.integers(1, 4)), draw(st.sampled_from([8, 16, 24]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=batch))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    needed = [-(-length // page) for length in lengths]
    shape = (sum(needed) + 1, page, groups, width)
    keys, values = (torch.full(shape, float("inf"), dtype=dtype) for _ in range(2))
    order = torch.randperm(shape[0], generator=source).tolist()
    table = torch.full((len(lengths), max(needed)), order.pop())
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        slots = torch.arange(length)
        slots = table[row, slots // page] * page + slots % page
        for pages in (keys, values):
            pages.view(-1, groups, width)[slots] = torch.randn(length, groups, width, generator=source).to(
                dtype
            )
    q = 2 * torch.randn(len(lengths), groups * share, width, generator=source)
    prompts = torch.tensor([draw(st.integers(1, length)) for length in lengths])
    return Case(q.to(dtype), keys, values, table, torch.tensor(lengths), prompts)


def compare(found: Attended, expected: Attended, tolerance: float) -> None:
    torch.testing.assert_close(found.out.float(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=2e-4, rtol=0)


@given(cases(), st.integers(1, 4), windows)
@settings(deadline=None, max_examples=8)
def test_decode(case: Case, parts: int, window: int | None) -> None:
    q, keys, values, table, lengths, _ = case
    found = triton.attend_decode(q, keys, values, table, lengths, window=window, block=TILE, parts=parts)
    expected = fused.attend_decode(*case.widened()[:5], window=window)
    compare(found, expected, TOLERANCE[q.dtype])


@given(cases(batch=1), st.integers(1, 30), windows)
@settings(deadline=None, max_examples=8)
def test_prefill(case: Case, count: int, window: int | None) -> None:
    _, keys, values, table, lengths, _ = case
    heads, width = case.q.shape[1:]
    length = int(lengths[0])
    count = min(count, length)
    start = length - count
    q = torch.randn(count, heads, width).to(keys.dtype)
    found = triton.attend_prefill(q, keys, values, table, start, window=window, block=TILE)
    wide = case.widened()
    expected = fused.attend_prefill(q.float(), wide.keys, wide.values, table, start, window=window)
    compare(found, expected, TOLERANCE[q.dtype])


@given(cases(), st.integers(1, 3), st.booleans(), windows)
@settings(deadline=None, max_examples=8)
def test_head_statistics(case: Case, parts: int, kept: bool, window: int | None) -> None:
    q, keys, values, table, lengths, prompts = case
    cut = {"window": window, "block": TILE, "parts": parts}
    lse = triton.attend_decode(q, keys, values, table, lengths, **cut).lse if kept else None
    found = triton.head_statistics(q, keys, table, lengths, prompts, lse=lse, **cut)
    wide = case.widened()
    expected = reference.head_statistics(wide.q, wide.keys, table, lengths, prompts, window=window)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4, equal_nan=True)
    assert (found[:, 0] <= math.log(q.shape[1]) + 1e-4).all()


def test_a_head_that_sees_the_sink_alone() -> None:
    """Probabilities of exactly 0 and 1: divergences stay finite."""
    keys = torch.zeros(3, 4, 1, 16)
    keys[0, 0, 0] = 40.0
    q = torch.stack((torch.full((16,), 9.0), torch.zeros(16)))[None]
    arguments = (q, keys, torch.tensor([[0, 1, 2]]), torch.tensor([12]), torch.tensor([4]))
    found = triton.head_statistics(*arguments, block=TILE, parts=2)
    torch.testing.assert_close(found, reference.head_statistics(*arguments), atol=2e-5, rtol=1e-4)
    assert found[0, 2, 0] == 1


@pytest.mark.parametrize("length", [1, 2, 200])
def test_blocks_chosen_by_shape(length: int) -> None:
    """Without overrides: the tiles and parts that a GPU would get."""
    keys, values = torch.randn(2, 13, 16, 3, 64)
    q, table, lengths = torch.randn(1, 9, 64), torch.arange(13)[None], torch.tensor([length])
    torch.testing.assert_close(
        triton.decode_attention(q, keys, values, table, lengths),
        reference.decode_attention(q, keys, values, table, lengths),
        atol=2e-5,
        rtol=1e-4,
    )
