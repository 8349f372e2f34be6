"""Packed matrices and quantised activations as numpy sees them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
PANEL = 16
F32, F16, BF16, Q4_0, Q4_1, Q8_0 = range(6)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, cols] inside the library; freed with the object."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    rows: int
    cols: int

    def __del__(self) -> None:
        self.library.quaver_matrix_free(self.handle)

    @property
    def panels(self) -> int:
        return -(-self.rows // PANEL)

    def pack(self, kind: int, data: NDArray[np.generic], first: int = 0) -> Packed:
        """Pack the rows of `data` from row `first` on."""
        data = np.ascontiguousarray(data)
        self.library.quaver_pack_rows(self.handle, first, data.shape[0], kind, pointer(data))
        return self

    def unpacked(self) -> Floats:
        """Return the weights [rows, cols] that the matrix holds."""
        out = np.empty((self.rows, self.cols), np.float32)
        for row in range(self.rows):
            self.library.quaver_unpack_row(self.handle, row, pointer(out[row]))
        return out


@dataclass(frozen=True)
class Quantised:
    """Rows [rows, cols] of int8 activations in one buffer."""

    buffer: NDArray[np.uint8]
    rows: int
    cols: int

    def part(self, offset: int, count: int, kind: type) -> NDArray[np.generic]:
        size = np.dtype(kind).itemsize
        return self.buffer[offset : offset + count * size].view(kind).reshape(self.rows, -1)

    def dequantised(self) -> Floats:
        """Return scale · q [rows, cols]."""
        q = self.part(0, self.rows * self.cols, np.int8).astype(np.float32)
        offset = -(-self.rows * self.cols // 64) * 64
        scale = self.part(offset, self.rows * self.cols // BLOCK, np.float32)
        return q * np.repeat(scale, BLOCK, axis=1)


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """The array's first byte; the caller keeps the array."""
    return ctypes.c_void_p(array.ctypes.data)


def aligned(size: int) -> NDArray[np.uint8]:
    """Zeros from a 64-byte boundary on."""
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def matrix(library: ctypes.CDLL, rows: int, cols: int, bits: int) -> Packed:
    """A matrix of zeros."""
    library.quaver_matrix.restype = ctypes.c_void_p
    handle = library.quaver_matrix(rows, cols, bits)
    assert handle
    return Packed(library, ctypes.c_void_p(handle), rows, cols)


def quantise(library: ctypes.CDLL, x: Floats) -> Quantised:
    """Quantise whole rows [rows, cols]."""
    rows, cols = x.shape
    library.quaver_activation_bytes.restype = ctypes.c_size_t
    buffer = aligned(library.quaver_activation_bytes(rows, cols))
    library.quaver_quantise(pointer(x), rows, cols, pointer(buffer))
    return Quantised(buffer, rows, cols)


def product(
    weights: Packed,
    x: Quantised,
    *,
    panel: int = 0,
    panels: int | None = None,
    row: int = 0,
    rows: int | None = None,
) -> Floats:
    """Rows [row, row + rows) times panels [panel, panel + panels): [rows, 16 · panels]."""
    panels = weights.panels - panel if panels is None else panels
    rows = x.rows - row if rows is None else rows
    out = np.full((rows, panels * PANEL), np.nan, np.float32)
    weights.library.quaver_product(
        weights.handle,
        panel,
        panels,
        pointer(x.buffer),
        x.rows,
        row,
        rows,
        pointer(out),
        ctypes.c_int64(out.shape[1]),
    )
    return out


def scratch(weights: Packed, panels: int) -> NDArray[np.uint8]:
    """What a wide product of so many panels needs."""
    weights.library.quaver_wide_scratch_bytes.restype = ctypes.c_size_t
    return aligned(weights.library.quaver_wide_scratch_bytes(weights.handle, panels))


def wide_product(
    weights: Packed,
    x: NDArray[np.uint16],
    *,
    panel: int = 0,
    panels: int | None = None,
    stride: int | None = None,
) -> Floats:
    """bf16 rows times panels [panel, panel + panels): [rows, stride]; what is not written stays NaN."""
    panels = weights.panels - panel if panels is None else panels
    room = scratch(weights, panels)
    out = np.full((len(x), stride or panels * PANEL), np.nan, np.float32)
    weights.library.quaver_wide_product(
        weights.handle,
        panel,
        panels,
        pointer(x),
        len(x),
        pointer(out),
        ctypes.c_int64(out.shape[1]),
        pointer(room),
    )
    return out
