"""Blocks: their bytes, what comes back, and that the native kernels do just the same."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.int8 import LARGEST, BlockLayout, pack, unpack
from engine.kv.pages import PagePool

SMOLLM2 = BlockLayout(layers=30, tokens=64, kv_heads=3, head_dim=64)
relaxed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Case:
    """A pool of random numbers, a block of its pages, and the tokens to keep of it."""

    pool: PagePool
    pages: list[int]
    layout: BlockLayout
    keep: NDArray[np.bool_] | None

    @property
    def kept(self) -> NDArray[np.bool_]:
        return np.ones(self.layout.tokens, np.bool_) if self.keep is None else self.keep

    def tokens(self, of: Tensor) -> Tensor:
        """The block's numbers [L, tokens, G, D]."""
        return of[:, self.pages].flatten(1, 2)

    def pack(self, kernels: ctypes.CDLL | None = None) -> NDArray[np.uint8]:
        out = np.full(self.layout.partial_size(int(self.kept.sum())), 0xA5, np.uint8)
        assert pack(self.pool, self.pages, self.layout, out, keep=self.keep, kernels=kernels)
        return out

    def unpack(self, packed: NDArray[np.uint8], kernels: ctypes.CDLL | None = None) -> tuple[Tensor, Tensor]:
        """The whole pool afterwards; it was full of NaN before."""
        target = pool_like(self.pool)
        held = unpack(target, packed, self.pages, self.layout, kernels=kernels)
        assert (held == self.kept).all()
        return target.keys, target.values


def pool_like(pool: PagePool) -> PagePool:
    layers, pages, page_size, kv_heads, head_dim = pool.keys.shape
    made = PagePool(
        layers=layers,
        pages=pages,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=pool.keys.dtype,
    )
    made.keys.fill_(torch.nan)
    made.values.fill_(torch.nan)
    return made


