from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from alerting.rules import Rules
from engine.messages import TOKEN_SIGNALS
from telemetry.signals import BusinessEvent

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
    needed = 0
    while RATE not in w.active():
        service.respond(w.evaluator, service.rows(24, shift, noise))
        needed += 1
    assert needed < 30
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
    assert w.l1 == []
    service.respond(w.evaluator, service.rows(24, 3.0), leave_after=18)
    assert len(w.l1) == 1
