from __future__ import annotations

import numpy as np
import pytest

from alerting.alerts import AlertBook
from alerting.traffic import EVERYWHERE, Traffic

NAME = "QuaverTrafficChanged"


class Asked:
    """Prompts of routes with lengths, told to a watch at one a second."""

    def __init__(self, rules, seed: int = 0) -> None:
        self.changes = []
        self.traffic = Traffic(rules, AlertBook(self.changes.append))
        self.rng = np.random.default_rng(seed)
        self.now = 0.0

    def ask(self, count: int, shares: dict[str, float], length: float = 100.0) -> int | None:
        """Ask so many; return after how many the alert fired."""
        for n in range(1, count + 1):
            self.now += 1.0
            route = str(self.rng.choice(list(shares), p=list(shares.values())))
            self.traffic.add(route, int(self.rng.lognormal(np.log(length), 0.3)), self.now)
            if self.traffic.changed:
                return n
        return None


USUAL = {"qa": 0.7, "list": 0.3}


def test_the_usual_traffic_raises_nothing(rules) -> None:
    for seed in range(3):
        assert Asked(rules, seed).ask(3000, USUAL) is None


@pytest.mark.parametrize(
    ("shares", "length", "strongest"),
    [
        ({"qa": 0.2, "list": 0.8}, 100, "share:list"),
        ({"qa": 0.5, "list": 0.2, "code": 0.3}, 100, "share:new"),
        (USUAL, 220, "long:"),
        (USUAL, 55, "short:"),
    ],
    ids=["mix", "new route", "long", "short"],
)
def test_another_mix_is_told_and_becomes_the_usual_one(rules, shares, length, strongest) -> None:
    asked = Asked(rules)
    assert asked.ask(600, USUAL) is None
    found = asked.ask(200, shares, length)
    assert found is not None
    assert found < 120
    alert = asked.changes[0]
    assert (alert.name, alert.route, alert.level, alert.severity) == (NAME, EVERYWHERE, "info", "info")
    assert alert.evidence["strongest"].startswith(strongest)
    for _ in range(rules.traffic.reference):
        asked.ask(1, shares, length)
    assert [change.state for change in asked.changes] == ["firing", "resolved"]
    assert "reference" in asked.changes[1].evidence["resolved_because"]
    assert asked.ask(1000, shares, length) is None


def test_routes_whose_names_look_like_levels_are_routes_of_their_own(rules) -> None:
    usual = {"qa@0.1": 0.35, "qa@0.2": 0.35, "list": 0.3}
    asked = Asked(rules)
    assert asked.ask(1500, usual) is None
    assert asked.ask(200, {"qa@0.1": 0.05, "qa@0.2": 0.65, "list": 0.3}) is not None
    assert asked.changes[0].evidence["strongest"] == "share:qa@0.2"


def test_without_a_reference_nothing_is_said(rules) -> None:
    asked = Asked(rules)
    asked.ask(rules.traffic.reference - 1, USUAL)
    assert asked.traffic.evidence() == {"log_evidence": 0.0, "strongest": None, "reference": False}
    assert asked.changes == []


def test_healthy_answers_to_other_questions_page_nobody(service, rules, watch) -> None:
    """The route is new and the answers are healthy: the alert says so, the model's alerts stay quiet."""
    w = watch(baseline=service.baseline(rules, 200))
    for _ in range(rules.traffic.reference):
        service.respond(w.evaluator, service.rows(6))
    for _ in range(60):
        service.respond(w.evaluator, service.rows(24), route="new")
    w.evaluator.tick()
    assert w.active() == {NAME}
    report = w.evaluator.report()
    assert report["traffic"]["changed"]
    assert report["traffic"]["strongest"] == "share:new"
    labels = {"name": NAME, "level": "info", "route": EVERYWHERE}
    assert w.registry.get_sample_value("quaver_alert_active", labels) == 1


def test_canaries_are_no_traffic(service, rules, watch) -> None:
    w = watch(baseline=service.baseline(rules))
    for _ in range(rules.traffic.reference + 1):
        service.respond(w.evaluator, service.rows(2), canary=True)
    assert not w.evaluator.report()["traffic"]["reference"]
