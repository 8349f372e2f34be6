"""The format of a block's file: whatever is not, byte for byte, what was written is refused."""

from __future__ import annotations

import os
import struct

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kv import block_file
from engine.kv.block_file import HEADER, SECTOR, DamagedFileError, ForeignFileError, Header, Label

KEY = bytes(range(32))
LABEL = Label(b"f" * 32, b"s" * 16, b"n" * 32, b"t" * 16)
#: Where each field of the header begins, and its size.
FIELDS = {
    "magic": (0, 8),
    "version": (8, 4),
    "hole": (12, 4),
    "compressed": (16, 8),
    "raw": (24, 8),
    "fingerprint": (32, 32),
    "salt": (64, 16),
    "name": (80, 32),
    "tokens": (112, 16),
    "checksum": (128, 16),
    "zeros": (144, 96),
    "seal": (240, 16),
}


def _block(size: int, seed: int = 0, levels: int = 256) -> NDArray[np.uint8]:
    """Random bytes; few levels make them compressible."""
    return np.random.default_rng(seed).integers(0, levels, size, np.uint8)


def _file(block: NDArray[np.uint8], label: Label = LABEL, key: bytes = KEY) -> tuple[bytearray, Header]:
    buffer = bytearray(os.urandom(block_file.file_bytes(block.size)))
    header = block_file.encode(memoryview(buffer), block, label, key)
    return buffer[: header.file_bytes], header


def _sealed(payload: bytes, raw: int) -> tuple[bytearray, Header]:
    """Return a file whose checksums are right, whatever its payload is."""
    buffer, _ = _file(np.frombuffer(payload, np.uint8))
    struct.pack_into("<QQ", buffer, 16, len(payload), raw)
    buffer[HEADER : HEADER + len(payload)] = payload
    buffer[128:144] = block_file.checksum(KEY, memoryview(buffer)[HEADER:])
    buffer[240:256] = block_file.digest(KEY, b"header", memoryview(buffer)[:240])
    return buffer, block_file.read_header(memoryview(buffer), KEY)


@given(size=st.integers(1, 20_000), levels=st.sampled_from([1, 4, 256]), seed=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_round_trip(size: int, levels: int, seed: int) -> None:
    """Any block comes back, from whole sectors, compressed or not."""
    block = _block(size, seed, levels)
    data, header = _file(block)
    assert len(data) % SECTOR == 0
    assert block_file.read_header(memoryview(data), KEY) == header
    back = block_file.decode(memoryview(data), header, KEY)
    assert np.array_equal(back, block)
    assert not back.flags.writeable


def test_what_lz4_does_not_shrink_is_stored_as_it_is() -> None:
    """Random bytes take their own size, constant ones next to nothing."""
    assert _file(_block(9000))[1].compressed == 9000
    assert _file(_block(9000, levels=1))[1].compressed < 100


@pytest.mark.parametrize("levels", [4, 256])
def test_every_byte_is_under_a_checksum(levels: int) -> None:
    """A flipped bit anywhere, in any field, the payload or the padding, is noticed."""
    data, header = _file(_block(5000, levels=levels))
    assert sum(size for _, size in FIELDS.values()) == HEADER
    assert [start for start, _ in FIELDS.values()] == [
        sum([size for _, size in FIELDS.values()][:i]) for i in range(len(FIELDS))
    ]
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        version = FIELDS["version"][0] <= position < sum(FIELDS["version"])
        with pytest.raises(ForeignFileError if version else DamagedFileError):
            block_file.decode(memoryview(data), header, KEY)
        data[position] ^= 1 << position % 8
    block_file.decode(memoryview(data), header, KEY)


@pytest.mark.parametrize("change", [-SECTOR, -1, 1, SECTOR])
def test_another_length(change: int) -> None:
    """Truncated and lengthened files are refused."""
    data, header = _file(_block(5000))
    changed = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(DamagedFileError):
        block_file.decode(memoryview(changed), header, KEY)


@pytest.mark.parametrize("size", [0, 1, HEADER - 1])
def test_not_even_a_header(size: int) -> None:
    """A file shorter than a header is damaged."""
    data, _ = _file(_block(5000))
    with pytest.raises(DamagedFileError):
        block_file.read_header(memoryview(data[:size]), KEY)


@pytest.mark.parametrize("field", ["fingerprint", "salt", "name", "tokens"])
def test_content_of_another_block(field: str) -> None:
    """A whole file that says it is another's is refused, even if the payload is the same."""
    _, expected = _file(_block(5000))
    other = Label(**{**LABEL.__dict__, field: bytes(len(getattr(LABEL, field)))})
    data, header = _file(_block(5000), other)
    block_file.decode(memoryview(data), header, KEY)
    with pytest.raises(DamagedFileError):
        block_file.decode(memoryview(data), expected, KEY)


def test_an_older_content_of_the_same_block() -> None:
    """Stale bytes of the same name are not those that were stored last."""
    old, _ = _file(_block(5000, seed=1))
    _, expected = _file(_block(5000, seed=2))
    with pytest.raises(DamagedFileError):
        block_file.decode(memoryview(old), expected, KEY)


def test_a_file_of_another_key() -> None:
    """Files of another folder never pass."""
    data, header = _file(_block(5000), key=bytes(32))
    with pytest.raises(DamagedFileError):
        block_file.decode(memoryview(data), header, KEY)


@pytest.mark.parametrize(
    ("payload", "raw"),
    [
        (b"\xff" * 50, 5000),
        (lz4.block.compress(bytes(4000), store_size=False), 5000),
        (lz4.block.compress(bytes(6000), store_size=False), 5000),
    ],
    ids=["nonsense", "less", "more"],
)
def test_what_lz4_cannot_unpack(payload: bytes, raw: int) -> None:
    """Right checksums do not make a payload of another size pass."""
    data, header = _sealed(payload, raw)
    with pytest.raises(DamagedFileError, match="LZ4"):
        block_file.decode(memoryview(data), header, KEY)
