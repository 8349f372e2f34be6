from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from alerting.sequential import (
    Bank,
    BankRecovery,
    EDetector,
    RecoveryWindow,
    rate_upper_bound,
    tail_probability,
)

GRID = (0.1, 0.25, 0.5, 0.9)


def run_length(rng: np.random.Generator, rate: float, p0: float, threshold: float, limit: int) -> int:
    detector = EDetector(GRID)
    for n, x in enumerate(rng.random(limit) < rate, start=1):
        if detector.update(bool(x), p0) >= threshold:
            return n
    return limit


@pytest.mark.parametrize("p0", [0.02, 0.1, 0.25])
def test_mean_run_length_under_health_is_at_least_the_threshold(p0: float) -> None:
    """Runs are cut at 4 A, which only lowers their mean; the worst case rate = p₀."""
    rng = np.random.default_rng(7)
    lengths = [run_length(rng, p0, p0, 200, 800) for _ in range(200)]
    assert np.mean(lengths) + 2 * np.std(lengths) / 200**0.5 >= 200


def test_a_rise_is_found_within_a_few_responses() -> None:
    rng = np.random.default_rng(3)
    assert np.mean([run_length(rng, 0.8, 0.1, 1e4, 1000) for _ in range(100)]) < 12
    assert np.mean([run_length(rng, 0.4, 0.1, 1e4, 1000) for _ in range(100)]) < 50


def test_rate_below_the_bound_rarely_alarms() -> None:
    rng = np.random.default_rng(5)
    assert min(run_length(rng, 0.05, 0.12, 1e4, 3000) for _ in range(20)) == 3000


def test_update_is_a_likelihood_ratio_of_shiryaev_roberts() -> None:
    detector = EDetector([0.5])
    detector.update(True, 0.2)
    assert detector.value == pytest.approx(0.6 / 0.2)
    detector.update(False, 0.2)
    assert detector.value == pytest.approx((1 + 3) * 0.4 / 0.8)
    detector.reset()
    assert (detector.value, detector.log) == (0, 0)


def test_a_factor_has_mean_one_at_p0() -> None:
    for p0 in (0.01, 0.3, 0.9):
        up, down = EDetector(GRID), EDetector(GRID)
        assert p0 * up.update(True, p0) + (1 - p0) * down.update(False, p0) == pytest.approx(1)


def test_cap_bounds_the_evidence() -> None:
    detector = EDetector(GRID, cap=100.0)
    for _ in range(50):
        detector.update(True, 0.05)
    assert detector.value <= 100


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 50), (9, 10)])
def test_bounds_agree_with_scipy(k: int, n: int) -> None:
    assert rate_upper_bound(k, n, 0.95) == pytest.approx(beta.ppf(0.95, k + 1, n - k))
    assert tail_probability(k, n, 0.2) == pytest.approx(binom.sf(k - 1, n, 0.2))


def test_bounds_at_the_edges() -> None:
    assert rate_upper_bound(0, 0, 0.95) == 1
    assert rate_upper_bound(5, 5, 0.95) == 1


def test_recovery_needs_a_full_window_at_a_healthy_rate() -> None:
    window = RecoveryWindow(10)
    for _ in range(10):
        window.add(True, 0.1)
    assert window.full
    assert not window.healthy(0.1)
    for _ in range(9):
        window.add(False, 0.1)
    assert window.healthy(0.1)
    window.clear()
    assert not window.full


def test_a_bank_is_the_mean_of_its_detectors_and_lets_absent_tests_rest() -> None:
    bank = Bank([0.5], cap=1e6)
    bank.update({"a": True}, {"a": 0.2, "b": 0.2})
    assert bank.value == pytest.approx(3 / 2)
    bank.update({"a": False, "b": True}, {"a": 0.2, "b": 0.2})
    assert bank.value == pytest.approx(((1 + 3) * 0.5 + 3) / 2)
    bank.reset()
    assert bank.value == 0


def test_a_bank_of_dependent_tests_keeps_the_bound() -> None:
    """Nested tests of one response: the same uniform number below 0.05, 0.15 and 0.3."""
    levels = {"rare": 0.05, "some": 0.15, "often": 0.3}
    rng = np.random.default_rng(11)
    lengths = []
    for _ in range(150):
        bank, n = Bank(GRID, cap=1e6), 0
        while bank.value < 200 and n < 800:
            u = rng.random()
            bank.update({name: bool(u < level) for name, level in levels.items()}, levels)
            n += 1
        lengths.append(n)
    assert np.mean(lengths) + 2 * np.std(lengths) / 150**0.5 >= 200


def test_a_bank_recovers_when_all_its_tests_do() -> None:
    window = BankRecovery(10)
    for _ in range(10):
        window.add({"a": False, "b": True}, {"a": 0.1, "b": 0.1})
    assert window.full
    assert not window.healthy(0.05)
    for _ in range(10):
        window.add({"a": False, "b": False}, {"a": 0.1, "b": 0.1})
    assert window.healthy(0.05)


def test_a_test_that_the_newest_responses_lack_does_not_hold_an_alert() -> None:
    window = BankRecovery(10)
    rates = {"heads": 0.04, "tokens": 0.04}
    for _ in range(10):
        window.add({"heads": True, "tokens": True}, rates)
    assert window.full and not window.healthy(0.05)
    for _ in range(9):
        window.add({"tokens": False}, rates)
    assert not window.healthy(0.05), "one of the ten newest is struck in its heads"
    window.add({"tokens": False}, rates)
    assert window.healthy(0.05)
