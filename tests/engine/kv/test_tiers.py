"""The tiers below the page pool, over an engine on a small random model."""

from __future__ import annotations

from pathlib import Path

from engine.core import Engine
from engine.kv.tier_policy import TierPolicy
from engine.messages import Finish
from engine.settings import EngineSettings
from tests.engine.kv.test_prefix import MODEL, PAGE, TWO, prompt_of, run, submit

BLOCK = 4 * PAGE


def engine(**changes: object) -> Engine:
    """A pool of 64 pages, of which the longest prompts here take 25."""
    values = {"kv_tokens": 256, "page_size": PAGE, "max_running": 4, "signal_budget": 0.0, "kv_host_mb": 1}
    target = Engine(MODEL, EngineSettings(**(values | changes)), source=b"weights")
    if target.tiers is not None:
        target.tiers._policy = TierPolicy(disk_age_s=0.0)
    return target


def end_of(target: Engine, request_id: str, prompt: list[int], **params: object) -> Finish:
    return run(target, submit(request_id, prompt, **params))[1][request_id]


def push_out(target: Engine) -> None:
    """Have the pool give up all that is idle."""
    cache = target.roster.cache
    target.tiers.begin_step(decoding=False)
    target.tiers._limit_s = 60.0
    cache.release(cache.take(target.pool.free + cache.idle))


def test_what_the_pool_gave_up_comes_back_from_the_host() -> None:
    target, prompt = engine(), prompt_of(100)
    end_of(target, "a", prompt)
    assert end_of(target, "b", prompt).tier_tokens == {"device": 96}
    push_out(target)
    end = end_of(target, "c", prompt)
    assert end.tier_tokens == {"host": 96}
    assert end.cached_tokens == 96
    assert end_of(target, "d", prompt).tier_tokens == {"device": 96}
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
    push_out(target)
    assert end_of(target, "c", prompt).tier_tokens == {"host": 96}
    target.close()
    target = engine(kv_disk_dir=folder)
    assert target.tiers.tiers[1].store.flush()
    assert end_of(target, "d", prompt).tier_tokens == {"disk": 96}
    target.close()
