"""When what leaves the page pool is copied: by what was wanted again, with and without copies."""

from __future__ import annotations

from engine.kv.reuse import Reuse

COPY_S, COMPUTE_S = 0.00075, 0.025  # a block of the default model: one in 33 pays


def name(number: int) -> bytes:
    return number.to_bytes(8, "little")


def test_at_first_a_copy_is_expected_to_pay() -> None:
    reuse = Reuse()
    assert reuse.pays(COPY_S, COMPUTE_S)
    assert not reuse.pays(COMPUTE_S, COMPUTE_S)
    assert reuse.pays(0.0, COMPUTE_S) and reuse.pays(COPY_S, 0.0)


def test_traffic_without_reuse_ends_copies_and_reuse_brings_them_back_at_once() -> None:
    reuse = Reuse()
    for number in range(2500):
        reuse.leaves(name(number))
    assert not reuse.pays(COPY_S, COMPUTE_S)
    assert all(reuse.wanted(name(number)) for number in range(2400, 2450))
    assert reuse.pays(COPY_S, COMPUTE_S)


def test_a_block_that_left_once_is_wanted_again_once() -> None:
    reuse = Reuse()
    reuse.leaves(name(1))
    assert reuse.wanted(name(1)) and not reuse.wanted(name(1))
    assert not reuse.wanted(name(2))
    assert 0 < reuse.rate <= 1


def test_what_is_remembered_is_bounded() -> None:
    reuse = Reuse()
    for number in range(70_000):
        reuse.leaves(name(number))
    assert not reuse.wanted(name(0)) and reuse.wanted(name(69_999))
