"""False alarms by simulation: tokens of a response follow each other, and share a level."""

from __future__ import annotations

import numpy as np
import pytest

from alerting.collector import Collector
from tests.alerting.conftest import Service

BASELINES, CALIBRATION, FRESH = 16, 120, 60


def test_at_most_alpha_of_healthy_responses_raise_an_l1(rules, watch, service) -> None:
    """The bound holds on average over calibrations, each with responses that it has not seen."""
    rates = []
    for seed in range(BASELINES):
        own = Service(seed)
        w = watch(baseline=own.baseline(rules, CALIBRATION))
        for _ in range(FRESH):
            own.respond(w.evaluator, own.rows(24))
        rates.append(len(w.l1) / FRESH)
    alpha = rules.preset("quantile").alpha
    assert 0 < np.mean(rates) <= alpha + 2 * np.std(rates) / BASELINES**0.5


@pytest.mark.parametrize("name", ["QuaverJointEvidence", "QuaverLowConfidenceRate"])
def test_the_mean_run_length_is_at_least_the_threshold(rules, watch, service, name: str) -> None:
    """At a threshold of 50, so that it can be seen; runs are cut at four times that, which only lowers it."""
    threshold, cut = 50, 200
    eager = rules.model_copy(update={"rate": rules.rate.model_copy(update={"threshold": threshold})})
    lengths = []
    for seed in range(20):
        own = Service(100 + seed)
        w = watch(baseline=own.baseline(rules, CALIBRATION), rules=eager)
        length = 0
        while length < cut and not w.raised(name):
            own.respond(w.evaluator, own.rows(24))
            length += 1
        lengths.append(length)
    assert np.mean(lengths) + 2 * np.std(lengths) / len(lengths) ** 0.5 >= threshold


def test_the_cusum_threshold_is_the_one_of_the_l1(rules, service) -> None:
    """A response whose CUSUM alone is beyond the limit is one whose strongest tail is beyond the L1's."""
    collector = Collector(rules)
    for _ in range(200):
        service.respond(collector, service.rows(24))
    baseline = collector.build(quantization="none")
    limits = baseline.stratum("qa", "greedy").limits["quantile"]
    limit = limits.reaches_l1("cusum:high")
    preset = rules.preset("quantile")
    assert not limits.judge({"cusum": limit - 1e-6}, preset)["l1"]
    assert limits.judge({"cusum": limit + 1e-6}, preset)["l1"]
    assert limits.reaches_l1("mood:high") == float("inf")
