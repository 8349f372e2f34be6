"""The prefix cache over an engine on a small random model, and over a roster that only counts."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Engine
from engine.kv import names
from engine.kv.pages import PagePool
from engine.kv.policy import Cost, Lru, Policy, Recompute, Use
from engine.kv.prefix import Chain, PrefixCache
from engine.messages import Finish, RequestMeta, SamplingParams, StepOutput, Submit
from engine.roster import Hold, Roster
from engine.scheduler import Chunk, Sequence
from engine.settings import EngineSettings
from tests.engine.tiny import TINY, random_model

CONFIG = replace(TINY, layers=3, max_context=256)
PAGE = 4
ONE, TWO = b"1" * 16, b"2" * 16
#: Of keys and values of about 1, computed in other batches and chunks (fp32).
TOLERANCE = 2e-5


MODEL = random_model(CONFIG, seed=11)


def engine(**changes: object) -> Engine:
    values = {"kv_tokens": 1024, "page_size": PAGE, "max_running": 4, "signal_budget": 0.0, "kv_host_mb": 0}
    return Engine(MODEL, EngineSettings(**(values | changes)))


def submit(
    request_id: str, prompt: list[int], choice: int = 0, salt: bytes = ONE, **params: object
) -> Submit:
    values = {"max_tokens": 4, "ignore_eos": True} | params
    return Submit(
        meta=RequestMeta(request_id=request_id),
        choice=choice,
        token_ids=prompt,
        params=SamplingParams(**values),
        cache_salt=salt,
    )


def run(target: Engine, *requests: Submit) -> tuple[dict[str, list[int]], dict[str, Finish]]:
    """Return the tokens and the end of each request's choice 0."""
    for request in requests:
        target.submit(request)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finish] = {}
    while target.has_work:
        output = target.step()
        target.check()
        take(output, tokens, ends)
    assert output.stats.pages_used == 0
    assert target.pool.free + output.stats.pages_cached == target.pool.pages
    return tokens, ends


def take(output: StepOutput, tokens: dict[str, list[int]], ends: dict[str, Finish]) -> None:
    ids = (
        torch.frombuffer(bytearray(output.token_ids), dtype=torch.int32).tolist() if output.token_ids else []
    )
    for request_id, choice, token in zip(output.request_ids, output.choices, ids, strict=True):
        if choice == 0:
            tokens.setdefault(request_id, []).append(token)
    ends.update({end.request_id: end for end in output.finished if end.choice == 0})


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [1 + (start + i * i) % 59 for i in range(length)]


def test_a_prompt_that_begins_alike_computes_what_differs() -> None:
    target = engine()
    _, ends = run(target, submit("a", prompt_of(30)))
    assert ends["a"].cached_tokens == 0
    _, ends = run(target, submit("b", prompt_of(22) + [7] * 9))
    assert ends["b"].cached_tokens == 22  # of the page in which they part, a copy
    stats = target.stats()
    assert (stats.prefix_hits, stats.prefix_misses) == (5, 7 + 2)
    assert stats.prefix_saved_s > 0


@pytest.mark.parametrize("length", [4, 5, 8, 9, 33])
def test_a_prompt_that_is_there_in_full_computes_its_end_alone(length: int) -> None:
    target, prompt = engine(), prompt_of(length)
    cold, _ = run(target, submit("a", prompt))
    warm, ends = run(target, submit("b", prompt))
    assert warm["b"] == cold["a"]
    assert ends["b"].cached_tokens == (length - 1 if length > PAGE else 0)


