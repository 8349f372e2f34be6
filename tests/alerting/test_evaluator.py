from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from alerting.collector import Collector
from alerting.rules import Rules
from alerting.scores import Frozen, response_scores
from alerting.statistics import ResponseTracker
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from telemetry.signals import BusinessEvent, LayerBatch, ResponseStarted

CONFIDENCE = TOKEN_SIGNALS.index("confidence")
ENTROPY = TOKEN_SIGNALS.index("entropy")
RATE, LEAVING, JOINT = "QuaverLowConfidenceRate", "QuaverUsersLeaving", "QuaverJointEvidence"


def plain(tokens: int, confidence: float, entropy: float) -> np.ndarray:
    rows = np.ones((tokens, len(TOKEN_SIGNALS)), dtype=np.float32)
    rows[:, CONFIDENCE], rows[:, ENTROPY] = confidence, entropy
    return rows


def test_healthy_responses_stay_quiet(service, rules: Rules, watch: Callable) -> None:
    w = watch(baseline=service.baseline(rules, 300))
    for _ in range(1500):
        service.respond(w.evaluator, service.rows(24))
        w.evaluator.tick()
    assert w.changes == []
    assert 0 < len(w.l1) / 1500 < 0.15
    value = w.registry.get_sample_value("quaver_l1_events_total", {"route": "qa", "preset": "quantile"})
    assert value == len(w.l1)


@pytest.mark.parametrize(
    ("shift", "noise"), [(1.5, 0.0), (0.0, 2.0), (-3.0, 0.0)], ids=["up", "noise", "down"]
)
def test_a_change_is_found_and_its_end_too(service, rules, watch, shift: float, noise: float) -> None:
    w = watch(baseline=service.baseline(rules, 300))
    for _ in range(30):
        service.respond(w.evaluator, service.rows(24))
    for _ in range(29):
        service.respond(w.evaluator, service.rows(24, shift, noise))
        if RATE in w.active():
            break
    assert RATE in w.active()
    for _ in range(40):
        service.respond(w.evaluator, service.rows(24))
    assert w.active() == set()
    ended = [a for a in w.book.history if a.name == RATE]
    assert len(ended) == 1
    assert ended[0].ends_at is not None
    assert "healthy range" in ended[0].evidence["resolved_because"]
    assert w.evaluator.report()["routes"]["qa"]["log_evidence"]["l1"] < 3


def test_l1_is_raised_before_the_response_ends(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    heard: list[float] = []
    w.evaluator._on_l1 = lambda *_: heard.append(service.now)
    start = service.now
    service.respond(w.evaluator, service.rows(48, 3.0), seconds=4.0)
    assert heard
    assert heard[0] < start + 2.0


def test_users_leaving_pages_and_trips_only_with_both(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules), mode="enforce")
    for i in range(60):
        service.respond(w.evaluator, service.rows(24), leave_after=18 if i % 2 else None)
    assert LEAVING not in w.active(), "interruptions alone"
    assert w.breaker.state("qa") == "closed"
    service.now += 60
    for _ in range(60):
        service.respond(w.evaluator, service.rows(24, 2.0))
    assert LEAVING not in w.active(), "hesitation alone"
    for _ in range(25):
        service.respond(w.evaluator, service.rows(24, 2.0), leave_after=18)
    assert LEAVING in w.active()
    assert w.breaker.state("qa") == "open"


def test_the_breaker_closes_by_healthy_probes_and_ends_the_page(service, rules, watch) -> None:
    from engine.messages import RequestMeta

    w = watch(baseline=service.baseline(rules), mode="enforce")
    while LEAVING not in w.active():
        service.respond(w.evaluator, service.rows(24, 2.0), leave_after=18)
    assert w.breaker.admit(RequestMeta(request_id="x", route="qa")) is not None
    service.now += rules.breaker.cool_down_s + 0.1
    w.evaluator.tick()
    assert w.breaker.state("qa") == "half_open"
    for i in range(rules.breaker.probes + 1):
        probe = f"probe{i}"
        if w.breaker.admit(RequestMeta(request_id=probe, route="qa")) is None:
            service.respond(w.evaluator, service.rows(24), request_id=probe)
    assert w.breaker.state("qa") == "closed"
    assert LEAVING not in w.active()


