from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alerting.breaker import Breaker
from alerting.rules import load_rules
from engine.messages import RequestMeta

RULE = load_rules().breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(breaker: Breaker, request_id: str = "r", route: str = "qa") -> bool:
    return breaker.admit(RequestMeta(request_id=request_id, route=route)) is None


def opened(mode: str = "enforce") -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(RULE, mode, clock)  # type: ignore[arg-type]
    breaker.trip("qa", "test")
    return breaker, clock


def test_open_sheds_its_route_only_and_says_when_to_come_back() -> None:
    breaker, _ = opened()
    rejection = breaker.admit(RequestMeta(request_id="r", route="qa"))
    assert rejection is not None
    assert (rejection.status, rejection.code) == (503, "breaker_open")
    assert 1 <= rejection.retry_after_s <= RULE.cool_down_s
    assert ask(breaker, route="else")
    assert breaker.shed == 1


def test_observe_goes_the_same_way_and_sheds_nothing() -> None:
    breaker, clock = opened("observe")
    assert ask(breaker)
    clock.now += RULE.cool_down_s
    breaker.tick()
    for i in range(RULE.probes):
        assert ask(breaker, f"p{i}")
        breaker.ended(f"p{i}", "qa", healthy=True)
    assert [t.after for t in breaker.transitions] == ["open", "half_open", "closed"]
    assert not any(t.enforced for t in breaker.transitions)
    assert breaker.shed == 0


def test_failing_probes_reopen_with_a_longer_cool_down_up_to_the_limit() -> None:
    breaker, clock = opened()
    for _ in range(8):
        clock.now += breaker.report()["qa"]["cool_down_s"]
        for i in range(RULE.probes_unhealthy + 1):
            assert ask(breaker, f"p{i}")
            breaker.ended(f"p{i}", "qa", healthy=False)
        assert breaker.state("qa") == "open"
    assert breaker.report()["qa"]["cool_down_s"] == RULE.cool_down_max_s


def test_a_lost_probe_is_given_again() -> None:
    breaker, clock = opened()
    clock.now += RULE.cool_down_s
    assert all(ask(breaker, f"p{i}") for i in range(RULE.probes))
    assert not ask(breaker, "more")
    clock.now += RULE.probe_timeout_s + 1
    assert ask(breaker, "more")


def test_a_probe_that_tells_nothing_is_given_again() -> None:
    breaker, clock = opened()
    clock.now += RULE.cool_down_s
    for i in range(3 * RULE.probes):
        assert ask(breaker, f"p{i}")
        breaker.ended(f"p{i}", "qa", healthy=None)
    assert breaker.state("qa") == "half_open"


@pytest.mark.parametrize("request_id", ["unknown", "p0"])
def test_endings_of_others_are_ignored(request_id: str) -> None:
    breaker, clock = opened()
    breaker.ended(request_id, "qa", healthy=False)
    breaker.ended(request_id, "nowhere", healthy=False)
    clock.now += RULE.cool_down_s
    breaker.tick()
    assert breaker.state("qa") == "half_open"


class Machine(RuleBasedStateMachine):
    """The breaker against what it promises, in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(RULE, "enforce", self.clock)
        self.out: list[str] = []
        self.opened_at: float | None = None
        self.number = 0
        self.breaker.listeners.append(self.heard)

    def heard(self, transition: object) -> None:
        allowed = {
            ("closed", "open"),
            ("open", "half_open"),
            ("half_open", "open"),
            ("half_open", "closed"),
        }
        assert (transition.before, transition.after) in allowed  # type: ignore[attr-defined]
        if transition.after == "open":  # type: ignore[attr-defined]
            self.opened_at = self.clock.now
        self.out.clear()

    @rule(seconds=st.sampled_from([0.1, 3.0, 10.0, 130.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.breaker.tick()

    @rule()
    def trip(self) -> None:
        self.breaker.trip("qa", "test")
        assert self.breaker.state("qa") == "open"

    @rule()
    def arrive(self) -> None:
        self.number += 1
        admitted = ask(self.breaker, f"r{self.number}")
        state = self.breaker.state("qa")
        if state == "closed":
            assert admitted
        if state == "open":
            assert not admitted
        if state == "half_open" and admitted:
            self.out.append(f"r{self.number}")

    @precondition(lambda self: self.out)
    @rule(data=st.data(), healthy=st.sampled_from([True, True, False, None]))
    def end(self, data: st.DataObject, healthy: bool | None) -> None:
        request_id = data.draw(st.sampled_from(self.out))
        self.out.remove(request_id)
        self.breaker.ended(request_id, "qa", healthy)

    @invariant()
    def open_lasts_its_cool_down_and_no_longer_after_a_tick(self) -> None:
        report = self.breaker.report().get("qa")
        if report is None:
            return
        if report["state"] == "open":
            assert self.opened_at is not None
            assert self.clock.now - self.opened_at < report["cool_down_s"]
        assert RULE.cool_down_s <= report["cool_down_s"] <= RULE.cool_down_max_s

    @invariant()
    def probes_are_bounded(self) -> None:
        report = self.breaker.report().get("qa")
        if report is not None:
            probes = report["probes"]
            assert probes["out"] + probes["healthy"] + probes["unhealthy"] <= RULE.probes
            assert probes["unhealthy"] <= RULE.probes_unhealthy


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
