"""Readings, baseline and evidence of canaries, on answers drawn at random."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from alerting.alerts import AlertBook
from alerting.baseline import BaselineError
from alerting.canary import baseline as baselines
from alerting.canary.baseline import Answer, CanaryBaseline, Judge
from alerting.canary.prompt import Guarded
from alerting.canary.reading import SIGNALS, Reader, Reading
from alerting.canary.watch import Watch
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from telemetry.signals import LayerBatch, ResponseEnded, TokenBatch

NAMES = [f"c{i}" for i in range(12)]
SHAPE = (len(HEAD_SIGNALS), 3, 4)


class Model:
    """Answers each canary in its own way, with a little noise; `shift` moves an answer away."""

    def __init__(self, seed: int) -> None:
        own = np.random.default_rng(0)
        self._own = {
            n: (own.normal(1, 0.5, len(SIGNALS)), own.normal(0, 1, SHAPE), own.normal(0, 1, SHAPE))
            for n in NAMES
        }
        self._rng = np.random.default_rng(seed)

    def reading(self, name: str, shift: float = 0.0) -> Reading:
        # Rarely an answer takes another turn in health too.
        spread = 0.3 if self._rng.random() < 0.02 else 0.004
        parts = [
            (part + shift + self._rng.normal(0, spread, part.shape)).astype(np.float32)
            for part in self._own[name]
        ]
        return Reading(*parts)

    def rounds(self, count: int) -> list[list[Answer]]:
        return [
            [Answer(n, self.reading(n), bool(self._rng.random() < 0.99)) for n in NAMES] for _ in range(count)
        ]


def made(rounds: int = 24, seed: int = 1) -> CanaryBaseline:
    return baselines.build(Model(seed).rounds(rounds), model="toy", quantization="none", prompts="p")


def watch(rules, heard=None) -> Watch:
    found = Watch(rules, AlertBook((heard if heard is not None else []).append))
    found.use(made(), 0.0)
    return found


def feed(
    watch: Watch, judge: Judge, model: Model, count: int, *, shift: float = 0.0, route: str = "qa"
) -> None:
    for i in range(count):
        name = NAMES[i % len(NAMES)]
        comparison = judge.compare(name, model.reading(name, shift), shift == 0)
        assert comparison is not None
        guarded = Guarded("a", route)
        watch.add(f"r{i}", name, guarded, comparison, cached=bool(i % 2), right=shift == 0, now=float(i))


def test_health_raises_no_alarm_and_a_shift_does_at_once(rules) -> None:
    heard: list = []
    found, judge = watch(rules, heard), Judge(made())
    feed(found, judge, Model(2), 2000)
    assert not heard
    feed(found, judge, Model(3), 8, shift=0.5)
    assert [(a.name, a.level, a.route, a.state) for a in heard] == [("QuaverCanary", "L2", "qa", "firing")]
    assert heard[0].evidence["signals"]
    feed(found, judge, Model(4), 30)
    assert heard[-1].state == "resolved"
    assert not found.report()[0]["firing"]


def test_false_alarms_are_rarer_than_the_bound_says(rules) -> None:
    """Twenty baselines, each watched for a tenth of the threshold: two alarms would be as stated."""
    alarms = 0
    for seed in range(20):
        heard: list = []
        baseline = made(seed=100 + seed)
        found = Watch(rules, AlertBook(heard.append))
        found.use(baseline, 0.0)
        feed(found, Judge(baseline), Model(200 + seed), 1000)
        alarms += bool(heard)
    assert alarms <= 4


def test_tenants_and_routes_are_kept_apart(rules) -> None:
    heard: list = []
    found, judge = watch(rules, heard), Judge(made())
    feed(found, judge, Model(2), 50, route="calm")
    feed(found, judge, Model(3), 10, shift=0.5, route="struck")
    assert {alert.route for alert in heard} == {"struck"}
    assert found.logs()["calm"] < found.logs()["struck"]
    found.use(made(), 9.0)
    assert heard[-1].state == "resolved" and not found.report()


def test_absent_signals_are_not_counted() -> None:
    judge, model = Judge(made()), Model(5)
    whole = model.reading("c0")
    heads = whole.heads.copy()
    heads[0] = math.nan
    comparison = judge.compare("c0", Reading(whole.means, heads, np.full(SHAPE, math.inf, np.float32)), True)
    assert comparison is not None and "onset" not in comparison.distances and "heads" in comparison.distances
    nothing = Reading(
        np.full(len(SIGNALS), math.nan, np.float32), np.zeros((0,), np.float32), whole.onset[:1]
    )
    comparison = judge.compare("c0", nothing, True)
    assert comparison is not None and comparison.distances == {} and not any(comparison.tests.values())
    assert judge.compare("nobody", whole, True) is None


def test_a_canary_that_is_often_wrong_in_health_is_not_judged_by_its_answer() -> None:
    model = Model(1)
    rounds = [[Answer(n, model.reading(n), n != "c0") for n in NAMES] for _ in range(baselines.ROUNDS)]
    judge = Judge(baselines.build(rounds, model="toy", quantization="none", prompts="p"))
    reading = Model(2).reading("c0")
    assert baselines.ANSWER not in judge.compare("c0", reading, False).tests
    assert judge.compare("c1", Model(2).reading("c1"), False).tests[baselines.ANSWER]


def test_the_file_comes_back_and_says_what_it_is_not(tmp_path: Path) -> None:
    path, baseline = tmp_path / "state" / "canaries.json", made()
    baselines.save(baseline, path)
    assert baselines.load(path) == baseline
    assert baseline.mismatch("toy", "none", "p") is None
    assert "have changed" in str(baseline.mismatch("toy", "none", "q"))
    assert "quaver calibrate" in str(baseline.mismatch("other", "none", "p"))
    good = path.read_bytes()
    for bad in (b"", b"{}", good[:-20], good.replace(b'"version":1', b'"version":9'), b"\xff" + good):
        path.write_bytes(bad)
        with pytest.raises(BaselineError, match="quaver calibrate"):
            baselines.load(path)
    damaged = good.replace(b'"shape":[5,3,4]', b'"shape":[5,3,9]')
    assert damaged != good
    path.write_bytes(damaged)
    with pytest.raises(BaselineError):
        baselines.load(path)


def test_too_little_is_refused() -> None:
    with pytest.raises(BaselineError, match="too few"):
        made(rounds=baselines.ROUNDS - 1)
    rounds = Model(1).rounds(baselines.ROUNDS)
    rounds[4].pop()
    with pytest.raises(BaselineError, match="every round"):
        baselines.build(rounds, model="toy", quantization="none", prompts="p")


def test_a_reader_follows_what_it_expects_up_to_the_first_sentence() -> None:
    reader = Reader()
    reader.expect("mine")
    rows = np.ones((4, len(TOKEN_SIGNALS)), np.float32) * np.arange(1, 5, dtype=np.float32)[:, None]
    heads = np.ones((4, *SHAPE), np.float16) * np.arange(1, 5, dtype=np.float16)[:, None, None, None]
    ids, choices, steps = ["mine", "other", "mine", "mine"], [0, 0, 0, 1], [0, 0, 1, 0]
    reader.on_tokens(TokenBatch(time=0.0, request_ids=ids, choices=choices, steps=steps, signals=rows))
    reader.on_layers(
        LayerBatch(
            time=0.0,
            request_ids=ids,
            choices=choices,
            steps=steps,
            layers=[0, 1, 2],
            stride=1,
            reasons=["full"] * 4,
            rates=[1.0] * 4,
            lens_entropy=np.ones((4, 3), np.float16),
            heads=heads,
        )
    )
    assert reader.take("other") is None
    reader.on_sentence("mine", 0, 1)
    ended = ResponseEnded(
        request_id="mine",
        time=1.0,
        finish_reason="stop",
        disconnected=False,
        completion_tokens=2,
        aggregates={},
    )
    reader.on_ended(ended)
    found = reader.take("mine")
    assert found is not None and reader.take("mine") is None
    assert found.means.tolist() == [1.0] * len(SIGNALS)
    assert (found.heads == 1).all() and (found.onset == 1).all()


@pytest.mark.parametrize("reason", ["abort", "error", "shed"])
def test_an_answer_that_did_not_end_by_itself_is_nothing(reason: str) -> None:
    reader = Reader()
    reader.expect("mine")
    ended = ResponseEnded(
        request_id="mine",
        time=1.0,
        finish_reason=reason,
        disconnected=False,
        completion_tokens=0,
        aggregates={},
    )
    reader.on_ended(ended)
    assert reader.take("mine") is None


def test_conditions_of_the_rounds_are_no_fault(rules) -> None:
    """Answers that depend on the batch are healthy under every condition, however few rounds were asked."""
    shifts = np.random.default_rng(7).normal(0, 0.1, len(baselines.CONDITIONS))

    def rounds(model: Model, count: int) -> list[list[Answer]]:
        found = []
        for number in range(count):
            shift = shifts[number % len(shifts)]
            found.append([Answer(n, model.reading(n, shift), True) for n in NAMES])
        return found

    for seed in range(10):
        baseline = baselines.build(
            rounds(Model(300 + seed), baselines.ROUNDS), model="toy", quantization="none", prompts="p"
        )
        judge = Judge(baseline)
        rates = baseline.rates(rules.rate.confidence, rules.rate.drift)
        for condition in range(len(shifts)):
            alike = rounds(Model(400 + seed), len(shifts) * 5)[condition :: len(shifts)]
            tests = [
                c.tests
                for healthy in alike
                for a in healthy
                if (c := judge.compare(a.canary, a.reading, True))
            ]
            assert np.mean([found["signals@0.05"] for found in tests]) < 2 * rates["signals@0.05"]
