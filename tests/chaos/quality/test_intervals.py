from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.quality.intervals import difference, rate

BOOLS = st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from("abcd")), min_size=1, max_size=60)


@given(BOOLS)
def test_intervals_hold_their_estimate_and_stay_within_bounds(found: list[tuple[bool, bool, str]]) -> None:
    before, after, families = zip(*found, strict=True)
    one, change = rate(before, families), difference(before, after, families)
    assert one.rate is not None and one.low is not None and one.high is not None
    assert 0 <= one.low <= one.rate <= one.high <= 1
    assert change.change is not None and change.low is not None and change.high is not None
    assert -1 <= change.low <= change.change <= change.high <= 1
    assert change.change == pytest.approx((sum(after) - sum(before)) / len(before))


@given(BOOLS)
def test_turning_time_around_turns_the_change_around(found: list[tuple[bool, bool, str]]) -> None:
    before, after, families = zip(*found, strict=True)
    there, back = difference(before, after, families), difference(after, before, families)
    assert (there.worse, there.better) == (back.better, back.worse)
    assert there.low == pytest.approx(-(back.high or 0), abs=0.02)


def test_nothing_asked_is_null_and_nothing_changed_is_no_certainty() -> None:
    assert rate([], []).rate is None and difference([], [], []).change is None
    same = difference([True] * 20, [True] * 20, ["a"] * 20)
    assert not same.harmed and (same.low or 0) < -0.03 and (same.high or 0) > 0.03
    assert (rate([True] * 20, ["a"] * 20).low or 0) == pytest.approx(0.839, abs=0.001)  # Wilson's


def test_the_bootstrap_knows_of_families() -> None:
    """Whole families that fail are less evidence than as many failures strewn over all of them."""
    families = [name for name in "abcdefgh" for _ in range(12)]
    clustered = [name in "abcd" for name in families]
    strewn = [number % 2 == 0 for number in range(96)]
    wide, narrow = rate(clustered, families), rate(strewn, families)
    assert wide.rate == narrow.rate == 0.5
    assert (wide.high or 0) - (wide.low or 0) > 2 * ((narrow.high or 0) - (narrow.low or 0))


def test_intervals_of_pairs_cover_what_they_should() -> None:
    """400 experiments of 12 families that differ by themselves, true change −0.2: at most 7 % miss it."""
    rng = random.Random(0)
    missed = 0
    for _ in range(400):
        before, after, families = [], [], []
        for family in range(12):
            easy = rng.uniform(0.5, 0.9)
            loss = rng.uniform(0.1, 0.3)
            for _ in range(8):
                before.append(rng.random() < easy)
                after.append(before[-1] and rng.random() >= loss / easy)
                families.append(str(family))
        found = difference(before, after, families)
        missed += not ((found.low or 0) <= -0.2 <= (found.high or 0))
    assert missed / 400 <= 0.07


def test_harm_is_an_interval_below_nothing() -> None:
    families = [str(number % 8) for number in range(40)]
    assert difference([True] * 40, [number % 2 == 0 for number in range(40)], families).harmed
    assert not difference([True] * 40, [number > 1 for number in range(40)], families).harmed
    assert not difference([False] * 40, [True] * 40, families).harmed
