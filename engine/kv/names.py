"""Names of KV pages: a chain of digests over a tenant's salt, what computes, and the tokens.

`digest[i] = SHA-256(digest[i−1] ‖ tokens of page i)`, `digest[−1] = SHA-256(salt ‖ fingerprint)`, tokens
as little-endian int32. So a name stands for all tokens up to its page's end, and two salts have no
name in common. Docs: docs/kv-tiers.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.models.config import ModelConfig

#: Bytes of a tenant's salt, as the front derives it.
SALT_BYTES = 16


def page_names(
    salt: bytes, fingerprint: bytes, tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return a name of 32 bytes for each full page of `tokens`; `known` are those of its first pages."""
    names = list(known)
    last = names[-1] if names else hashlib.sha256(salt + fingerprint).digest()
    for start in range(len(names) * page_size, len(tokens) - page_size + 1, page_size):
        last = hashlib.sha256(last + token_bytes(tokens[start : start + page_size])).digest()
        names.append(last)
    return names


def token_digest(key: bytes, tokens: Sequence[int]) -> bytes:
    """Return 16 bytes that say which tokens these are, to whoever has the key and to nobody else."""
    return hashlib.blake2b(token_bytes(tokens), key=key, digest_size=16).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return np.array(tokens, "<i4").tobytes()


def fingerprint(config: ModelConfig, *, source: bytes, kernels: str, dtype: str, page_size: int) -> bytes:
    """Return 32 bytes for all that a page's values depend on beside its tokens.

    `source` says which file the weights come from (`source_of`), `kernels` what computes with them.
    """
    parts = (
        source,
        kernels,
        dtype,
        (config.layers, config.kv_heads, config.head_dim, page_size),
        (config.rope_theta, config.rope_divisors, config.sliding_window),
    )
    return hashlib.sha256(repr(parts).encode()).digest()


def source_of(path: Path) -> bytes:
    """Return 32 bytes for a model's file or folder: where it lies, and size and time of each file."""
    path = path.expanduser().resolve()
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files]
    return hashlib.sha256(
        repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode()
    ).digest()