def test_a_page_is_copied_as_far_as_it_is_the_same_and_stays_what_it_was() -> None:
    target, prompt = engine(), prompt_of(24)
    others = {f"o{i}": [*prompt[: 20 + i], *[7 - i] * 4] for i in range(4)}
    cold = {}
    for name, other in others.items():
        cold |= run(engine(), submit(name, other))[0]
    run(target, submit("a", prompt))
    for i, (name, other) in enumerate(others.items()):
        tokens, ends = run(target, submit(name, other))
        assert tokens[name] == cold[name]
        assert ends[name].cached_tokens == 20 + i
    assert run(target, submit("foreign", prompt, salt=TWO))[1]["foreign"].cached_tokens == 0
    tokens, ends = run(target, submit("b", prompt))
    assert ends["b"].cached_tokens == 23
    assert tokens["b"] == run(engine(), submit("b", prompt))[0]["b"]


def test_answers_are_kept_too_but_not_in_deterministic_mode() -> None:
    for deterministic, cached in ((False, 28), (True, 16)):
        target, prompt = engine(deterministic=deterministic, step_tokens=8), prompt_of(20)
        tokens, _ = run(target, submit("a", prompt, max_tokens=11))
        turn = prompt + tokens["a"] + [5, 6, 7]
        _, ends = run(target, submit("b", turn))
        assert ends["b"].cached_tokens == cached


@pytest.mark.parametrize(("step_tokens", "cached"), [(4, 40), (6, 36), (8, 40), (9, 36), (16, 32), (50, 0)])
def test_deterministic_hits_end_where_chunks_do(step_tokens: int, cached: int) -> None:
    """At multiples of page and chunk, of what was computed in whole chunks."""
    target = engine(deterministic=True, step_tokens=step_tokens)
    Handed(target).cut_as_cold(target)
    run(target, submit("a", prompt_of(40)))
    _, ends = run(target, submit("b", [*prompt_of(40), 5, 6]))
    assert ends["b"].cached_tokens == cached


def test_nothing_is_read_or_kept_without_a_salt_or_with_the_setting_off() -> None:
    for target, salt in ((engine(), b""), (engine(prefix_cache=False), ONE)):
        for request_id in "ab":
            _, ends = run(target, submit(request_id, prompt_of(30), salt=salt))
            assert ends[request_id].cached_tokens == 0
        assert target.pool.free == target.pool.pages
        assert target.stats().prefix_misses == 0


