"""Packed weights hold what the file says; products are their exact dot products, whatever the batch."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from engine.kernels.cpu import packed as matrices
from engine.kernels.cpu.packed import BF16, F16, F32, PANEL, Q4_0, Q4_1, Q8_0, Floats, Packed

TYPES = {
    Q4_0: gguf.GGMLQuantizationType.Q4_0,
    Q4_1: gguf.GGMLQuantizationType.Q4_1,
    Q8_0: gguf.GGMLQuantizationType.Q8_0,
}
SIZES = [(48, 64), (40, 96), (16, 32), (960, 576), (576, 1536)]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def as_bf16(x: Floats) -> NDArray[np.uint16]:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> Floats:
    return (x.astype(np.uint32) << 16).view(np.float32)


def random_matrix(native: ctypes.CDLL, bits: int, rows: int, cols: int, seed: int = 0) -> Packed:
    """Random weights of the file format that `bits` hold without loss."""
    kind = Q4_1 if bits == 4 else Q8_0
    data = quantize(normal(rows, cols, seed=seed, scale=0.1), TYPES[kind])
    return matrices.matrix(native, rows, cols, bits).pack(kind, data)


def assert_sums_to(out: Floats, weights: Floats, x: Floats) -> None:
    """`out` is x · weightsᵀ within the rounding of fp32 sums."""
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(weights).astype(np.float64).T
    assert (np.abs(out - exact) <= 2e-6 * size + 1e-9).all()


@pytest.mark.parametrize(("bits", "kind"), [(4, Q4_0), (4, Q4_1), (8, Q4_0), (8, Q8_0)])
def test_what_the_bits_hold_is_kept(native: ctypes.CDLL, bits: int, kind: int) -> None:
    data = quantize(normal(40, 96), TYPES[kind])
    weights = matrices.matrix(native, 40, 96, bits).pack(kind, data)
    np.testing.assert_array_equal(weights.unpacked(), dequantize(data, TYPES[kind]))


def test_every_byte_of_a_file_is_kept(native: ctypes.CDLL) -> None:
    """All values that a quantised file may hold, −128 included."""
    data = np.zeros((17, 34), np.uint8)
    data[:, :2] = np.float16(0.03125).view(np.uint16).reshape(1).view(np.uint8)
    data[:, 2:] = np.arange(17 * 32, dtype=np.uint16).astype(np.uint8).reshape(17, 32)
    weights = matrices.matrix(native, 17, 32, 8).pack(Q8_0, data)
    np.testing.assert_array_equal(weights.unpacked(), dequantize(data, TYPES[Q8_0]))
    x = matrices.quantise(native, normal(3, 32))
    assert_sums_to(matrices.product(weights, x)[:, :17], weights.unpacked(), x.dequantised())


@pytest.mark.parametrize("scale", [6e-8, 1e-5, 0.37, 6e4])
@pytest.mark.parametrize(("bits", "kind"), [(4, Q4_1), (8, Q8_0)])
def test_scales_of_any_size_are_kept(native: ctypes.CDLL, bits: int, kind: int, scale: float) -> None:
    data = quantize(normal(16, 64), TYPES[kind])
    data.reshape(16, 2, -1)[..., :2] = np.array([scale, -scale], np.float16).view(np.uint8).reshape(2, 2)
    weights = matrices.matrix(native, 16, 64, bits).pack(kind, data)
    np.testing.assert_array_equal(weights.unpacked(), dequantize(data, TYPES[kind]))
    x = matrices.quantise(native, normal(20, 64))
    assert_sums_to(matrices.product(weights, x), weights.unpacked(), x.dequantised())


def test_rows_are_packed_one_after_another(native: ctypes.CDLL) -> None:
    parts = [quantize(normal(rows, 64, seed=rows), TYPES[Q4_1]) for rows in (5, 20, 11)]
    weights = matrices.matrix(native, 36, 64, 4)
    for first, part in zip((0, 5, 25), parts, strict=True):
        weights.pack(Q4_1, part, first)
    np.testing.assert_array_equal(weights.unpacked(), dequantize(np.concatenate(parts), TYPES[Q4_1]))


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_floats_become_8_bits(native: ctypes.CDLL, kind: int) -> None:
    source = normal(33, 128, scale=0.05)
    source[3] = 0
    stored = {F32: source, F16: source.astype(np.float16), BF16: as_bf16(source)}[kind]
    values = from_bf16(stored) if kind == BF16 else stored.astype(np.float32)
    error = np.abs(matrices.matrix(native, 33, 128, 8).pack(kind, stored).unpacked() - values)
    largest = np.abs(values).reshape(33, 4, 32).max(2)
    assert (error.reshape(33, 4, 32) <= (largest / 127 * 0.5 * 1.02)[..., None] + 1e-7).all()


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
def test_4_bits_are_better_than_plain_steps(native: ctypes.CDLL, kind: int) -> None:
    """In no row worse than the plain division of each block's range, and better in the mean."""
    source = normal(64, 128, scale=0.05)
    stored = {
        F32: source,
        F16: source.astype(np.float16),
        BF16: as_bf16(source),
        Q8_0: quantize(source, TYPES[Q8_0]),
    }[kind]
    values = {BF16: from_bf16, Q8_0: lambda x: dequantize(x, TYPES[Q8_0])}.get(kind, np.float32)(stored)
    plain = dequantize(quantize(values, TYPES[Q4_1]), TYPES[Q4_1])
    ours = matrices.matrix(native, 64, 128, 4).pack(kind, stored).unpacked()
    before, after = ((plain - values) ** 2).mean(1), ((ours - values) ** 2).mean(1)
    assert (after <= before * 1.0001).all()
    assert after.mean() < 0.92 * before.mean()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_constant_block_is_kept_in_4_bits(native: ctypes.CDLL, value: float) -> None:
    source = np.full((2, 32), value, np.float32)
    np.testing.assert_array_equal(matrices.matrix(native, 2, 32, 4).pack(F32, source).unpacked(), source)


