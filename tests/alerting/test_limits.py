"""Limits by healthy responses: what they rest on, and how often others pass them."""

from __future__ import annotations

import numpy as np
import pytest

from alerting.baseline import POOLED, BaselineError, build
from alerting.judge import Judge
from alerting.limits import L1, Healthy, conformal_threshold, fit_limits, strongest_limit
from alerting.rules import QuantilePreset, Rules
from alerting.samples import Sample
from alerting.sequential import mean_upper_bound, rate_upper_bound

ALPHA, CONFIDENCE = 0.05, 0.95
SURER = "sentence_confidence:high@0.02"


@pytest.fixture
def preset(rules: Rules) -> QuantilePreset:
    found = rules.preset("quantile")
    assert isinstance(found, QuantilePreset)
    return found


def healthy(rng: np.random.Generator, count: int, group: str = "") -> list[Healthy]:
    values = rng.normal(size=(count, 2))
    return [
        Healthy({"sentence_confidence": 0.5 + c / 20, "sentence_entropy": 1 + e}, group) for c, e in values
    ]


def test_the_limit_of_the_strongest_is_the_lowest_whose_bound_is_alpha() -> None:
    scores = [float(score) for score in range(200)]
    limit = strongest_limit([(score, "") for score in scores], ALPHA, CONFIDENCE)
    beyond = sum(score > limit for score in scores)
    assert rate_upper_bound(beyond, 200, CONFIDENCE) <= ALPHA < rate_upper_bound(beyond + 1, 200, CONFIDENCE)


def test_too_few_to_tell_have_their_highest_score_for_a_limit() -> None:
    assert strongest_limit([(float(score), "") for score in range(20)], ALPHA, CONFIDENCE) == 19.0


def test_kinds_that_differ_need_a_higher_limit_than_kinds_that_do_not() -> None:
    rng = np.random.default_rng(3)
    places = rng.normal(0, 1, 8)
    apart = [(float(place + rng.normal()), str(kind)) for kind, place in enumerate(places) for _ in range(60)]
    shuffled = [(score, str(number % 8)) for number, (score, _) in enumerate(rng.permutation(apart).tolist())]
    shuffled = [(float(score), kind) for score, kind in shuffled]
    assert strongest_limit(apart, ALPHA, CONFIDENCE) > strongest_limit(shuffled, ALPHA, CONFIDENCE)
    unknown = [(score, kind if number else "") for number, (score, kind) in enumerate(apart)]
    assert strongest_limit(apart, ALPHA, CONFIDENCE) > strongest_limit(unknown, ALPHA, CONFIDENCE)


def test_kinds_to_come_pass_at_a_rate_of_at_most_alpha_mostly() -> None:
    """The rate over 400 kinds to come, in 200 calibrations on eight.

    Rates of kinds are skewed, so that Student's bound holds in a little less than 95 % of calibrations. The
    conformal rank alone, whose mean is right for one kind, holds in half of them.
    """
    rng = np.random.default_rng(5)
    to_come = rng.normal(0, 0.5, (400, 1)) + rng.normal(size=(400, 50))
    kept, plain = [], []
    for _ in range(200):
        scores = rng.normal(0, 0.5, (8, 1)) + rng.normal(size=(8, 60))
        known = [(float(score), str(kind)) for kind, own in enumerate(scores) for score in own]
        kept.append(np.mean(to_come > strongest_limit(known, ALPHA, CONFIDENCE)))
        plain.append(np.mean(to_come > conformal_threshold(scores.ravel().tolist(), ALPHA)))
    assert np.mean(np.array(kept) <= ALPHA) > 0.85
    assert np.mean(np.array(plain) <= ALPHA) < 0.65
    assert np.mean(kept) > ALPHA / 2, "no higher than need be"


def test_students_bound_covers_a_mean() -> None:
    rng = np.random.default_rng(7)
    covered = [mean_upper_bound(rng.normal(0.3, 0.1, 6).tolist(), 0.95) >= 0.3 for _ in range(2000)]
    assert 0.93 < np.mean(covered) < 0.97


def test_the_limit_of_one_statistic_rests_on_all_responses(preset: QuantilePreset) -> None:
    found = healthy(np.random.default_rng(0), 400)
    limits = fit_limits(found, preset, CONFIDENCE)
    for level in preset.levels:
        test = f"sentence_entropy:high@{level:g}"
        assert limits.counts[test].trials == 400
        assert limits.counts[test].events == pytest.approx(400 * level, abs=1)
        assert (
            limits.thresholds[test]
            == sorted(h.statistics["sentence_entropy"] for h in found)[-limits.counts[test].events - 1]
        )
    assert limits.counts[L1].trials == 200


def test_what_is_tolerated_raises_no_l1_and_counts_from_its_share_on(
    rules: Rules, preset: QuantilePreset
) -> None:
    found = healthy(np.random.default_rng(1), 400)
    limits = fit_limits(found, preset, CONFIDENCE)
    sure = {"sentence_confidence": 0.99, "sentence_entropy": 1.0}
    tests = limits.judge(sure, preset)
    assert tests[SURER]
    assert not tests[L1]
    samples = [Sample(route="qa", band="greedy", statistics=dict(h.statistics)) for h in found]
    judge = Judge("quantile", rules)
    judge.use(build(samples, rules, model="m", quantization="q"))
    verdict = judge.verdict("qa", "greedy", sure, ())
    assert verdict is not None
    assert verdict.rates[SURER] == 0.5
    assert verdict.rates["sentence_confidence:low@0.02"] < 0.06
    assert SURER not in verdict.calm
    pooled = judge.verdict(POOLED, "greedy", sure, ())
    assert pooled is not None
    assert pooled.rates[SURER] == 0.5


def test_without_any_of_its_statistics_there_are_no_limits(rules: Rules) -> None:
    samples = [Sample(route="qa", band="greedy", statistics={"mood": 1.0}) for _ in range(50)]
    with pytest.raises(
        BaselineError, match=r"preset quantile, route \*: no healthy response has any of sentence"
    ):
        build(samples, rules, model="m", quantization="q")
