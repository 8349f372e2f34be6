"""The simulated run length: of the same evidence as a route's, and at the bound no shorter than promised."""

from __future__ import annotations

import numpy as np
import pytest

from alerting.judge import Verdict
from alerting.route import RouteEvidence
from alerting.rules import load_rules
from chaos.score.run_length import run_length

RATES = {"sentence_confidence:low@0.05": 0.06, "combined:high@0.3": 0.35, "l1": 0.06}
THRESHOLD = 40
FAMILIES = [f"f{i % 7}" for i in range(2000)]


@pytest.fixture(scope="module")
def eager():
    rules = load_rules()
    return rules.model_copy(update={"rate": rules.rate.model_copy(update={"threshold": THRESHOLD})})


@pytest.fixture(scope="module")
def verdicts():
    """Responses whose tests are passed as often as allowed, those of one response mostly together."""
    rng = np.random.default_rng(3)
    level, own = rng.random(2000), rng.random((2000, len(RATES)))
    mixed = np.where(rng.random((2000, 1)) < 0.7, level[:, None], own)
    passed = [
        {name: bool(u < rate) for u, (name, rate) in zip(row, RATES.items(), strict=True)} for row in mixed
    ]
    return [Verdict(tests=tests, rates=RATES, basis="route", l1=tests["l1"]) for tests in passed]


def test_it_is_the_evidence_of_a_route(eager, verdicts) -> None:
    rng = np.random.default_rng(4)
    evidence = RouteEvidence("qa", eager, eager.preset(eager.default))
    pages, responses = 0, 12_000
    for at, left in zip(rng.integers(0, len(verdicts), responses), rng.random(responses) < 0.03, strict=True):
        evidence.add_response(verdicts[at], 0.0, l1_frozen=True, joint_frozen=False)
        evidence.add_outcome("a", bool(left), 0.0, 0.05, joint_frozen=False)
        if evidence.mixture() >= THRESHOLD:
            pages += 1
            evidence.restart("joint")
    found = run_length(eager, verdicts, FAMILIES, 0.03, 0.05, steps=400).resampled
    assert pages > 40
    assert found.value == pytest.approx(responses / pages, rel=0.25)
    assert found.low < found.value < found.high


def test_it_is_no_shorter_than_the_threshold(eager, verdicts) -> None:
    found = run_length(eager, verdicts, FAMILIES, 0.03, 0.05, steps=400)
    assert found.at_bound.low > THRESHOLD
    assert found.at_bound.low < found.at_bound.value < found.at_bound.high
    assert found.responses == 400 * 256


def test_more_passes_than_health_allows_shorten_it(eager, verdicts) -> None:
    low = [v for v in verdicts if not any(v.tests.values())]
    high = [v for v in verdicts if any(v.tests.values())]
    calm, upset = (
        run_length(eager, part, FAMILIES[: len(part)], 0.03, 0.05, steps=100).resampled
        for part in (low, high)
    )
    assert calm.value is None or calm.value > 20 * upset.value
    assert upset.value < THRESHOLD
