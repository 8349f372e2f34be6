"""Tokens that blocks leave out: who is chosen, and that nothing sees the dead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core import Engine
from engine.kv.drop import SINKS, DropPolicy, entropy_of
from engine.kv.pages import BLOCK_PAGES
from engine.kv.tier_policy import PRESETS, TierPolicy
from engine.settings import EngineSettings
from tests.engine.kv.test_prefix import MODEL, PAGE, prompt_of, run, submit
from tests.engine.kv.test_tiers import push_out

#: Drops two thirds of any prompt but for its first and last tokens.
POLICY = DropPolicy(most=0.67, window=12, around=0, short=1, long=2, spread=3.0, close=2.0)


def engine(**changes: object) -> Engine:
    values = {"kv_tokens": 512, "page_size": PAGE, "signal_budget": 0.0, "kv_host_mb": 1, "kv_drop": 0.5}
    target = Engine(MODEL, EngineSettings(**(values | changes)))
    if target.tiers is not None and target.tiers.drop is not None:
        target.tiers.drop = POLICY
        target.tiers.storing.policy = TierPolicy(disk_age_s=0.0, copy_all=True)
    return target


def test_the_longer_and_the_closer_the_more_is_dropped() -> None:
    policy = DropPolicy(most=0.5)
    assert policy.share(256, 0.0) == policy.share(9, 0.0) == policy.share(4096, 0.8) == 0.0
    assert policy.share(2048, 0.6) == policy.share(99999, 0.1) == 0.5
    assert 0 < policy.share(500, 0.7) < policy.share(1000, 0.7) < policy.share(1000, 0.65) < 0.5


def test_entropy_is_0_for_one_and_1_for_all() -> None:
    one, all_ = np.zeros(50, np.float32), np.full(50, 0.02, np.float32)
    one[7] = 1
    assert entropy_of(one) == 0
    assert entropy_of(all_) == pytest.approx(1)
    assert entropy_of(all_[:25] * 2) == pytest.approx(1)


def test_those_with_the_most_mass_stay_and_the_first_and_last() -> None:
    mass = np.random.default_rng(1).random(100).astype(np.float32)
    mass *= 20 / mass.sum()
    judgement = POLICY.judge(mass)
    assert judgement is not None
    keep = judgement.keep
    assert keep.sum() == 33
    assert keep[:SINKS].all() and keep[-12:].all()
    assert mass[SINKS:-12][keep[SINKS:-12]].min() > mass[~keep].max()
    assert POLICY.judge(mass / 20) is None  # one query


def test_neighbours_of_what_is_looked_at_stay() -> None:
    mass = np.full(100, 0.1, np.float32)
    mass[50] = 5
    judgement = replace(POLICY, around=3).judge(mass)
    assert judgement is not None
    assert judgement.keep[47:54].all()
    assert judgement.keep.sum() == 33


def test_no_more_is_dropped_than_there_is_to_drop() -> None:
    for count, dropped in ((14, 0), (20, 4)):
        judgement = replace(POLICY, most=0.9).judge(np.ones(count, np.float32))
        assert judgement is not None
        assert (~judgement.keep).sum() == dropped


@pytest.mark.parametrize("disk", [False, True])
def test_what_comes_back_has_lost_tokens_and_is_stored_again_as_it_is(tmp_path: Path, disk: bool) -> None:
    target, prompt = engine(kv_disk_dir=tmp_path / "kv" if disk else None), prompt_of(100)
    run(target, submit("a", prompt, max_tokens=1))
    push_out(target)
    assert target.tiers is not None
    host = target.tiers.tiers[0].store
    blocks = 100 // (PAGE * BLOCK_PAGES)
    stats = target.tiers.stats()[0]
    assert stats.dropped_tokens == 67 and stats.kept_tokens == blocks * PAGE * BLOCK_PAGES - 67
    assert stats.bytes_used < 0.6 * blocks * target.tiers.layout.size
    if disk:
        while host.evict():
            pass
        assert target.tiers.tiers[1].store.flush()
        assert target.tiers.stats()[1].dropped_tokens == 67
    _, ends = run(target, submit("b", prompt, max_tokens=1))
    assert ends["b"].tier_tokens == {"disk" if disk else "host": 96}
    dead = target.pool.dead.copy()
    assert dead.sum() == 67
    entries = target.roster.cache.entries()
    lost = np.concatenate([target.pool.dead[entry.page] for entry in sorted(entries, key=lambda e: e.depth)])
    assert not lost[:SINKS].any() and not lost[88:].any()
    _, ends = run(target, submit("c", prompt, max_tokens=1))  # from the pool, dead slots and all
    assert ends["c"].tier_tokens == {"device": 99}
    assert (target.pool.dead == dead).all()
    while host.evict():
        pass
    push_out(target)
    assert not target.pool.dead.any()
    _, ends = run(target, submit("d", prompt, max_tokens=1))
    assert target.pool.dead.sum() == 67
    target.close()


def test_siblings_and_longer_prompts_share_pages_with_dead_slots() -> None:
    target, prompt = engine(), prompt_of(100)
    run(target, submit("a", prompt, max_tokens=1))
    push_out(target)
    pair = [submit("b", [*prompt, 5, 6, 7], choice, max_tokens=6) for choice in (0, 1)]
    tokens, ends = run(target, *pair)
    assert ends["b"].tier_tokens == {"host": 96}
    assert target.pool.dead.sum() == 67
    again, _ = run(target, submit("c", [*prompt, 5, 6, 7], max_tokens=6))
    assert again["c"] == tokens["b"]


def test_a_copy_of_a_page_keeps_its_dead_slots() -> None:
    target, prompt = engine(), prompt_of(100)
    run(target, submit("a", prompt, max_tokens=1))
    push_out(target)
    for request_id in "bc":
        target.submit(submit(request_id, prompt, max_tokens=9))
    for _ in range(6):
        target.step()
    victim = target.roster.running[0]
    before = target.pool.dead[victim.pages].copy()
    assert before.any()
    assert target.roster.seclude(victim)
    assert (target.pool.dead[victim.pages] == before).all()
    target.check()
    run(target)
    target.close()


def test_what_the_cache_does_not_keep_is_not_scored_and_nothing_is_without_the_setting() -> None:
    for changes, salt in (({}, b""), ({"kv_drop": 0.0}, b"1" * 16)):
        target = engine(**changes)
        run(target, submit("a", prompt_of(100), salt=salt))
        assert all(entry.keep is None for entry in target.roster.cache.entries())


def test_a_prompt_in_chunks_is_judged_as_one_at_once() -> None:
    kept = []
    for step_tokens in (200, 30, 9, 95):  # the last leaves one token alone
        target = engine(step_tokens=step_tokens)
        run(target, submit("a", prompt_of(96), max_tokens=1))
        entries = sorted(target.roster.cache.entries(), key=lambda entry: entry.depth)
        kept.append(np.concatenate([entry.keep for entry in entries if entry.keep is not None]))
    assert (kept[0] == kept[1]).all() and (kept[0] == kept[2]).all()
    assert kept[3].shape == kept[0].shape


def test_presets_of_the_policy() -> None:
    assert PRESETS["age"].to_disk(0.6, 0.99)
    assert [PRESETS["entropy"].to_disk(0.6, entropy) for entropy in (None, 0.29, 0.31)] == [True, True, False]
