"""Checksums of blocks in memory: every flipped bit shows, and so does everything larger."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels.cpu import build
from engine.kernels.cpu.library import open_library
from engine.kv.checksum import Checksum, checksum_by
from tests.engine.cpu.conftest import CACHE

SIZES = [0, 1, 7, 63, 64, 65, 127, 128, 1000]


@pytest.fixture(params=["crc", *build.instruction_sets()])
def checksum(request: pytest.FixtureRequest) -> Checksum:
    return checksum_by(None if request.param == "crc" else open_library(request.param, CACHE))


def block_of(size: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def flipped(block: NDArray[np.uint8], first: int, burst: int = 1) -> NDArray[np.uint8]:
    bits = np.unpackbits(block, bitorder="little")
    bits[first : first + burst] ^= 1
    return np.packbits(bits, bitorder="little")


@pytest.mark.parametrize("burst", [1, 2, 16])
@pytest.mark.parametrize("size", SIZES[1:])
def test_every_flip_shows(checksum: Checksum, size: int, burst: int) -> None:
    block = block_of(size)
    whole = checksum(block)
    assert whole == checksum(block.copy())
    seen = [checksum(flipped(block, first, burst)) for first in range(8 * size)]
    assert whole not in seen


def test_zeros_of_different_sizes_differ(checksum: Checksum) -> None:
    assert len({checksum(np.zeros(size, np.uint8)) for size in SIZES}) == len(SIZES)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), size=st.integers(2, 400))
def test_two_flips_and_two_words_that_change_places_show(
    checksum: Checksum, data: st.DataObject, size: int
) -> None:
    """The top bits of words among them, which a product alone would lose."""
    block = block_of(8 * size)
    word = st.integers(0, size - 1)
    one, other = data.draw(word), data.draw(word)
    assume(one != other)
    bit = data.draw(st.sampled_from([0, 31, 62, 63]))
    assert checksum(flipped(flipped(block, 64 * one + bit), 64 * other + bit)) != checksum(block)
    swapped = block.reshape(size, 8).copy()
    swapped[[one, other]] = swapped[[other, one]]
    assert checksum(swapped.reshape(-1)) != checksum(block)


def test_part_of_the_block_lost(checksum: Checksum) -> None:
    block = block_of(100_000)
    torn = block.copy()
    torn[40_960:45_056] = 0
    assert checksum(torn) != checksum(block)
