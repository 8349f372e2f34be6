"""The file of one block on disk: a header, then the packed block as LZ4, padded to whole sectors.

Every byte of a file is under a checksum: the header's end seals the header, and the header holds the
checksum of all that follows it. Both are keyed with the key of the folder, so that no file of another
folder passes. The checksum is SHA-256, cut to 16 bytes: where the processor has instructions for it, it is
twice as fast as BLAKE2b. A CRC would be faster still, and let one damaged file in four billion pass.

The int8 codes of keys and values hardly ever repeat, so LZ4 leaves most blocks as large as they are; those
are stored as they are, and reading them costs no more than the checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

import lz4.block
import numpy as np
from numpy.typing import NDArray

MAGIC = b"QUAVERKV"
VERSION = 1
SECTOR = 4096  # O_DIRECT moves whole sectors, of 4096 bytes at most on today's disks
HEADER = 256
DIGEST = 16  # bytes of a keyed digest

_FIELDS = struct.Struct("<8sI4xQQ32s16s32s16s16s")
_SEALED = HEADER - DIGEST  # the header up to its seal; between the fields and the seal are zeros


class DamagedFileError(ValueError):
    """The file is not, byte for byte, what was written under that name."""


class ForeignFileError(ValueError):
    """The file is whole, as far as one can tell, but not for this store."""


@dataclass(frozen=True)
class Label:
    """Whose block it is: digests of the fingerprint (32 bytes), salt (16) and tokens (16); name (32)."""

    fingerprint: bytes
    salt: bytes
    name: bytes
    tokens: bytes


@dataclass(frozen=True)
class Header:
    """A header whose seal is right. `compressed` = `raw` bytes: the block is stored as it is."""

    label: Label
    compressed: int
    raw: int
    checksum: bytes
    seal: bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file, whole sectors."""
        return file_bytes(self.compressed)


def file_bytes(payload: int) -> int:
    """Size of a file with `payload` bytes after the header."""
    return -(-(HEADER + payload) // SECTOR) * SECTOR


def digest(key: bytes, what: bytes, data: bytes | memoryview) -> bytes:
    """Keyed digest of `data`, 16 bytes; `what` (at most 16 bytes) keeps digests of different things apart."""
    return hashlib.blake2b(data, digest_size=DIGEST, key=key, person=what).digest()


def checksum(key: bytes, payload: memoryview) -> bytes:
    """Keyed checksum of all that follows the header, 16 bytes."""
    state = hashlib.sha256(key)
    state.update(payload)
    return state.digest()[:DIGEST]


def encode(buffer: memoryview, block: NDArray[np.uint8], label: Label, key: bytes) -> Header:
    """Lay the file of `block` out in `buffer`, which takes `file_bytes(block.size)` bytes at least."""
    payload: bytes = lz4.block.compress(block, store_size=False)
    if len(payload) >= block.size:
        payload = block.tobytes()
    end = HEADER + len(payload)
    size = file_bytes(len(payload))
    buffer[HEADER:end] = payload
    buffer[end:size] = bytes(size - end)
    check = checksum(key, buffer[HEADER:size])
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        len(payload),
        block.size,
        label.fingerprint,
        label.salt,
        label.name,
        label.tokens,
        check,
    ).ljust(_SEALED, b"\0")
    seal = digest(key, b"header", fields)
    buffer[:HEADER] = fields + seal
    return Header(label, len(payload), block.size, check, seal)


def read_header(data: memoryview, key: bytes) -> Header:
    """Parse and check the header that `data` begins with; raises DamagedFileError or ForeignFileError."""
    if len(data) < HEADER:
        raise DamagedFileError("shorter than a header")
    magic, version, compressed, raw, fingerprint, salt, name, tokens, check = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("not a file of a block")
    if version != VERSION:
        raise ForeignFileError(f"version {version}")
    seal = bytes(data[_SEALED:HEADER])
    if not hmac.compare_digest(seal, digest(key, b"header", data[:_SEALED])):
        raise DamagedFileError("the header's seal is wrong")
    return Header(Label(fingerprint, salt, name, tokens), compressed, raw, check, seal)


def decode(data: memoryview, expected: Header, key: bytes) -> NDArray[np.uint8]:
    """Return the block of a whole file, read-only.

    Raises DamagedFileError or ForeignFileError unless it is, byte for byte, the file of `expected`.
    """
    header = read_header(data, key)
    if header != expected:
        raise DamagedFileError("another file's content")
    if len(data) != header.file_bytes:
        raise DamagedFileError("truncated or lengthened")
    if not hmac.compare_digest(header.checksum, checksum(key, data[HEADER:])):
        raise DamagedFileError("the payload's checksum is wrong")
    payload = data[HEADER : HEADER + header.compressed]
    return np.frombuffer(_unpacked(payload, header.raw), np.uint8)


def _unpacked(payload: memoryview, raw: int) -> bytes:
    if len(payload) == raw:
        return bytes(payload)
    try:
        block: bytes = lz4.block.decompress(payload, uncompressed_size=raw)
    except lz4.block.LZ4BlockError as error:
        raise DamagedFileError(f"LZ4: {error}") from None
    if len(block) != raw:
        raise DamagedFileError("LZ4: another size")
    return block
