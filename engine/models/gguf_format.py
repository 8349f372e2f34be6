"""The container format of GGUF: metadata and tensors, without any meaning.

The gguf package's own reader makes several objects for every array element (seconds for a
vocabulary) and follows damaged lengths wherever they lead. This one reads each array at once and
checks every length against the file.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.weights import StoredWeight, row_bytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = 8  # bytes of a string's length, before it
_ALIGNMENT = 32
#: GGUF's numbers for the kinds of `engine.models.weights.BLOCKS`.
KINDS = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0"},
    **{35: "TQ2_0", 39: "MXFP4"},
}


class FormatError(ValueError):
    """The bytes are not a whole GGUF file; the message says where they stop making sense."""


@dataclass(frozen=True)
class GgufContents:
    """Everything in a GGUF file. Tensor data are views of the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredWeight]


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
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise FormatError(f"alignment {alignment!r} makes no sense")
    base = -(-cursor.offset // alignment) * alignment
    return GgufContents(metadata, {head[0]: _tensor(mapped, base, head) for head in heads})


class Strings:
    """An array of strings in the file, each decoded when asked for: most readers need few of them.

    `bounds` are where the strings (with their lengths) begin, and where the last one ends.
    FormatError for a string that is not UTF-8.
    """

    def __init__(self, data: mmap.mmap, bounds: list[int]) -> None:
        self._data = data
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, at: int) -> str:
        return _text(self._data, self._bounds[at] + _LENGTH, self._bounds[at + 1])

    def __iter__(self) -> Iterator[str]:
        for start, end in itertools.pairwise(self._bounds):
            yield _text(self._data, start + _LENGTH, end)


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
        return _text(self._data, start, self.offset)

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _array(self) -> list[Any] | Strings:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        code = self._code(kind)
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack_from(f"<{count}{code}", self._data, start))

    def _strings(self, count: int) -> Strings:
        """Step over `count` strings; a vocabulary has a hundred thousand, so the loop is a bare one."""
        data, at, bounds = self._data, self.offset, [self.offset]
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += _LENGTH + length_at(data, at)[0]
                bounds.append(at)
        except (struct.error, OverflowError):
            at = len(data) + 1
        if at > len(data):
            raise FormatError(f"an array of {count} strings at byte {self.offset} goes past the end")
        self.offset = at
        return Strings(data, bounds)

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


def _text(data: mmap.mmap, start: int, end: int) -> str:
    try:
        return data[start:end].decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"the string at byte {start} is not UTF-8") from error


_Head = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset of the data


def _tensor_head(cursor: _Cursor) -> _Head:
    name, rank = cursor.string(), cursor.scalar("I")
    if rank > 8:
        raise FormatError(f"tensor {name!r} has {rank} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(mapped: mmap.mmap, base: int, head: _Head) -> StoredWeight:
    name, shape, number, offset = head
    kind = KINDS.get(number)
    if kind is None:
        raise FormatError(f"tensor {name!r} has type {number}, which is not known")
    try:
        rows = (*shape[:-1], row_bytes(kind, shape[-1] if shape else 1))
    except ValueError as error:
        raise FormatError(f"tensor {name!r}: {error}") from error
    size = math.prod(rows)
    start = base + offset
    if start + size > len(mapped):
        raise FormatError(f"tensor {name!r} ends at byte {start + size}, the file at {len(mapped)}")
    return StoredWeight(kind, shape, np.frombuffer(mapped, np.uint8, size, start).reshape(rows))
