"""The scheduler's simulation: whole, repeatable, and showing what admission is for.

The cost of a step is fixed here, so that a new measurement changes no verdict.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from benchmarks.arrivals import DATA
from benchmarks.scheduler import POLICIES, TIMEOUT_S, Policy, Simulation, capacity, figures

COST = {
    "constants": {"fixed": 0.03, "decode": 0.002, "prompt": 0.0008, "attention": 1e-7},
    "spread": 0.1,
}


@cache
def simulated(name: str, trace: str, load: float) -> Simulation:
    rows = json.loads(DATA.read_text())["traces"][trace]
    simulation = Simulation(POLICIES[name], COST, rows, load * capacity(COST, rows))
    simulation.run()
    return simulation


@pytest.mark.parametrize("trace", ["bursts", "flood"])
def test_everybody_is_answered_whole_or_refused(trace):
    simulation = simulated("elastic (default)", trace, 1.2)
    for answer in simulation.answers:
        assert len(answer.emitted) == (0 if answer.shed else answer.tokens)
        assert answer.emitted == sorted(answer.emitted)
        assert not answer.emitted or answer.emitted[0] > answer.at
    assert simulation.roster.pool.free == simulation.roster.pool.pages
    assert simulation.door.in_flight == 0


def test_the_same_again_is_the_same():
    rows = json.loads(DATA.read_text())["traces"]["ramp"][:60]
    one, other = Simulation(Policy(), COST, rows, 2.0), Simulation(Policy(), COST, rows, 2.0)
    one.run()
    other.run()
    assert figures(one) == figures(other)


def test_the_delay_limit_ends_overload_before_time_outs():
    limited, unbounded = (
        figures(simulated(name, "ramp", 1.1)) for name in ("elastic (default)", "fixed, unbounded queue")
    )
    assert limited["late"] == 0 and limited["shed"]["queue_delay"]
    assert unbounded["late"] and unbounded["first_token_s"]["0.99"] > TIMEOUT_S
    assert limited["good"] > unbounded["good"]
    assert limited["first_token_s"]["0.99"] < 1.5 * POLICIES["elastic (default)"].delay_s


def test_a_small_tenant_beside_a_flood():
    fair, unfair = (
        figures(simulated(name, "flood", 1.2))["small_tenant"]
        for name in ("elastic (default)", "elastic, first come first served")
    )
    assert fair["shed"] == 0 < unfair["shed"]
    assert fair["first_token_p95_s"] < unfair["first_token_p95_s"] / 2


def test_cutting_prompts_keeps_the_time_between_tokens():
    cut, uncut = (
        figures(simulated(name, "steady", 0.7))["inter_token_s"]["0.99"]
        for name in ("elastic (default)", "elastic, prompts uncut")
    )
    assert cut < 0.25
    assert uncut > 0.4
