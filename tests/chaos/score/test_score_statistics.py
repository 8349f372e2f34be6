"""The card's figures on numbers whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.score.statistics import (
    NOTHING,
    auroc,
    paired_auroc,
    paired_difference,
    rate_upper,
    share,
)

VALUES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(VALUES, VALUES)
def test_auroc_is_the_chance_to_be_above(clean, struck) -> None:
    pairs = [(b > a) + (b == a) / 2 for a in clean for b in struck]
    assert auroc(clean, struck) == pytest.approx(sum(pairs) / len(pairs))


def test_intervals_cover_what_is_true_about_as_often_as_they_say() -> None:
    """Rows of one family share a shift, so that intervals over rows alone would be too narrow."""
    covered = 0
    families = [f"f{i // 12}" for i in range(96)]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        shift = np.repeat(rng.normal(0, 0.5, 8), 12)
        clean, struck = rng.normal(0, 1, 96), rng.normal(1, 1, 96) + shift
        found = paired_difference(clean, struck, families)
        covered += found.low <= 1.0 <= found.high
    assert covered >= 48


def test_pairs_without_a_difference_are_a_coin() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (2, 200))
    found = paired_auroc(values[0], values[1], [f"f{i % 10}" for i in range(200)])
    assert found.low < 0.5 < found.high and abs(found.value - 0.5) < 0.1
    assert paired_auroc(np.array([]), np.array([]), []) == NOTHING


def test_shares_and_rare_events() -> None:
    assert share(0, 0) == NOTHING
    none = share(0, 100)
    assert none.value == none.low == 0 and none.high == pytest.approx(0.0362, abs=1e-3)
    assert share(5, 100).low == pytest.approx(0.0164, abs=1e-3)
    assert rate_upper(0, 300) == pytest.approx(0.01, abs=2e-4)  # the rule of three
