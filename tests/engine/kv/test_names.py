"""Names and digests of pages, and what they depend on."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.kv import names
from tests.engine.tiny import TINY

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_a_name_is_what_the_documents_say() -> None:
    first, second = names.page_names(b"s" * 16, b"f", [1, 2, 3, 4, 5], 2)
    root = hashlib.sha256(b"s" * 16 + b"f").digest()
    assert first == hashlib.sha256(root + struct.pack("<2i", 1, 2)).digest()
    assert second == hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()


@given(tokens=TOKENS, size=st.integers(1, 7), cut=st.integers(0, 40))
def test_names_can_be_gone_on_with(tokens: list[int], size: int, cut: int) -> None:
    whole = names.page_names(b"salt", b"", tokens, size)
    assert len(whole) == len(tokens) // size
    begun = names.page_names(b"salt", b"", tokens[:cut], size)
    assert begun == whole[: len(begun)]
    assert names.page_names(b"salt", b"", tokens, size, begun) == whole


@given(tokens=TOKENS.filter(bool), place=st.integers(0, 39), size=st.integers(1, 7))
def test_a_name_stands_for_every_token_before_it(tokens: list[int], place: int, size: int) -> None:
    place %= len(tokens)
    other = [token + (i == place) for i, token in enumerate(tokens) if token < 2**31 - 1 or i != place]
    if len(other) < len(tokens):
        return
    pairs = zip(*(names.page_names(b"salt", b"", t, size) for t in (tokens, other)), strict=True)
    assert [one == another for one, another in pairs] == [
        (i + 1) * size <= place for i in range(len(tokens) // size)
    ]


@given(tokens=TOKENS)
def test_digests_differ_by_key(tokens: list[int]) -> None:
    one, other = (names.token_digest(key, tokens) for key in (b"one", b"other"))
    assert one != other and len(one) == len(other) == 16


def test_the_fingerprint_is_of_everything_that_changes_values() -> None:
    parts = {"source": b"file", "kernels": "reference auto 0.0", "dtype": "torch.float32", "page_size": 16}
    changed = [
        names.fingerprint(TINY, **parts | {key: value})
        for key, value in [
            ("source", b"another"),
            ("kernels", "cpu auto 0.0"),
            ("dtype", "torch.bfloat16"),
            ("page_size", 32),
        ]
    ]
    changed += [
        names.fingerprint(replace(TINY, **fields), **parts)
        for fields in ({"layers": 3}, {"rope_theta": 5e5}, {"sliding_window": 8}, {"head_dim": 16})
    ]
    assert len({names.fingerprint(TINY, **parts), *changed}) == 9


def test_a_source_is_its_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = names.source_of(file)
    assert names.source_of(file) == first
    os.utime(file, ns=(1, 1))
    second = names.source_of(file)
    file.write_bytes(b"other")
    assert len({first, second, names.source_of(file)}) == 3
    (tmp_path / "config.json").write_text("{}")
    assert names.source_of(tmp_path) != names.source_of(file)
