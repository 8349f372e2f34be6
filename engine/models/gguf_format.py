"""The container format of GGUF: metadata and tensors, without any meaning.

The gguf package's own reader makes several objects for every array element (seconds for a
vocabulary) and follows damaged lengths wherever they lead. This one reads each array at once and
checks every length against the file. What a tensor's bytes mean is left to the gguf package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class FormatError(ValueError):
    """The bytes are not a whole GGUF file; the message says where they stop making sense."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as stored: `shape` in numpy order (rows first), `data` its bytes, rows × row bytes."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: Bytes

    def dequantize(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the values as a new float32 array of `shape`.

        Raises NotImplementedError for a type that the gguf package cannot dequantise.
        """
        data: np.ndarray[Any, Any] = self.data
        if self.kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            data = data.view("<f4" if self.kind == gguf.GGMLQuantizationType.F32 else "<f2")
        return np.array(gguf.quants.dequantize(data, self.kind), dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True)
class GgufContents:
    """Everything in a GGUF file. Tensor data are views of the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufContents:
    """Map a GGUF file (version 2 or 3, little-endian) and return what is in it.

    Raises OSError when it cannot be opened and `FormatError` when it is not whole.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise FormatError("it does not start with 'GGUF'")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise FormatError(f"version {version} is not one of {_VERSIONS}")
    tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value()
    heads = [_tensor_head(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise FormatError(f"alignment {alignment!r} makes no sense")
    base = -(-cursor.offset // alignment) * alignment
    return GgufContents(metadata, {head[0]: _tensor(mapped, base, head) for head in heads})


class _Cursor:
    """Reads little-endian values one after the other, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 4

    def scalar(self, code: str) -> Any:
        start = self._advance(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self._data, start)[0]

    def string(self) -> str:
        start = self._advance(self.scalar("Q"))
        try:
            return self._data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"the string at byte {start} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = self._code(kind)
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack_from(f"<{count}{code}", self._data, start))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise FormatError(f"value type {kind} at byte {self.offset} is unknown")
        return _SCALARS[kind]

    def _advance(self, size: int) -> int:
        start, end = self.offset, self.offset + size
        if end > len(self._data):
            raise FormatError(f"byte {start} asks for {size} more, the file has {len(self._data) - start}")
        self.offset = end
        return start


_Head = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset of the data


def _tensor_head(cursor: _Cursor) -> _Head:
    name, rank = cursor.string(), cursor.scalar("I")
    if rank > 8:
        raise FormatError(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(mapped: mmap.mmap, base: int, head: _Head) -> StoredTensor:
    name, shape, kind, offset = head
    try:
        quantization = gguf.GGMLQuantizationType(kind)
        rows = gguf.quants.quant_shape_to_byte_shape(shape or (1,), quantization)
    except (ValueError, KeyError) as error:
        raise FormatError(f"tensor {name!r}: {error}") from error
    size = math.prod(rows)
    start = base + offset
    if start + size > len(mapped):
        raise FormatError(f"tensor {name!r} ends at byte {start + size}, the file at {len(mapped)}")
    return StoredTensor(name, quantization, shape, np.frombuffer(mapped, np.uint8, size, start).reshape(rows))
