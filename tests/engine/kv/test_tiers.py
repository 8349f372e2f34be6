"""The tiers below the page pool, over an engine on a small random model."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from engine.core import Engine
from engine.kv.figures import Figures, count
from engine.kv.pages import BLOCK_PAGES
from engine.kv.tier_policy import PRESETS, Pace, TierPolicy
from engine.messages import Finish
from engine.settings import EngineSettings
from tests.engine.kv.test_disk_faults import FaultyFiles
from tests.engine.kv.test_prefix import MODEL, PAGE, TWO, prompt_of, run, submit
from tests.engine.kv.test_tiers_machine import tiers_of

DEADLINE_S = 1.5


def engine(**changes: object) -> Engine:
    """A pool of 64 pages, of which the longest prompts here take 25."""
    values = {
        "kv_tokens": 256,
        "page_size": PAGE,
        "max_running": 4,
        "signal_budget": 0.0,
        "kv_host_mb": 1,
        "kv_deadline_s": 60.0,
    }
    target = Engine(MODEL, EngineSettings(**(values | changes)), source=b"weights")
    if target.tiers is not None:
        target.tiers.storing.policy = TierPolicy(disk_age_s=0.0, copy_all=True)
    return target


def end_of(target: Engine, request_id: str, prompt: list[int], **params: object) -> Finish:
    return run(target, submit(request_id, prompt, **params))[1][request_id]


def push_out(target: Engine) -> None:
    """Have the pool give up all that is idle."""
    cache = target.roster.cache
    target.tiers.begin_step(decoding=False)
    target.tiers.step.limit = 60.0
    cache.release(cache.take(target.pool.free + cache.idle))


def test_what_the_pool_gave_up_comes_back_from_the_host() -> None:
    target, prompt = engine(), prompt_of(100)
    end_of(target, "a", prompt)
    assert end_of(target, "b", prompt).tier_tokens == {"device": 99}
    push_out(target)
    end = end_of(target, "c", prompt)
    assert end.tier_tokens == {"host": 96}
    assert end.cached_tokens == 96
    assert 0 < end.loading_s <= end.prefill_s
    (host,) = target.tiers.stats()
    assert (host.hits, host.stores, host.blocks, host.tokens) == (6, 6, 6, 96)
    assert host.saved_s > 0
    assert sum(host.load_counts) == sum(host.store_counts) == 6
    assert host.load_s > 0
    assert host.store_s > 0
    assert end_of(target, "d", prompt).tier_tokens == {"device": 99}
    push_out(target)
    assert end_of(target, "e", prompt, salt=TWO).tier_tokens == {}


def test_what_the_host_gave_up_comes_back_from_the_disk_and_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    target, prompt = engine(kv_disk_dir=folder), prompt_of(100)
    assert target.tiers is not None
    end_of(target, "a", prompt)
    push_out(target)
    host = target.tiers.tiers[0].store
    while host.evict():
        pass
    assert target.tiers.tiers[1].store.flush()
    assert end_of(target, "b", prompt).tier_tokens == {"disk": 96}
    host, disk = target.tiers.stats()
    assert (disk.stores, disk.hits, disk.promotions) == (6, 6, 0)
    assert (host.stores, host.promotions) == (12, 6)
    assert host.promoted_bytes == disk.loaded_bytes == disk.stored_bytes
    push_out(target)
    assert end_of(target, "c", prompt).tier_tokens == {"host": 96}
    target.close()
    target = engine(kv_disk_dir=folder)
    assert target.tiers.tiers[1].store.flush()
    assert end_of(target, "d", prompt).tier_tokens == {"disk": 96}
    target.close()


def on_disk(folder: Path, files: FaultyFiles, prompt: list[int]) -> Engine:
    """An engine whose disk alone has the first 96 tokens of `prompt`."""
    target = engine(kv_host_mb=0)
    tiers = tiers_of(target, folder, files, DEADLINE_S)
    end_of(target, "first", prompt)
    push_out(target)
    while tiers.host.evict():
        pass
    assert tiers.tiers[1].store.flush()
    return target


def test_a_stalled_disk_holds_up_nobody_else_and_its_prompt_until_the_deadline(tmp_path: Path) -> None:
    files, prompt = FaultyFiles(), prompt_of(100)
    target = on_disk(tmp_path / "kv", files, prompt)
    files.hang["read"] = 2
    began = time.monotonic()
    target.submit(submit("stalled", prompt))
    target.step()
    assert target.roster.running[0].loading is not None
    target.submit(submit("other", prompt_of(30, 9), max_tokens=1))
    output = target.step()
    assert output.request_ids == ["other"]
    _, ends = run(target)
    assert ends["stalled"].tier_tokens == {}
    assert ends["stalled"].completion_tokens == 4
    assert ends["stalled"].prefill_s >= DEADLINE_S
    assert target.tiers.tiers[1].pace.seconds >= DEADLINE_S
    assert target.tiers.stats()[1].late == 1
    assert target.tiers.stats()[1].lost_s >= DEADLINE_S
    assert target.tiers.stats()[1].saved_s == 0
    assert ends["stalled"].loading_s >= DEADLINE_S
    assert time.monotonic() - began < 20
    files.go.set()
    target.close()


@pytest.mark.parametrize("close", [False, True])
def test_who_leaves_while_loading_lets_go_of_everything(tmp_path: Path, close: bool) -> None:
    files, prompt = FaultyFiles(), prompt_of(100)
    target = on_disk(tmp_path / "kv", files, prompt)
    disk = target.tiers.tiers[1].store
    files.hang["read"] = 2
    target.submit(submit("gone", prompt))
    target.step()
    assert any(entry.pins for entry in disk._index.entries.values())
    files.go.set()
    if close:
        target.close()
    else:
        target.abort("gone")
    target.check()
    assert not target.tiers.loadings
    assert not any(entry.pins for entry in disk._index.entries.values())
    assert target.stats().pages_used == 0
    target.close()


def test_nothing_is_loaded_that_is_computed_sooner() -> None:
    target, prompt = engine(), prompt_of(100)
    end_of(target, "a", prompt)
    push_out(target)
    target.tiers.tiers[0].pace.seconds = 1000.0
    assert end_of(target, "b", prompt).tier_tokens == {}
    push_out(target)
    target.tiers.tiers[0].pace.seconds = 1e-9
    assert end_of(target, "c", prompt).tier_tokens == {"host": 96}


def test_the_last_token_of_whole_blocks_is_computed_and_no_other() -> None:
    target, prompt = engine(), prompt_of(96)
    cold, _ = run(target, submit("a", prompt))
    push_out(target)
    tokens, ends = run(target, submit("b", prompt))
    assert tokens["b"] == cold["a"]
    assert ends["b"].tier_tokens == {"host": 95}
    assert ends["b"].cached_tokens == 95


def test_what_has_come_is_taken_after_the_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = engine(kv_deadline_s=1e-6), prompt_of(100)
    end_of(target, "a", prompt)
    push_out(target)
    monkeypatch.setattr("engine.kv.step_time.ALONE_S", 1e-9)  # a block a step
    assert end_of(target, "b", prompt).tier_tokens == {"host": 96}
    assert target.tiers.tiers[0].late == 0


def test_the_pace_of_a_disk_is_that_of_its_reads_not_of_the_steps_between(tmp_path: Path) -> None:
    prompt = prompt_of(100)
    target = on_disk(tmp_path / "kv", FaultyFiles(), prompt)
    target.submit(submit("a", prompt))
    while target.has_work:
        target.step()
        time.sleep(0.1)
    assert target.tiers.stats()[1].hits == 6
    assert 0 < target.tiers.tiers[1].pace.seconds < 0.1
    target.close()


def test_what_is_there_to_the_middle_of_a_block_is_kept_as_it_is() -> None:
    target, prompt = engine(), prompt_of(100)
    end_of(target, "a", prompt)
    cache = target.roster.cache
    target.tiers.begin_step(decoding=False)
    target.tiers.step.limit = 60.0
    cache.release(cache.take(target.pool.free + cache.idle - 10))
    end = end_of(target, "b", prompt)
    assert end.tier_tokens == {"device": 40, "host": 56}


def test_a_step_with_decodes_packs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    target = engine()
    end_of(target, "a", prompt_of(100))
    cache, host = target.roster.cache, target.tiers.tiers[0].store
    monkeypatch.setattr("engine.kv.step_time.BESIDE_DECODES_S", 1e-9)
    target.tiers.begin_step(decoding=True)
    cache.release(cache.take(target.pool.free + cache.idle))
    assert host.counters.stores == 1


def test_idle_pages_are_copied_before_their_room_is_wanted() -> None:
    target = engine()
    run(target, submit("a", prompt_of(100)), submit("b", prompt_of(100, 7), max_tokens=1))
    assert target.tiers.tiers[0].store.counters.stores == 0
    end_of(target, "c", prompt_of(40, 3))  # beyond 85 % of the pool
    end_of(target, "d", [5, 5], max_tokens=6)
    assert target.stats().prefix_evictions == 0
    assert target.tiers.tiers[0].store.counters.stores > 0


def test_a_copy_that_went_to_the_disk_is_not_made_again(tmp_path: Path) -> None:
    target = engine(kv_disk_dir=tmp_path / "kv")
    run(target, submit("a", prompt_of(100)), submit("b", prompt_of(100, 7), max_tokens=1))
    end_of(target, "c", prompt_of(40, 3))  # beyond 85 % of the pool
    end_of(target, "d", [5, 5], max_tokens=6)
    ahead = target.tiers.host.counters.stores
    blocks = sum(e.depth % BLOCK_PAGES == BLOCK_PAGES - 1 for e in target.roster.cache.entries())
    assert 0 < ahead <= blocks
    while target.tiers.host.evict():
        pass
    assert target.tiers.disk.flush()
    push_out(target)
    assert target.tiers.disk.counters.stores == ahead
    assert target.tiers.host.counters.stores == blocks
    target.close()


def test_tainted_pages_never_go_down() -> None:
    target, prompt = engine(), prompt_of(100)
    target.submit(submit("a", prompt))
    target.step()
    target.roster.taint(target.roster.running[0].pages[5:6])
    run(target)
    push_out(target)
    assert target.tiers.tiers[0].store.counters.stores == 1


def test_tiers_are_off_in_deterministic_mode_and_told_now_and_then() -> None:
    assert engine(deterministic=True).tiers is None
    assert engine(prefix_cache=False).tiers is None
    assert engine(kv_host_mb=0).tiers is None
    target = engine()
    target.submit(submit("a", prompt_of(9)))
    told = [target.step() for _ in range(2)]
    assert [[tier.tier for tier in output.tiers] for output in told] == [["host"], []]
    assert [list(output.kv_ages) for output in told] == [["device", "host"], []]
    assert target.report() is None


def test_what_changes_between_steps_is_told_and_is_no_step() -> None:
    target, prompt = engine(), prompt_of(100)
    end_of(target, "a", prompt)
    push_out(target)
    target.figures = Figures(target.roster)
    told = target.report()
    assert told is not None
    assert told.duration_s == 0
    assert told.tiers == target.tiers.stats()
    assert told.kv_ages == {"device": [0] * 6, "host": [96, 0, 0, 0, 0, 0]}
    assert target.report() is None


def test_ages_are_counted_in_tokens_from_the_last_use(tmp_path: Path) -> None:
    assert count([0.5, 1.0, 59.9, 60.0, 7200.0], 16) == [16, 16, 16, 16, 0, 16]
    assert count([], 16) == [0] * 6
    folder, prompt = tmp_path / "kv", prompt_of(100)
    target = engine(kv_disk_dir=folder)
    end_of(target, "a", prompt)
    target.close()
    hour_ago = time.time() - 3601
    for file in folder.glob("*.kv"):
        os.utime(file, (hour_ago, hour_ago))
    target = engine(kv_disk_dir=folder)
    assert target.tiers.tiers[1].store.flush()
    assert target.figures.ages()["disk"] == [0, 0, 0, 0, 0, 96]
    assert end_of(target, "b", prompt).tier_tokens == {"disk": 96}
    assert target.tiers.tiers[1].store.ages()[0] < 60
    target.close()


def test_a_folder_that_cannot_be_used_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (engine(kv_disk_dir=tmp_path / "kv") for _ in range(2))
    assert "in use by another server" in caplog.text
    assert [tier.name for tier in second.tiers.tiers] == ["host"]
    assert second.tiers.policy()["preset"] == "own"
    second.tiers.storing.policy = PRESETS["entropy"]
    assert second.tiers.policy()["preset"] == "entropy"
    first.close()


@pytest.mark.parametrize("mb", [10**8, 10**15])
def test_more_memory_than_there_can_be_is_an_error_in_the_log(
    mb: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine(kv_host_mb=mb)
    assert f"QUAVER_KV_HOST_MB={mb}" in caplog.text
    assert target.tiers is None
    assert end_of(target, "a", prompt_of(100)).tier_tokens == {}


def test_policy() -> None:
    policy = TierPolicy(disk_entropy=0.3)
    assert [policy.to_disk(age) for age in (0.4, 0.6)] == [False, True]
    assert [policy.to_disk(0.6, entropy) for entropy in (0.2, 0.4)] == [True, False]
    assert not policy.to_disk(0.4, 0.2)
    assert [policy.short(share, was=False) for share in (0.84, 0.86)] == [False, True]
    assert [policy.short(share, was=True) for share in (0.79, 0.84)] == [False, True]


def test_a_pace_that_forbids_is_doubted() -> None:
    pace = Pace()
    assert pace.beats(0.001)
    pace.learn(1.0)
    assert pace.beats(0.0)
    refused = 0
    while not pace.beats(0.5):
        refused += 1
    assert 30 < refused < 40
    pace.learn(1.0)
    assert 0.5 < pace.seconds < 0.7


def test_two_who_want_the_same_blocks_load_each_once(tmp_path: Path) -> None:
    prompt = prompt_of(100)
    target = on_disk(tmp_path / "kv", FaultyFiles(), prompt)
    disk = target.tiers.tiers[1].store
    pages = target.roster.cache.counters
    _, ends = run(target, *(submit(name, [*prompt, number]) for number, name in enumerate("ab", 5)))
    assert disk.counters.hits == 6
    assert target.tiers.tiers[0].store.counters.hits == 0
    assert pages.hits == 0
    assert all(sum(ends[name].tier_tokens.values()) == 96 for name in "ab")
    assert ends["a"].tier_tokens.get("disk", 0) + ends["b"].tier_tokens.get("disk", 0) == 96


def test_who_waits_for_anothers_load_asks_when_that_one_leaves(tmp_path: Path) -> None:
    files, prompt = FaultyFiles(), prompt_of(100)
    target = on_disk(tmp_path / "kv", files, prompt)
    files.hang["read"] = 2
    for number, name in enumerate("ab", 5):
        target.submit(submit(name, [*prompt, number]))
    target.step()
    first, second = (sequence.loading for sequence in target.roster.running)
    assert first.blocks[0].load is not None and second.blocks[0].load is None
    target.abort("a")
    files.go.set()
    _, ends = run(target)
    assert ends["b"].tier_tokens == {"disk": 96}
    target.close()


def test_at_the_end_what_was_wanted_last_is_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = engine(kv_disk_dir=tmp_path / "kv"), [prompt_of(36, start) for start in (1, 9, 17)]
    for name, prompt in zip("abc", prompts, strict=True):
        end_of(target, name, prompt, max_tokens=1)
        push_out(target)
    end_of(target, "again", prompts[0], max_tokens=1)  # the pool has it, and the host, which it was from
    saved: list[bytes] = []
    disk = target.tiers.tiers[1].store
    reserve = disk.prepare_store
    monkeypatch.setattr(
        disk,
        "prepare_store",
        lambda name, tokens, salt, **how: saved.append(tokens) or reserve(name, tokens, salt, **how),
    )
    target.close()
    order = [np.frombuffer(tokens, "<i4").tolist() for tokens in dict.fromkeys(saved)]
    blocks = [[prompt[:16], prompt[16:32]] for prompt in prompts]
    assert order[:2] == blocks[0]
    assert order[2] in blocks[2] and order[3] in blocks[2]
    assert order[4] in blocks[1] and order[5] in blocks[1]