def test_without_baseline_the_quantile_preset_is_blind_and_says_so(service, watch) -> None:
    w = watch()
    for _ in range(40):
        service.respond(w.evaluator, service.rows(24, 3.0, 3.0), leave_after=18)
    w.evaluator.tick()
    assert w.changes == []
    assert "calibrate" in w.evaluator.blind()["qa"]
    assert w.registry.get_sample_value("quaver_evaluator_blind", {"route": "qa"}) == 1


def test_another_model_makes_the_baseline_unusable(service, rules, watch) -> None:
    w = watch()
    w.evaluator.use(service.baseline(rules), "toy", "Q4_1")
    service.respond(w.evaluator, service.rows(24))
    assert "quantisation" in w.evaluator.blind()["qa"]


def test_a_route_without_own_limits_gets_wider_labelled_ones(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(30):
        service.respond(w.evaluator, service.rows(24), route="new")
    state = w.evaluator.report()["routes"]["new"]
    assert state["limits_of"] == "pooled"
    for _ in range(5):
        service.respond(w.evaluator, service.rows(24))
    assert state["healthy_l1_rate"] > 2 * w.evaluator.report()["routes"]["qa"]["healthy_l1_rate"]


def test_responses_without_signals_make_the_route_blind(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(25):
        service.respond(w.evaluator, np.full((10, len(TOKEN_SIGNALS)), np.nan, dtype=np.float32))
    assert "no signals" in w.evaluator.blind()["qa"]


def test_canaries_stay_out(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(30):
        service.respond(w.evaluator, service.rows(24, 3.0), canary=True)
    assert (w.changes, w.l1) == ([], [])


def test_raw_l1_needs_the_run_and_the_entropy(service, watch) -> None:
    w = watch("raw")
    good = plain(1, 0.9, 5.0)
    service.respond(w.evaluator, plain(4, 0.6, 5.0))
    service.respond(w.evaluator, np.concatenate([plain(4, 0.6, 5.0), good, plain(4, 0.6, 5.0)]))
    service.respond(w.evaluator, plain(20, 0.6, 4.1))
    service.respond(w.evaluator, plain(20, 0.66, 5.0))
    assert w.l1 == []
    hit = service.respond(w.evaluator, plain(5, 0.6, 4.3))
    assert w.l1 == [hit]


def test_raw_entropy_is_the_running_mean(service, watch) -> None:
    w = watch("raw")
    service.respond(w.evaluator, np.concatenate([plain(20, 0.9, 1.0), plain(10, 0.1, 6.0)]))
    assert w.l1 == [], "the mean over the response is 2.7 nats"


def test_raw_l2_needs_a_live_l1_and_a_tripled_rate(service, watch, rules) -> None:
    w = watch("raw")
    low = plain(10, 0.3, 5.0)

    def outcomes(interrupted: int, completed: int) -> None:
        for i in range(interrupted + completed):
            kind = "interrupted" if i < interrupted else "completed"
            service.now += 0.01
            w.evaluator.on_business(
                BusinessEvent(
                    kind=kind, request_id=f"{service.now}", tenant="a", route="qa", time=service.now
                )
            )

    outcomes(6, 2)
    assert w.active() == set(), "no L1"
    service.now += 10
    service.respond(w.evaluator, low, outcome=False)
    outcomes(1, 6)
    assert w.active() == set(), "one of seven"
    service.now += 4
    outcomes(6, 2)
    assert w.active() == set(), "the L1 is no longer live"
    service.now += 10
    service.respond(w.evaluator, low, outcome=False)
    outcomes(3, 4)
    assert w.active() == {LEAVING}


@pytest.mark.parametrize("preset", ["raw", "quantile"])
def test_one_interruption_on_low_traffic_pages_nobody(service, watch, rules, preset) -> None:
    w = watch(preset, service.baseline(rules))
    service.respond(w.evaluator, plain(20, 0.1, 6.0), leave_after=14)
    w.evaluator.tick()
    assert w.changes == []
    assert w.l1


@pytest.mark.parametrize("preset", ["raw", "quantile"])
def test_one_tenant_cannot_page_for_the_others(service, watch, rules, preset) -> None:
    w = watch(preset, service.baseline(rules), mode="enforce")
    for i in range(60):
        tenant = "b" if i % 5 == 0 else "hangs-up"
        service.respond(
            w.evaluator,
            plain(24, 0.1, 6.0),
            tenant=tenant,
            leave_after=18 if tenant == "hangs-up" else None,
            seconds=0.3,
        )
    assert LEAVING not in w.active()
    assert w.breaker.state("qa") == "closed"


@pytest.mark.parametrize("preset", ["raw", "quantile"])
def test_several_tenants_leaving_do_page(service, watch, rules, preset) -> None:
    w = watch(preset, service.baseline(rules), mode="enforce")
    for i in range(60):
        service.respond(w.evaluator, plain(24, 0.1, 6.0), tenant="abc"[i % 3], leave_after=18, seconds=0.3)
        if LEAVING in w.active():
            break
    assert LEAVING in w.active()
    assert i < 30


def test_a_silent_route_ends_its_alerts(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    while RATE not in w.active():
        service.respond(w.evaluator, service.rows(24, 3.0))
    service.now += rules.rate.quiet_s + 1
    w.evaluator.tick()
    assert w.active() == set()
    assert w.book.history[0].evidence["resolved_because"].startswith("no responses")


def test_routes_do_not_touch_each_other(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(40):
        service.respond(w.evaluator, service.rows(24, 2.0), route="qa")
        service.respond(w.evaluator, service.rows(24), route="other")
    assert {alert.route for alert in w.book.active.values()} == {"qa"}


def test_the_number_of_routes_is_bounded(service, watch) -> None:
    w = watch()
    for i in range(200):
        service.respond(w.evaluator, service.rows(2), route=f"r{i}")
    assert len(w.evaluator.report()["routes"]) <= 65


def test_another_baseline_ends_the_alerts_of_the_old_one(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    while RATE not in w.active():
        service.respond(w.evaluator, service.rows(24, 3.0))
    w.evaluator.use(service.baseline(rules))
    assert w.active() == set()
    service.respond(w.evaluator, service.rows(24, 3.0))
    assert w.active() == set()


def test_a_noisy_answer_is_judged_while_broken_off_ones_before_their_sentence_are_not(
    service, rules, watch
) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(20):
        service.respond(w.evaluator, service.rows(24, 3.0), leave_after=4)
    scored = ("quaver_scored_responses_total", {"route": "qa", "preset": "quantile"})
    assert not w.registry.get_sample_value(*scored)
    noisy = service.respond(w.evaluator, service.rows(24, 3.0), leave_after=18)
    assert w.registry.get_sample_value(*scored) == 1
    assert noisy in w.l1


def test_the_cusum_raises_an_l1_before_the_sentence_ends(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    rows = service.rows(24)
    rows[3:, TOKEN_SIGNALS.index("surprisal")] += 6
    broken = service.respond(w.evaluator, rows, leave_after=9)
    assert w.l1 == [broken]
    assert w.evaluator.events[-1]["cause"] == "cusum:high"


def told(service, sink, heads: float = 0.0, **how) -> str:
    """Tell a healthy answer with layer detail of every second token; `heads` moves one layer of it."""
    rng = service._rng
    request_id = f"detailed{service.now}"

    class WithLayers:
        def __getattr__(self, name):
            return getattr(sink, name)

        def on_tokens(self, batch):
            sink.on_tokens(batch)
            step = batch.steps[0]
            if step % 2 == 0:
                values = 0.5 + rng.normal(0, 0.05, (1, len(HEAD_SIGNALS), 3, 2))
                values[:, :, 1] += heads
                sink.on_layers(
                    LayerBatch(
                        time=batch.time,
                        request_ids=[request_id],
                        choices=[0],
                        steps=[step],
                        layers=[step // 2 % 2, 3, 5],
                        stride=2,
                        reasons=["floor"],
                        rates=[0.5],
                        lens_entropy=np.ones((1, 3), np.float16),
                        heads=values.astype(np.float16),
                    )
                )

    return service.respond(WithLayers(), service.rows(24), request_id=request_id, **how)


def test_heads_that_moved_raise_an_alert_while_tokens_look_healthy(service, rules, watch) -> None:
    collector = Collector(rules)
    for _ in range(240):
        told(service, collector)
    baseline = collector.build(quantization="none")
    limits = baseline.stratum("qa", "greedy").limits["quantile"]
    assert limits.counts["heads_residual:high@0.05"].trials > 50
    w = watch(baseline=baseline)
    for _ in range(60):
        told(service, w.evaluator)
    assert w.changes == []
    needed = 0
    while not w.active():
        told(service, w.evaluator, heads=0.1)
        needed += 1
    assert needed < 30
    assert w.evaluator.events[-1]["cause"] in {"heads_residual:high", "combined:high"}


def test_a_contrast_is_gathered_apart_and_its_answers_are_no_samples(service, rules) -> None:
    collector = Collector(rules)
    for _ in range(150):
        told(service, collector)
    for lacking in (False, True) * 20:
        route = "contrast-lacking" if lacking else "contrast-whole"
        told(service, collector, heads=0.1 * lacking, route=route, canary=True)
        told(service, collector, heads=0.5, route="other", canary=True)
    assert len(collector.samples) == 150
    assert [bad for _, bad in collector.contrast] == [False, True] * 20
    baseline = collector.build(quantization="none")
    assert baseline.summary()["scores"]["greedy"]["contrast"]
    assert {stratum.route for stratum in baseline.strata} == {"qa", "*"}


def test_detail_of_another_shape_is_left_out(service, rules, watch) -> None:
    collector = Collector(rules)
    for _ in range(240):
        told(service, collector)
    baseline = collector.build(quantization="none")
    small = baseline.frozen["greedy"].head_model.shape
    assert small == (len(HEAD_SIGNALS), 6, 2)
    w = watch(baseline=baseline)
    w.evaluator.on_started(start := started("r"))
    w.evaluator.on_layers(
        LayerBatch(
            time=start.time,
            request_ids=["r"],
            choices=[0],
            steps=[1],
            layers=[9],
            stride=1,
            reasons=["full"],
            rates=[1.0],
            lens_entropy=np.ones((1, 1), np.float16),
            heads=np.ones((1, len(HEAD_SIGNALS), 1, 2), np.float16),
        )
    )
    assert w.evaluator._open.close("r").detail is None


def started(request_id: str) -> ResponseStarted:
    return ResponseStarted(
        request_id=request_id,
        tenant="a",
        route="qa",
        canary=False,
        model="toy",
        temperature=0.0,
        prompt_tokens=10,
        time=1.0,
    )


def test_the_stream_and_the_whole_response_agree(service, rules) -> None:
    """The tracker's running statistics are the scores of `response_scores`."""
    for tokens in (1, 2, 3, 24, 40):
        rows = service.rows(tokens)
        tracker = ResponseTracker(0.7)
        for count, row in enumerate(rows.tolist(), start=1):
            tracker.add(row)
            if count == 9:
                tracker.end_sentence(9)
        tracker.finish()
        frozen = Frozen(responses=1, tokens=1, surprisal=0.7, usual={})
        whole = response_scores(rows, (), 9, frozen)
        found = tracker.sentence | tracker.whole()
        for name in ("cusum", "window_excess", "sentence_entropy", "response_entropy", "sentence_excess"):
            assert found[name] == pytest.approx(whole[name], abs=1e-5), (name, tokens)
        assert found["sentence_confidence"] == pytest.approx(1 - whole["sentence_doubt"], abs=1e-5)


def test_answers_surer_than_the_baseline_are_told_of_and_page_nobody(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(60):
        service.respond(w.evaluator, service.rows(24))
    assert w.evaluator.report()["too_calm"] == []
    for _ in range(150):
        service.respond(w.evaluator, service.rows(24, -0.8))
    assert w.evaluator.report()["too_calm"] == ["qa"]
    assert w.changes == []


class Lossy:
    """Tells a sink all but the first token of a response, or all of them and that layer detail was lost."""

    def __init__(self, sink, what: str) -> None:
        self._sink, self._what = sink, what

    def __getattr__(self, name: str):
        return getattr(self._sink, name)

    def on_tokens(self, batch) -> None:
        if batch.steps == [0]:
            self._sink.on_lost(batch.request_ids[0], 0, self._what)
            if self._what == "tokens":
                return
        self._sink.on_tokens(batch)


def degraded(w, what: str) -> float:
    labels = {"route": "qa", "lost": what}
    return w.registry.get_sample_value("quaver_degraded_responses_total", labels) or 0.0


def test_a_response_that_lost_tokens_is_judged_neither_way_and_counted(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(20):
        service.respond(w.evaluator, service.rows(24))
    model = ("l1", "confidence", "entropy")
    before = w.evaluator.report()["routes"]["qa"]["log_evidence"]
    raised = list(w.l1)
    scored = {"route": "qa", "preset": "quantile"}
    for _ in range(20):
        service.respond(Lossy(w.evaluator, "tokens"), service.rows(24, 3.0, 3.0))
    w.evaluator.tick()
    report = w.evaluator.report()["routes"]["qa"]
    assert (w.l1, report["degraded_recent"]) == (raised, 20)
    assert [report["log_evidence"][name] for name in model] == [before[name] for name in model]
    assert w.registry.get_sample_value("quaver_scored_responses_total", scored) == 20
    assert (degraded(w, "tokens"), degraded(w, "layers")) == (20, 0)
    assert "lost some on the way" in w.evaluator.blind()["qa"]
    service.respond(w.evaluator, service.rows(24))
    assert w.evaluator.blind() == {}


def test_what_is_left_without_layers_is_judged_and_the_rest_rests(service, rules, watch) -> None:
    collector = Collector(rules)
    for _ in range(240):
        told(service, collector)
    w = watch(baseline=collector.build(quantization="none"))
    struck, healthy = "heads_residual:high", "sentence_entropy:high"

    def evidence(statistic: str) -> float:
        return dict(w.evaluator._routes["qa"].l1.members())[statistic].value

    for _ in range(4):
        told(service, w.evaluator, heads=0.1)
    assert evidence(struck) > 10
    of_heads, of_l1 = evidence(struck), evidence("l1")
    of_tokens = evidence(healthy)
    for _ in range(10):
        told(service, Lossy(w.evaluator, "layers"))
    assert (evidence(struck), evidence("l1")) == (of_heads, of_l1), "absent heads are not healthy heads"
    assert evidence(healthy) != of_tokens
    assert degraded(w, "layers") == 10
    assert w.evaluator.blind() == {}


def test_an_alert_from_heads_does_not_end_because_they_are_lost(service, rules, watch) -> None:
    collector = Collector(rules)
    for _ in range(240):
        told(service, collector)
    w = watch(baseline=collector.build(quantization="none"))
    while not w.active():
        told(service, w.evaluator, heads=0.1)
    firing = w.active()
    for _ in range(3 * rules.rate.recover_responses):
        told(service, Lossy(w.evaluator, "layers"))
    assert w.active() >= firing
    for _ in range(3 * rules.rate.recover_responses):
        told(service, w.evaluator)
    assert w.active() == set()


@pytest.mark.parametrize("what", ["tokens", "layers"])
def test_a_calibration_keeps_whole_responses_only(service, rules, what: str) -> None:
    collector = Collector(rules)
    for _ in range(10):
        service.respond(collector, service.rows(24))
        service.respond(Lossy(collector, what), service.rows(24))
    assert len(collector.samples) == 10
