"""Plans and admissions, without a model: a step "computes" by counting."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.fairness import WEIGHTS
from engine.kv.pages import PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.roster import Roster
from engine.scheduler import Chunk, Sequence, plan

PAGE = 4
numbers = itertools.count()


def sequence(
    prompt: int,
    answer: int = 4,
    *,
    tenant: str = "a",
    priority: str = "normal",
    request_id: str | None = None,
    choice: int = 0,
    salt: bytes = b"",
    changed: int | None = None,
) -> Sequence:
    """`changed` is the place of a token that differs from those of other prompts."""
    meta = RequestMeta(
        request_id=request_id or f"r{next(numbers)}",
        tenant=tenant,
        priority=priority,  # type: ignore[arg-type]
    )
    tokens = [-1 if place == changed else place for place in range(prompt)]
    params = SamplingParams(max_tokens=answer)
    request = Submit(meta=meta, choice=choice, token_ids=tokens, params=params, cache_salt=salt)
    return Sequence(request=request, arrived=0.0, tokens=list(tokens), prompt_length=prompt)


def roster(pages: int = 64, **changes: object) -> Roster:
    pool = PagePool(layers=1, pages=pages, page_size=PAGE, kv_heads=1, head_dim=1, dtype=torch.float32)
    values = {"step_tokens": 16, "max_running": 4, "itl_slo_s": 0.0, "whole_chunks": False}
    return Roster(pool, **(values | changes))  # type: ignore[arg-type]


def step(target: Roster) -> list[Chunk]:
    """Plan, count what would be computed, end what is over."""
    chunks = target.plan(0.0)
    for chunk in chunks:
        assert chunk.start == chunk.sequence.computed
        assert chunk.count > 0
        emits = chunk.emits
        chunk.sequence.computed += chunk.count
        if emits:
            chunk.sequence.tokens.append(0)
    target.keep(chunks)
    target.check()
    for chunk in chunks:
        if chunk.sequence.emitted == chunk.sequence.request.params.max_tokens:
            target.remove(chunk.sequence)
    return chunks


def drain(target: Roster, limit: int = 5000) -> None:
    """Step until nothing is left; fails when a step does nothing or it takes too long."""
    for _ in range(limit):
        if not target.everyone:
            break
        assert step(target), "somebody waits and nothing is done"
    assert not target.everyone
    assert target.pool.free + target.cache.idle == target.pool.pages


class RosterMachine(RuleBasedStateMachine):
    """Random tenants, priorities, choices, common beginnings, aborts, faults and settings: nothing is lost,
    all get their turn, in a pool that the prefix cache fills."""

    @initialize(
        running=st.integers(1, 4), step_tokens=st.integers(1, 20), whole=st.booleans(), slo=st.booleans()
    )
    def begin(self, running: int, step_tokens: int, whole: bool, slo: bool) -> None:
        self.roster = roster(
            16, max_running=running, step_tokens=step_tokens, whole_chunks=whole, itl_slo_s=0.01 * slo
        )

    @rule(
        prompt=st.integers(1, 40),
        answer=st.integers(1, 20),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(list(WEIGHTS)),
        choices=st.integers(1, 3),
        salt=st.sampled_from([b"", b"1" * 16, b"2" * 16]),
        changed=st.none() | st.integers(0, 40),
    )
    def arrive(  # noqa: PLR0917
        self,
        prompt: int,
        answer: int,
        tenant: str,
        priority: str,
        choices: int,
        salt: bytes,
        changed: int | None,
    ) -> None:
        request_id = f"r{next(numbers)}"
        for choice in range(choices):
            self.roster.add(
                sequence(
                    prompt,
                    answer,
                    tenant=tenant,
                    priority=priority,
                    request_id=request_id,
                    choice=choice,
                    salt=salt,
                    changed=changed,
                )
            )

    @precondition(lambda self: self.roster.everyone)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.roster.remove(data.draw(st.sampled_from(self.roster.everyone)))

    @precondition(lambda self: self.roster.running)
    @rule(data=st.data())
    def taint(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.roster.running)).pages
        self.roster.taint(data.draw(st.lists(st.sampled_from(pages), max_size=2)))

    @precondition(lambda self: self.roster.everyone)
    @rule(seconds=st.floats(0.0001, 0.1))
    def step(self, seconds: float) -> None:
        chunks = step(self.roster)
        assert chunks
        self.roster.learn(chunks, seconds)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "roster"):
            self.roster.check()
            flows = {s.flow for s in self.roster.everyone}
            assert flows <= self.roster.shares.served.keys()

    def teardown(self) -> None:
        if hasattr(self, "roster"):
            drain(self.roster)
            whole = sequence(60)  # every page can be given up in the end
            self.roster.add(whole)
            drain(self.roster)
            assert self.roster.pool.free == 16
            assert not self.roster.shares.served


TestRosterMachine = RosterMachine.TestCase
TestRosterMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(
    running=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5), st.integers(0, 30)), max_size=6),
    waiting=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), max_size=8),
    step_tokens=st.integers(1, 40),
    prompt_tokens=st.none() | st.integers(1, 40),
    free=st.integers(0, 20),
)
def test_a_plan_keeps_its_bounds(running, waiting, step_tokens, prompt_tokens, free):
    active = []
    for prompt, emitted, computed in running:
        one = sequence(prompt, 9)
        one.tokens += [0] * emitted
        one.computed = len(one.tokens) - 1 if emitted else min(computed, prompt - 1)
        one.pages = [0]
        active.append(one)
    queue = [sequence(prompt, answer) for prompt, answer in waiting]
    chosen = plan(
        active,
        queue,
        step_tokens=step_tokens,
        max_running=8,
        free_pages=free,
        page_size=PAGE,
        prompt_tokens=prompt_tokens,
    )
    assert [a.sequence for a in chosen.admit] == queue[: len(chosen.admit)]
    assert sum(-(-a.sequence.longest // PAGE) for a in chosen.admit) <= free
    assert len(active) + len(chosen.admit) <= 8
    decodes = [s for s in active if s.decoding]
    assert [c.sequence for c in chosen.chunks[: len(decodes)]] == decodes
    prompts = sum(c.count for c in chosen.chunks[len(decodes) :])
    assert prompts <= max(step_tokens - len(decodes), 1)
    if decodes and prompt_tokens is not None:
        assert prompts <= prompt_tokens
    if len(decodes) < len(active) or chosen.admit:
        assert prompts, "prompts always go on"
    assert chosen.chunks or not active


@given(
    flood=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=5, max_size=60),
    before=st.integers(1, 30),
    prompt=st.integers(1, 40),
    priority=st.sampled_from(list(WEIGHTS)),
    flood_priority=st.sampled_from(list(WEIGHTS)),
)
def test_a_newcomer_is_next_however_many_of_another_tenant_wait(
    flood, before, prompt, priority, flood_priority
):
    target = roster(16)
    for size, answer in flood:
        target.add(sequence(size, answer, tenant="flood", priority=flood_priority))
    for _ in range(before):
        if target.everyone:
            step(target)
    already = set(map(id, target.running))
    small = sequence(prompt, tenant="small", priority=priority)
    target.add(small)
    while not small.pages:
        step(target)
    began = {id(s) for s in target.running if s.flow.tenant == "flood"} - already
    assert len(began) <= 4 - 1  # at most what the same plan admitted behind it
    order = [s.flow.tenant for s in target.running if id(s) not in already]
    assert order[0] == "small"
    drain(target)


@pytest.mark.parametrize("priority", ["high", "low"])
def test_priorities_divide_the_engine_by_their_weights(priority):
    """Both always have work; one token in and one out each, so that shares show finely."""
    target = roster(max_running=5)
    served: Counter[str] = Counter()
    for _ in range(4000):
        for tenant, level in (("a", "normal"), ("b", priority)):
            while sum(s.flow.tenant == tenant and not s.pages for s in target.everyone) < 8:
                target.add(sequence(5, 3, tenant=tenant, priority=level))
        for chunk in step(target):
            served[chunk.sequence.flow.tenant] += chunk.count
    assert served["b"] / served["a"] == pytest.approx(WEIGHTS[priority], rel=0.05)


@pytest.mark.parametrize("rival", ["same", "other"])
def test_small_requests_do_not_overtake_a_large_one_for_ever(rival):
    target = roster(16, max_running=8)
    target.add(sequence(8, 8, tenant="same"))
    step(target)
    large = sequence(40, 24, tenant="same")  # every page
    target.add(large)
    for _ in range(400):
        while sum(not s.pages for s in target.everyone) < 6:
            target.add(sequence(3, 5, tenant="same" if rival == "same" else f"other{next(numbers) % 5}"))
        step(target)
        if large.pages:
            break
    assert large.pages


def test_idle_time_saves_up_no_claim():
    """A tenant that was silent for long does not get the engine to itself afterwards."""
    target = roster(max_running=2)
    target.add(sequence(4, 4, tenant="quiet"))
    for _ in range(200):
        while sum(s.flow.tenant == "busy" and not s.pages for s in target.everyone) < 4:
            target.add(sequence(4, 4, tenant="busy"))
        step(target)
    for _ in range(40):
        target.add(sequence(4, 4, tenant="quiet"))
    began: Counter[str] = Counter()
    for _ in range(60):
        while sum(s.flow.tenant == "busy" and not s.pages for s in target.everyone) < 4:
            target.add(sequence(4, 4, tenant="busy"))
        before = set(map(id, target.running))
        target_running = step(target)
        began.update(s.flow.tenant for s in target.running if id(s) not in before)
        assert target_running
    assert abs(began["quiet"] - began["busy"]) <= 3


def test_prompts_of_the_least_served_go_first():
    target = roster(step_tokens=8, max_running=4)
    for _ in range(3):
        target.add(sequence(40, tenant="long"))
    step(target)
    target.add(sequence(8, tenant="short"))
    chunks = step(target)
    assert [(c.sequence.flow.tenant, c.count) for c in chunks] == [("short", 8)]


def test_steps_that_decode_keep_the_time_between_tokens():
    target = roster(256, step_tokens=256, itl_slo_s=0.1)
    target.add(sequence(4, 400))
    for _ in range(30):  # 20 ms a decode step, half a millisecond a prompt token
        chunks = step(target)
        prompt = sum(c.count for c in chunks if c.start < c.sequence.prompt_length)
        target.learn(chunks, 0.02 + 0.0005 * prompt)
    target.add(sequence(500, 4))
    longest, steps = 0.0, 0
    while any(not s.emitted for s in target.everyone):
        chunks = step(target)
        prompt = sum(c.count for c in chunks if c.start < c.sequence.prompt_length)
        seconds = 0.02 + 0.0005 * prompt
        target.learn(chunks, seconds)
        longest, steps = max(longest, seconds), steps + 1
    assert 0.06 < longest <= 0.1
    assert steps <= 8


def test_free_pages_cannot_be_shared():
    pool = PagePool(layers=1, pages=2, page_size=PAGE, kv_heads=1, head_dim=1, dtype=torch.float32)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    pool.check([page])
    pool.release([page])
    with pytest.raises(RuntimeError, match="is free"):
        pool.share([page])
    pool.check([])
