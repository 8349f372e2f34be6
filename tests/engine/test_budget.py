"""The signal budget: what it spends, on whom, and that the floor stands whatever the costs are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import COARSEST, RAREST, RISKY, Budget, Grant, Row

BASE_S = 0.007  # a step without detail


class Server:
    """Responses that decode together for ever, on a machine whose costs the test decides on.

    `cost(step)` is the seconds for one layer of one row; `risk(row, token)` what its text looks like.
    """

    def __init__(
        self,
        budget: Budget,
        rows: int,
        cost: Callable[[int], float],
        risk: Callable[[int, int], float],
        full: frozenset[int] = frozenset(),
    ) -> None:
        self.budget, self.rows, self.cost, self.risk, self.full = budget, rows, cost, risk, full
        self.step = 0
        self.time = self.detail = self.asked = 0.0  # seconds; `asked` for rows that want everything
        self.grants: list[tuple[list[Row], Grant]] = []

    def run(self, steps: int) -> Server:
        for _ in range(steps):
            rows = [
                Row((f"r{i}", 0), self.step, self.risk(i, self.step), i in self.full)
                for i in range(self.rows)
            ]
            grant = self.budget.grant(rows)
            seconds = len(grant.samples) * len(grant.layers) * self.cost(self.step)
            self.budget.settle(grant, BASE_S + seconds, seconds)
            asked = sum(sample.reason == "full" for sample in grant.samples.values())
            self.asked += seconds * asked / max(len(grant.samples), 1)
            self.detail += seconds
            self.time += BASE_S + seconds
            self.grants.append((rows, grant))
            self.step += 1
        return self

    def spent(self) -> float:
        """Share of step time that the budget's own samples took."""
        return (self.detail - self.asked) / self.time

    def reasons(self) -> Counter[str]:
        return Counter(sample.reason for _, grant in self.grants for sample in grant.samples.values())


