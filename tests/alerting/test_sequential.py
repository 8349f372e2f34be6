from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from alerting.sequential import (
    Bank,
    BankRecovery,
    EDetector,
    RecoveryWindow,
    bets,
    rate_upper_bound,
    tail_probability,
)

POWERS = (0.2, 0.4, 0.6)


def run_length(rng: np.random.Generator, rate: float, p0: float, threshold: float, limit: int) -> int:
    detector = EDetector(POWERS)
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
    detector.update(True, 0.25)
    assert detector.value == pytest.approx(0.5 / 0.25)
    detector.update(False, 0.25)
    assert detector.value == pytest.approx((1 + 2) * 0.5 / 0.75)
    detector.reset()
    assert (detector.value, detector.log) == (0, 0)


def test_a_factor_has_mean_one_at_p0() -> None:
    for p0 in (0.01, 0.3, 0.9):
        up, down = EDetector(POWERS), EDetector(POWERS)
        assert p0 * up.update(True, p0) + (1 - p0) * down.update(False, p0) == pytest.approx(1)


@pytest.mark.parametrize(
    "rates", [(0.05,), (0.02, 0.07, 0.2, 0.4), (0.05, 0.05, 0.3), (1e-9, 0.1), (0.3, 1.0)]
)
def test_bets_fall_with_the_grade_and_have_mean_one_at_the_bounds(rates: tuple[float, ...]) -> None:
    found = np.array(bets(POWERS, rates))
    assert found.shape == (len(rates) + 1, len(POWERS))
    assert (np.diff(found, axis=0) <= 0).all()
    bounds = np.clip(rates, 1e-4, 0.95)
    assert np.diff([0, *bounds, 1]) @ found == pytest.approx(np.ones(len(POWERS)))


def test_a_narrow_miss_is_worth_something() -> None:
    """Responses that pass the second limit alone: 60 % of them, where 15 % are allowed."""
    rng = np.random.default_rng(9)
    one, two = EDetector(POWERS), EDetector(POWERS)
    for x in rng.random(120) < 0.6:
        one.update(False, 0.05)
        two.take(1 if x else 2, (0.05, 0.15))
    assert one.value < 20
    assert two.value > 1e4


def test_cap_bounds_the_evidence() -> None:
    detector = EDetector(POWERS, cap=100.0)
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
    bank.update({"a": True}, {"a": 0.25, "b": 0.25})
    assert bank.value == pytest.approx(2 / 2)
    bank.update({"a": False, "b": True}, {"a": 0.25, "b": 0.25})
    assert bank.value == pytest.approx(((1 + 2) * 0.5 / 0.75 + 2) / 2)
    bank.reset()
    assert bank.value == 0


def test_a_bank_of_dependent_tests_keeps_the_bound() -> None:
    """Nested tests of two statistics of one response, both by the same uniform number."""
    levels = {f"{name}:high@{level}": level for name in "ab" for level in (0.3, 0.05, 0.15)}
    rng = np.random.default_rng(11)
    lengths = []
    for _ in range(150):
        bank, n = Bank(POWERS, cap=1e6), 0
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