def test_other_formats_go_through_floats(native: ctypes.CDLL) -> None:
    data = quantize(normal(20, 64), TYPES[Q4_1])
    values = dequantize(data, TYPES[Q4_1])
    error = np.abs(matrices.matrix(native, 20, 64, 8).pack(Q4_1, data).unpacked() - values)
    assert (error <= np.abs(values).max() / 127 * 0.51).all()


def test_activations(native: ctypes.CDLL) -> None:
    x = normal(5, 96, scale=3.0)
    x[1] = 0
    x[2, :32] = 1e-35
    error = np.abs(matrices.quantise(native, x).dequantised() - x).reshape(5, 3, 32)
    assert (error <= (np.abs(x).reshape(5, 3, 32).max(2) / 127 * 0.5001)[..., None] + 1e-30).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_shows_in_its_row_only(
    native: ctypes.CDLL, bits: int, value: float
) -> None:
    x = normal(3, 64)
    x[1, 40] = value
    out = matrices.product(random_matrix(native, bits, 32, 64), matrices.quantise(native, x))
    assert np.isnan(out).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_products_are_exact_dot_products(native: ctypes.CDLL, bits: int, rows: int, cols: int) -> None:
    weights = random_matrix(native, bits, rows, cols)
    x = matrices.quantise(native, normal(21, cols, seed=1))
    out = matrices.product(weights, x)
    assert_sums_to(out[:, :rows], weights.unpacked(), x.dequantised())
    assert (out[:, rows:] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_magnitudes_do_not_overflow(native: ctypes.CDLL, bits: int) -> None:
    source = np.tile(np.float32([-1, 1]), (16, 16)) if bits == 4 else np.full((16, 32), -1, np.float32)
    weights = matrices.matrix(native, 16, 32, bits).pack(F32, source)
    for signs in (source[:1], -source[:1], np.ones((1, 32), np.float32)):
        x = matrices.quantise(native, np.ascontiguousarray(signs))
        assert_sums_to(matrices.product(weights, x), weights.unpacked(), x.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cols", [96, 576])
def test_a_row_is_the_same_in_every_batch(native: ctypes.CDLL, bits: int, cols: int) -> None:
    weights = random_matrix(native, bits, 72, cols)
    x = matrices.quantise(native, normal(300, cols, seed=2))
    alone = np.concatenate([matrices.product(weights, x, row=row, rows=1) for row in range(x.rows)])
    for rows in [*range(2, 40), 64, 129, 300]:
        for row in {0, x.rows - rows}:
            np.testing.assert_array_equal(
                matrices.product(weights, x, row=row, rows=rows), alone[row : row + rows]
            )


@pytest.mark.parametrize("bits", [4, 8])
def test_panels_are_products_of_their_own(native: ctypes.CDLL, bits: int) -> None:
    weights = random_matrix(native, bits, 100, 64)
    x = matrices.quantise(native, normal(18, 64))
    whole = matrices.product(weights, x)
    for panel, panels in [(0, 1), (1, 3), (4, 3), (6, 1)]:
        part = matrices.product(weights, x, panel=panel, panels=panels)
        np.testing.assert_array_equal(part, whole[:, panel * PANEL : (panel + panels) * PANEL])


@pytest.fixture
def wide(native: ctypes.CDLL) -> ctypes.CDLL:
    if not native.quaver_has_wide_product():
        pytest.skip("no matrix tiles in this instruction set")
    return native


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_wide_products(wide: ctypes.CDLL, bits: int, rows: int, cols: int) -> None:
    weights = random_matrix(wide, bits, rows, cols)
    x = as_bf16(normal(70, cols, seed=3))
    held = from_bf16(as_bf16(weights.unpacked()))
    assert_sums_to(matrices.wide_product(weights, x)[:, :rows], held, from_bf16(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_in_every_wide_batch(wide: ctypes.CDLL, bits: int) -> None:
    weights = random_matrix(wide, bits, 80, 640)
    x = as_bf16(normal(100, 640, seed=4))
    whole = matrices.wide_product(weights, x)
    for rows in [*range(1, 36), 48, 63, 64, 65]:
        np.testing.assert_array_equal(matrices.wide_product(weights, x[:rows]), whole[:rows])
    for panel, panels in [(0, 1), (1, 3), (2, 2), (4, 1)]:
        part = matrices.wide_product(weights, x, panel=panel, panels=panels, stride=100)
        np.testing.assert_array_equal(
            part[:, : panels * PANEL], whole[:, panel * PANEL : (panel + panels) * PANEL]
        )
        assert np.isnan(part[:, panels * PANEL :]).all()