def numbers(shape: tuple[int, ...], random: torch.Generator, least: float, most: float) -> Tensor:
    """Magnitudes from 2^least to 2^most, of either sign, each channel and token on a level of its own."""
    layers, pages, page_size, heads, width = shape
    levels = torch.rand(layers, pages, page_size, 1, 1, generator=random) + torch.rand(
        layers, 1, 1, heads, width, generator=random
    )
    exponents = least + (levels + torch.rand(shape, generator=random)) / 3 * (most - least)
    signs = torch.randint(-1, 2, shape, generator=random)  # some are zero
    return (signs * exponents.double().exp2()).float()


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Case:
    page_size, count = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(1, 4))
    layout_sizes = {
        "layers": draw(st.integers(1, 3)),
        "kv_heads": draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from([1, 8, 24, 64])),
    }
    pool = PagePool(
        **layout_sizes,
        pages=count + 2,
        page_size=page_size,
        dtype=dtype or draw(st.sampled_from([torch.bfloat16, torch.float32])),
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    least = draw(st.sampled_from([-140.0, -30.0, -10.0, 0.0, 15.0]))
    most = least + draw(st.sampled_from([0.0, 3.0, 20.0, 160.0]))
    for pages in (pool.keys, pool.values):
        pages[:] = numbers(tuple(pages.shape), random, least, min(most, 22.9))
        pages[:, :, :, draw(st.integers(0, layout_sizes["kv_heads"] - 1))] *= draw(st.sampled_from([0, 1]))
    try:
        layout = BlockLayout(tokens=count * page_size, **layout_sizes)
    except ValueError:
        assume(False)
    keep = None
    if draw(st.booleans()):
        keep = (torch.rand(layout.tokens, generator=random) < draw(st.sampled_from([0, 0.5, 0.9, 1]))).numpy()
    pages = torch.randperm(pool.pages, generator=random)[:count].tolist()
    return Case(pool, pages, layout, keep)


@relaxed
@given(case=cases())
def test_a_block_comes_back_within_half_a_step(case: Case) -> None:
    kept = torch.from_numpy(case.kept)
    found = case.unpack(case.pack())
    for before, after, shared in zip((case.pool.keys, case.pool.values), found, (1, (2, 3)), strict=True):
        original, back = case.tokens(before)[:, kept].double(), case.tokens(after)[:, kept].double()
        assert not case.tokens(after)[:, ~kept].any(), "dropped tokens are zero"
        if kept.any():
            largest = original.abs().amax(shared, keepdim=True)
            scale = torch.where(largest > 0, largest / 127 * (1 + 2**-10) + 2**-24, 0)
            rounding = back.abs() * 2**-8 if before.dtype == torch.bfloat16 else 0
            assert ((back - original).abs() <= scale / 2 * 1.0001 + rounding).all()
        others = [page for page in range(case.pool.pages) if page not in case.pages]
        assert after[:, others].isnan().all(), "other pages are not touched"


@relaxed
@given(case=cases())
def test_the_parts_of_a_block(case: Case) -> None:
    """The form that other tiers rely on, spelled out byte by byte."""
    layout, kept, packed = case.layout, torch.from_numpy(case.kept), case.pack()
    count, data = int(kept.sum()), packed.tobytes()
    if count < layout.tokens:
        bitmap = -(-layout.tokens // 16) * 2
        bits = int.from_bytes(data[:bitmap], "little")
        assert [bits >> i & 1 for i in range(layout.tokens)] == kept.int().tolist()
        assert bits >> layout.tokens == 0
        data = data[bitmap:]
    size = layout.layers * count * layout.row
    codes = np.frombuffer(data, np.int8, 2 * size).reshape(2, layout.layers, count, layout.row)
    scales = np.frombuffer(data, "<f2", offset=2 * size)
    key_scales, value_scales = scales[: layout.layers * layout.row], scales[layout.layers * layout.row :]
    assert len(value_scales) == layout.layers * count
    assert codes.min(initial=0) >= -127
    for stored, pages, scale, shared in (
        (codes[0], case.pool.keys, key_scales.reshape(layout.layers, 1, layout.row), 1),
        (codes[1], case.pool.values, value_scales.reshape(layout.layers, count, 1), 2),
    ):
        original = case.tokens(pages)[:, kept].flatten(2).double().numpy()
        step = scale.astype(float)
        assert (np.abs(stored * step - original) <= step / 2 * 1.0001).all()
        largest = np.abs(original).max(shared, keepdims=True, initial=0)
        reached = np.abs(stored.astype(int)).max(shared, keepdims=True, initial=0)
        assert (reached[largest >= 127 * 2**-14] == 127).all()
        assert ((scale == 0) == (largest == 0)).all(), "no scale is flushed to zero"


@relaxed
@given(case=cases(torch.bfloat16))
def test_native_packing_is_the_same_to_the_byte(native: ctypes.CDLL, case: Case) -> None:
    packed = case.pack()
    assert np.array_equal(case.pack(native), packed)
    for ours, theirs in zip(case.unpack(packed, native), case.unpack(packed), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@relaxed
@given(
    case=cases(torch.bfloat16),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, -8.4e6]),
    in_keys=st.booleans(),
    data=st.data(),
)
def test_what_has_no_code_is_refused(
    native: ctypes.CDLL, case: Case, bad: float, in_keys: bool, data: st.DataObject
) -> None:
    pages = case.pool.keys if in_keys else case.pool.values
    place = data.draw(st.integers(0, case.layout.tokens - 1))
    page, offset = case.pages[place // case.pool.page_size], place % case.pool.page_size
    pages[data.draw(st.integers(0, case.layout.layers - 1)), page, offset, 0, -1] = bad
    for kernels in (None, native):
        out = np.empty(case.layout.size, np.uint8)
        assert not pack(case.pool, case.pages, case.layout, out, kernels=kernels)
    keep = np.arange(case.layout.tokens) != place
    rest = np.empty(case.layout.partial_size(case.layout.tokens - 1), np.uint8)
    for kernels in (None, native):
        assert pack(case.pool, case.pages, case.layout, rest, keep=keep, kernels=kernels)


def test_the_largest_magnitude_is_stored() -> None:
    pool = PagePool(layers=1, pages=1, page_size=2, kv_heads=1, head_dim=4, dtype=torch.float32)
    layout = BlockLayout(1, 2, 1, 4)
    out = np.empty(layout.size, np.uint8)
    pool.keys[0, 0, 1, 0, 2] = -LARGEST
    assert pack(pool, [0], layout, out)
    unpack(pool, out, [0], layout)
    assert pool.keys[0, 0, 1, 0, 2] == -LARGEST
    pool.keys[0, 0, 1, 0, 2] = -LARGEST - 1
    assert not pack(pool, [0], layout, out)


def test_a_second_trip_changes_nothing() -> None:
    """A block that was loaded and is stored again loses no more, in the pool's own precision."""
    pool = PagePool(layers=2, pages=4, page_size=16, kv_heads=2, head_dim=16, dtype=torch.float32)
    random = torch.Generator().manual_seed(5)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    layout = BlockLayout(2, 64, 2, 16)
    first, second = np.empty((2, layout.size), np.uint8)
    assert pack(pool, [0, 1, 2, 3], layout, first)
    unpack(pool, first, [0, 1, 2, 3], layout)
    assert pack(pool, [0, 1, 2, 3], layout, second)
    assert np.array_equal(first, second)


def test_a_block_of_smollm2_is_little_more_than_half_its_pages() -> None:
    pages = 2 * 30 * 64 * 3 * 64 * 2
    assert SMOLLM2.size / pages <= 0.53
    sizes = [SMOLLM2.partial_size(kept) for kept in range(65)]
    assert [SMOLLM2.kept(size) for size in sizes] == list(range(65))
    assert sizes == sorted(sizes)


def test_sizes_that_do_not_fit_are_refused() -> None:
    pool = PagePool(layers=2, pages=5, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    layout = BlockLayout(2, 8, 2, 8)
    block = np.zeros(layout.size, np.uint8)
    partial = np.zeros(layout.partial_size(3), np.uint8)
    with pytest.raises(ValueError, match="3 tokens says that it holds 0"):
        unpack(pool, partial, [0, 1], layout)
    with pytest.raises(ValueError, match="no block has"):
        unpack(pool, block[:-1], [0, 1], layout)
    for pages, message in (([0], "no block"), ([0, 5], "not all in a pool"), ([-1, 0], "not all in a pool")):
        with pytest.raises(ValueError, match=message):
            pack(pool, pages, layout, block)
    with pytest.raises(ValueError, match="the pool has"):
        pack(pool, [0, 1], BlockLayout(2, 8, 2, 16), block)
    with pytest.raises(ValueError, match="in one piece"):
        pack(pool, [0, 1], layout, np.zeros(2 * layout.size, np.uint8)[::2])
    with pytest.raises(ValueError, match="which of 8 tokens to keep"):
        pack(pool, [0, 1], layout, block, keep=np.ones(7, np.bool_))
    with pytest.raises(ValueError, match="too many for a block"):
        BlockLayout(1, 64, 1, 1)