def texts(seed: int) -> Callable[[int, int], float]:
    """Risk as of real text: mostly sure, in stretches not."""
    draw = random.Random(seed).random
    draws = [draw() ** 2 for _ in range(1009)]
    return lambda row, token: draws[(37 * row + token // 3) % 1009]


shares = st.floats(0.005, 0.5)
rows = st.integers(1, 32)
depths = st.integers(1, 80)
costs = st.floats(2e-6, 1e-3)


# Costs that spread wider leave debts again and again that are let off, as those of a stall are.
@given(share=shares, count=rows, layers=depths, cost=costs, noise=st.floats(0, 0.75))
@settings(max_examples=30, deadline=None)
def test_detail_takes_its_share_and_no_more(
    share: float, count: int, layers: int, cost: float, noise: float
) -> None:
    cost = min(cost, 0.5 * BASE_S / count)  # one layer's lens costs less than the whole model
    draw = random.Random(layers)
    server = Server(Budget(share, layers), count, lambda _: cost * draw.lognormvariate(0, noise), texts(1))
    server.run(300)  # until costs are known
    before, time = server.detail, server.time
    server.run(2000)
    saved = max(share * BASE_S * 40, 2 * cost * 2**noise * layers)
    assert server.detail - before <= 1.02 * share * (server.time - time) + 3 * saved


@given(share=st.floats(0.01, 0.2), count=rows, jump=st.sampled_from([0.1, 10.0]), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_costs_that_jump_tenfold_are_learned(share: float, count: int, jump: float, seed: int) -> None:
    first = 0.02 * BASE_S / count
    server = Server(Budget(share, 30), count, lambda step: first * (jump if step >= 1500 else 1), texts(seed))
    server.run(1700)  # 200 steps after the jump
    before, time = server.detail, server.time
    server.run(2500)
    assert server.detail - before <= 1.05 * share * (server.time - time) + 0.05
    assert server.reasons()["floor"]


def test_a_stall_is_let_off_and_the_floor_stands_meanwhile() -> None:
    stalls = False
    server = Server(Budget(0.03, 30), 16, lambda _: 5.0 if stalls else 50e-6, texts(1)).run(2000)
    stalls = True
    while not server.run(1).grants[-1][1].samples:
        pass
    stalls = False
    server.run(800)  # 5.6 s
    soon, later = Counter[str](), Counter[str]()
    for place, (_, grant) in enumerate(server.grants[-800:]):
        (soon if place < 200 else later).update(sample.reason for sample in grant.samples.values())
    assert set(soon) == {"floor"}
    assert set(later) == {"risk", "floor"}


@given(share=st.floats(0.001, 0.3), count=rows, layers=depths, cost=costs, seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_riskiest_go_first_and_the_floor_holds(
    share: float, count: int, layers: int, cost: float, seed: int
) -> None:
    server = Server(Budget(share, layers), count, lambda _: cost, texts(seed)).run(600)
    for asked, grant in server.grants:
        by_key = {row.key: row for row in asked}
        risky = [by_key[key].risk for key, sample in grant.samples.items() if sample.reason == "risk"]
        others = [row.risk for row in asked if row.key not in grant.samples]
        assert all(risk >= RISKY for risk in risky)
        assert not risky or min(risky) >= max(others, default=0)
        for row in asked:
            assert row.key in grant.samples or not row.due(RAREST)
        assert not grant.samples or grant.layers[-1] == layers - 1


def test_the_floor_of_a_budget_that_affords_it_is_every_32nd_token_at_least() -> None:
    server = Server(Budget(0.03, 30), 16, lambda _: 60e-6, lambda _row, _token: 1.0).run(4000)
    for asked, grant in server.grants[1000:]:
        for row in asked:
            assert row.key in grant.samples or not row.due(2 * COARSEST)
    assert set(server.reasons()) == {"risk", "floor"}
    assert 0.02 < server.spent() <= 0.0302


def test_a_calm_text_uses_the_budget_too() -> None:
    server = Server(Budget(0.03, 30), 16, lambda _: 60e-6, lambda _row, _token: 0.1).run(4000)
    assert set(server.reasons()) == {"floor"}
    assert 0.012 < server.spent() <= 0.0302


def test_what_is_affordable_in_full_is_sampled_in_full() -> None:
    server = Server(Budget(0.5, 30), 4, lambda _: 10e-6, texts(3)).run(2000)
    for _, grant in server.grants[1000:]:
        assert len(grant.samples) == 4
        assert grant.layers == list(range(30))
        assert {sample.rate for sample in grant.samples.values()} == {1.0}


@given(count=rows, layers=depths, cost=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_zero_and_one_are_exact(count: int, layers: int, cost: float) -> None:
    everybody = frozenset(range(count))
    assert not Server(Budget(0, layers), count, lambda _: cost, texts(0), everybody).run(40).reasons()
    for _, grant in Server(Budget(1, layers), count, lambda _: cost, texts(0)).run(40).grants:
        assert len(grant.samples) == count
        assert grant.layers == list(range(layers))
        assert all(sample == ("full", 1.0) for sample in grant.samples.values())


def test_requests_that_want_everything_cost_the_others_little() -> None:
    server = Server(Budget(0.03, 30), 16, lambda _: 60e-6, texts(5), frozenset({2})).run(6000)
    assert server.reasons()["full"] == 6000
    assert server.spent() <= 0.0302
    assert server.reasons()["floor"] > 50


@pytest.mark.parametrize("layers", [1, 2, 5, 30, 80])
def test_samples_stand_for_all_tokens_and_layers(layers: int) -> None:
    """Weights of 1 ÷ rate and of the stride add up to what was not sampled too."""
    server = Server(Budget(0.05, layers), 16, lambda _: 30e-6, texts(8)).run(6000)
    tokens, cells = 0.0, Counter[int]()
    for _, grant in server.grants:
        for sample in grant.samples.values():
            tokens += 1 / sample.rate
            for layer in grant.layers:
                cells[layer] += (1 if layer == layers - 1 else grant.stride) / sample.rate
    assert tokens == pytest.approx(16 * 6000, rel=0.1)
    assert set(cells) == set(range(layers)), "a layer never had its turn"
    assert sum(cells.values()) == pytest.approx(16 * 6000 * layers, rel=0.1)
