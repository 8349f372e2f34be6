"""Block shapes: they cover the work, and switch between decode and prefill."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")

from engine.kernels.triton import blocks

PROCESSORS = 108
rows = st.integers(1, 5000)
itemsizes = st.sampled_from([2, 4])
widths = st.sampled_from([16, 64, 80, 128, 256])


def is_tile(size: int) -> bool:
    """Whether a tensor core takes it: a power of two, sixteen or more."""
    return size >= 16 and size & (size - 1) == 0


@given(count=rows, outputs=rows, width=widths, itemsize=itemsizes, pair=st.booleans())
def test_tiles_are_what_tensor_cores_take(
    *, count: int, outputs: int, width: int, itemsize: int, pair: bool
) -> None:
    attention = blocks.attention(count, 3, width, itemsize, PROCESSORS)
    gemm, head = blocks.gemm(count, outputs, pair, itemsize, PROCESSORS), blocks.head(count, itemsize)
    assert is_tile(attention.m)
    assert is_tile(attention.n)
    assert all(is_tile(size) for block in (gemm, head) for size in (block.m, block.n, block.k))
    if count < blocks.MANY_ROWS:  # one tile holds all rows: what is loaded for them is loaded once
        assert min(attention.m, gemm.m, head.m) >= count
        assert max(attention.m, gemm.m, head.m) < 2 * max(count, blocks.LEAST_ROWS)


def test_the_switch_between_decode_and_prefill() -> None:
    """SmolLM2 and an 8B model: groups of 3 and 4 heads, 16 sequences or 2,048 tokens."""
    for width, groups, share in ((64, 3, 3), (128, 8, 4)):
        assert blocks.attention(share, groups, width, 2, PROCESSORS).m == 16
        assert blocks.attention(2048 * share, groups, width, 2, PROCESSORS).m == 128
    for pair in (False, True):
        decode = blocks.gemm(16, 14336, pair, 2, PROCESSORS)
        prefill = blocks.gemm(2048, 14336, pair, 2, PROCESSORS)
        assert (decode.m, prefill.m) == (16, 128)
        assert decode.stages > prefill.stages


def test_small_work_is_cut_smaller() -> None:
    """576 outputs, a prompt of 512: large tiles would leave most of the card idle."""
    assert blocks.gemm(512, 576, False, 2, PROCESSORS).m == 64
    assert blocks.gemm(1, 576, False, 2, PROCESSORS).n == 16
    assert blocks.gemm(1, 49152, False, 2, PROCESSORS).n == 64
    assert blocks.attention(512 * 3, 3, 64, 2, PROCESSORS).m == 64


@given(st.integers(1, 3000), st.integers(1, 100_000), st.sampled_from([16, 32, 64]), st.integers(1, 200))
def test_parts_of_a_context(programs: int, context: int, tile: int, processors: int) -> None:
    parts = blocks.splits(programs, context, tile, processors)
    tiles = ceil(context / tile)
    assert 1 <= parts <= tiles
    assert programs * parts >= 2 * processors or parts == tiles
    assert parts == 1 or programs * (parts - 1) < 2 * processors


@given(st.integers(1, 20_000), st.sampled_from([1, 16]))
def test_powers_of_two(count: int, least: int) -> None:
    found = blocks.power(count, least)
    assert found >= max(count, least)
    assert found == least or found < 2 * count
    assert found & (found - 1) == 0


@given(st.integers(1, 20_000))
def test_rows_get_one_to_eight_warps(width: int) -> None:
    assert blocks.row(width).warps in (1, 2, 4, 8)