def test_two_salts_never_share() -> None:
    target = engine()
    run(target, submit("a", prompt_of(30), salt=ONE))
    _, ends = run(target, submit("b", prompt_of(30), salt=TWO))
    assert ends["b"].cached_tokens == 0
    assert target.stats().pages_cached == 2 * (33 // PAGE)


def test_what_two_computed_at_once_is_held_once() -> None:
    target, prompt = engine(), prompt_of(33)
    for request_id in "ab":  # their answers differ
        target.submit(submit(request_id, prompt, max_tokens=8, temperature=1.0, seed=ord(request_id)))
    while target.has_work:
        output = target.step()
        target.check()
        if output.stats.running == 2 and not output.prefill_tokens:
            assert output.stats.pages_used == 8 + 2 * 3
    assert output.stats.prefix_hits == 0


def test_choices_share_one_prompt_and_leave_it_behind() -> None:
    target, prompt = engine(max_running=8), prompt_of(41)
    for choice in range(6):
        target.submit(submit("a", prompt, choice, temperature=1.0, seed=5, max_tokens=8))
    computed, most = 0, 0
    while target.has_work:
        output = target.step()
        target.check()
        computed, most = computed + output.prefill_tokens, max(most, output.stats.pages_used)
    assert (computed, most) == (41 + 5, 10 + 6 * 3)
    for choice in range(6):
        target.submit(submit("b", prompt, choice, max_tokens=1))
    assert target.step().prefill_tokens == 6  # nobody waits for a sibling


def test_room_is_made_leaves_first_and_never_of_what_runs() -> None:
    target = engine(kv_tokens=256)  # 64 pages
    run(target, submit("a", prompt_of(100)))
    assert target.stats().pages_cached == 25
    target.submit(submit("b", prompt_of(60) + [3] * 40, max_tokens=8))
    target.step()
    _, ends = run(target, submit("c", prompt_of(140, start=9)))
    stats = target.stats()
    assert ends["b"].cached_tokens == 60 + 1  # a's next token is b's by chance
    assert stats.prefix_evictions >= 36 + 27 - 15 - 10 - (64 - 25)
    _, ends = run(target, submit("d", prompt_of(100)))
    assert ends["d"].cached_tokens >= 60  # what b held could not be given up


@pytest.mark.parametrize("page", [0, 3])
def test_tainted_pages_never_enter(page: int) -> None:
    target, prompt = engine(), prompt_of(30)
    clean, _ = run(engine(), submit("a", prompt))
    target.submit(submit("a", prompt, max_tokens=8))
    target.submit(submit("b", prompt[:12] + [2] * 20, max_tokens=8))
    target.step()
    victim = next(s for s in target.roster.running if s.key[0] == "a")
    target.pool.keys[:, victim.pages[page]] += 1.0  # what a fault on KV pages would do
    target.roster.taint([victim.pages[page]])
    target.check()
    shared = page < 3
    assert [s.tainted for s in target.roster.running] == [True, shared]
    run(target)
    _, ends = run(target, submit("c", prompt))
    assert ends["c"].cached_tokens == page * PAGE
    again, ends = run(target, submit("d", prompt))
    assert ends["d"].cached_tokens == 29
    assert again["d"] == clean["a"]


def test_a_sibling_does_not_read_tainted_pages() -> None:
    target, prompt = engine(), prompt_of(30)
    clean, _ = run(engine(), submit("a", prompt))
    target.submit(submit("a", prompt, 1, salt=b""))
    target.step()
    target.roster.taint(target.roster.running[0].pages[:1])
    target.pool.keys[:, target.roster.running[0].pages[0]] += 1.0
    tokens, ends = run(target, submit("a", prompt, 0, salt=b""))
    assert tokens["a"] == clean["a"]
    assert ends["a"].cached_tokens == 0


@pytest.mark.parametrize("salt", [ONE, TWO])
def test_names_that_collide_are_misses(monkeypatch: pytest.MonkeyPatch, salt: bytes) -> None:
    """Every page of the same place has the same name, whatever its tokens and its salt."""

    def collide(_salt: bytes, _print: bytes, tokens: list[int], size: int, known: object = ()) -> list[bytes]:
        return [bytes([i]) for i in range(len(tokens) // size)]

    monkeypatch.setattr(names, "page_names", collide)
    target, prompt = engine(), prompt_of(30)
    run(target, submit("a", prompt))
    other = prompt if salt == TWO else prompt[:8] + [3] * 22
    alone, _ = run(engine(prefix_cache=False), submit("b", other))
    tokens, ends = run(target, submit("b", other, salt=salt))
    assert tokens == alone
    assert ends["b"].cached_tokens == (0 if salt == TWO else 8)
    assert target.stats().prefix_collisions == 1


def test_the_same_tokens_behind_others_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the page's own tokens alone would find it; its parent tells the difference."""

    def forget(_salt: bytes, _print: bytes, tokens: list[int], size: int, known: object = ()) -> list[bytes]:
        return [repr(tokens[i : i + size]).encode() for i in range(0, len(tokens) - size + 1, size)]

    monkeypatch.setattr(names, "page_names", forget)
    target = engine()
    run(target, submit("a", [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4), submit("b", [5] * 4))
    _, ends = run(target, submit("c", [5] * 4 + [2] * 4 + [3] * 4 + [4] * 4))
    assert ends["c"].cached_tokens == 4


class Handed:
    """Notes what hits hand out: tokens, and the values of their pages at that moment."""

    def __init__(self, target: Engine) -> None:
        self.found: list[tuple[list[int], torch.Tensor]] = []
        cache, acquire = target.roster.cache, target.roster.cache.acquire

        def note(chain: Chain, count: int, wanted: int) -> list[int]:
            pages = acquire(chain, count, wanted)
            reader = next(s for s in target.roster.waiting if s.chain is chain)
            values = torch.stack([target.pool.keys[:, pages], target.pool.values[:, pages]])
            self.found.append((reader.tokens[: count * PAGE], values.clone()))
            assert all(target.pool.owners(page) > 1 for page in pages)
            return pages

        cache.acquire = note  # type: ignore[method-assign]

    def cut_as_cold(self, target: Engine) -> None:
        """From now on see that prompts are cut where they are cut without a cache."""
        plan, size = target.roster.plan, target.settings.step_tokens

        def seen(now: float, hold: Hold | None = None) -> list[Chunk]:
            chunks = plan(now, hold)
            for chunk in chunks:
                left = chunk.sequence.prompt_length - chunk.start
                if left > 0:
                    assert (chunk.start % size, chunk.count) == (0, min(size, left))
            return chunks

        target.roster.plan = seen  # type: ignore[method-assign]

    def take(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        found, self.found = self.found, []
        return iter(found)


@functools.cache
def computed(tokens: tuple[int, ...], **settings: object) -> torch.Tensor:
    """Return keys and values of whole pages of `tokens`, computed from nothing."""
    target = engine(prefix_cache=False, **settings)
    target.submit(submit("cold", [*tokens, 1], max_tokens=2))
    while not target.step().request_ids:
        pass
    pages = target.roster.running[0].pages[: len(tokens) // PAGE]
    return torch.stack([target.pool.keys[:, pages], target.pool.values[:, pages]])


@functools.cache
def answer(prompt: tuple[int, ...], **settings: object) -> list[int]:
    """Return the answer of an engine that has nothing else to do, and no cache."""
    return run(engine(prefix_cache=False, **settings), submit("a", list(prompt), max_tokens=6))[0]["a"]


class PrefixMachine(RuleBasedStateMachine):
    """Prompts with common beginnings in a pool too small for them: books, values and answers are right."""

    @initialize(deterministic=st.booleans(), step_tokens=st.sampled_from([4, 6, 8, 50]), lru=st.booleans())
    def begin(self, deterministic: bool, step_tokens: int, lru: bool) -> None:
        self.settings = {"deterministic": deterministic, "step_tokens": step_tokens}
        self.engine = engine(kv_tokens=256, max_running=3, **self.settings)
        if lru:
            self.engine.roster.cache._policy = Lru()
        self.handed = Handed(self.engine)
        if deterministic:
            self.handed.cut_as_cold(self.engine)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.sent: dict[str, Submit] = {}
        self.past: list[list[int]] = [prompt_of(40 * start, start) for start in (1, 2)]
        self.salts: dict[tuple[bytes, int], set[bytes]] = {}

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(1, 60), max_size=30),
        salt=st.sampled_from([ONE, ONE, TWO, b""]),
        choices=st.sampled_from([1, 1, 3]),
        steps=st.integers(0, 12),
    )
    def arrive(self, data: st.DataObject, tail: list[int], salt: bytes, choices: int, steps: int) -> None:
        head = data.draw(st.sampled_from(self.past))
        prompt = [*head[: len(head) - data.draw(st.integers(0, 20))], *tail] or [1]
        request_id = f"q{len(self.sent)}"
        for choice in range(choices):
            request = submit(request_id, prompt, choice, salt=salt, max_tokens=6)
            self.engine.submit(request)
            self.sent.setdefault(request_id, request)
        for _ in range(steps):
            self.step()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(
            data.draw(st.sampled_from(list(self.sent))), data.draw(st.none() | st.integers(0, 2))
        )

    @rule()
    def step(self) -> None:
        if self.engine.has_work:
            take(self.engine.step(), self.tokens, self.ends)
            self.right()

    @invariant()
    def right(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        for tokens, values in self.handed.take():
            fresh = computed(tuple(tokens), **self.settings) if tokens else values
            if self.settings["deterministic"]:
                assert torch.equal(values, fresh)
            else:
                torch.testing.assert_close(values, fresh, atol=TOLERANCE, rtol=0)
        for request_id, end in self.ends.items():
            whole = [*self.sent[request_id].token_ids, *self.tokens.get(request_id, [])]
            if end.reason == "length" and whole not in self.past and len(whole) < 120:
                self.past.append(whole)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            take(self.engine.step(), self.tokens, self.ends)
            self.right()
        assert self.ends.keys() == self.sent.keys()
        if self.settings["deterministic"]:
            for request_id, request in self.sent.items():
                got = self.tokens.get(request_id, [])
                assert got == answer(tuple(request.token_ids), **self.settings)[: len(got)]


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = hypothesis_settings(max_examples=12, stateful_step_count=20, deadline=None)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_s(policy: Policy, recompute: Recompute) -> tuple[float, float]:
    """Play the mix through a roster; return the seconds that hits saved, and the share of pages hit.

    Four applications with system prompts of 600 to 1,500 tokens, a question a second between them,
    among one-off prompts of 400 to 3,000 tokens, twice as many; the pool has room for 6,000 tokens. A
    prompt token takes 1 ms.
    """
    clock, dice = Clock(), random.Random(5)
    pool = PagePool(layers=1, pages=375, page_size=16, kv_heads=1, head_dim=1, dtype=torch.float32)
    cache = PrefixCache(pool, b"", policy, clock)
    target = Roster(
        pool,
        step_tokens=512,
        max_running=4,
        itl_slo_s=0.0,
        whole_chunks=False,
        cache=cache,
        recompute=recompute,
    )
    target.cost.learn(1000, 0, 1.0)
    systems = [[dice.randrange(1000) for _ in range(length)] for length in (600, 900, 1200, 1500)]
    for number in range(400):
        if dice.random() < 1 / 3:
            prompt = dice.choice(systems) + [dice.randrange(1000) for _ in range(dice.randint(20, 120))]
        else:
            prompt = [dice.randrange(1000) for _ in range(dice.randint(400, 3000))]
        request = submit(f"r{number}", prompt, max_tokens=32)
        target.add(Sequence(request, clock.now, list(prompt), len(prompt)))
        while target.everyone:
            chunks = target.plan(clock.now)
            for chunk in chunks:
                emits = chunk.emits
                chunk.sequence.computed += chunk.count
                if emits:
                    chunk.sequence.tokens.append(0)
            target.keep(chunks)
            target.check()
            for chunk in chunks:
                if chunk.sequence.emitted == 32:
                    target.remove(chunk.sequence)
            clock.now += 0.01
    counters = cache.counters
    return target.saved_s, counters.hits / (counters.hits + counters.misses)


def test_cost_saves_more_than_lru_on_shared_and_one_off_prompts() -> None:
    recompute = Recompute(16, growth=3e-4)
    lru, _ = saved_s(Lru(), recompute)
    cost, _ = saved_s(Cost(recompute), recompute)
    assert cost > 1.3 * lru > 0


def test_a_page_is_worth_its_depth_its_hits_and_its_youth() -> None:
    cost = Cost(Recompute(16, growth=3e-4))
    page = cost.rank(10, Use(1000.0, hits=2.0))
    assert cost.rank(100, Use(1000.0, hits=2.0)) > page
    assert cost.rank(10, Use(1000.0, hits=3.0)) > page
    assert cost.rank(10, Use(1001.0, hits=2.0)) > page
    assert cost.rank(10, Use(1600.0, hits=0.0)) < page < cost.rank(10, Use(4000.0, hits=0.0))


def test_a_window_bounds_what_depth_costs() -> None:
    recompute = Recompute.of(replace(CONFIG, sliding_window=32), PAGE)
    assert recompute.tokens(2) < recompute.tokens(20) == recompute.tokens(200)
    assert Recompute.of(CONFIG, PAGE).tokens(200) > 2 * recompute.tokens(200)
