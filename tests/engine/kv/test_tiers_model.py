"""The real model: a long prompt from each tier, its first tokens and what they cost."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.text import Text
from engine.core import Engine, load_engine
from engine.kv import names
from engine.messages import Finish, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.settings import EngineSettings

TOKENS = 1000
#: Of the first token's surprisal in nats, against the prompt computed at once.
TOLERANCE = 0.2


def answer(target: Engine, prompt: list[int]) -> tuple[Finish, list[int], float, float]:
    """The end, the tokens, the first token's surprisal, the processor's seconds to it."""
    began, used = time.process_time(), 0.0
    target.submit(
        Submit(
            meta=RequestMeta(request_id="a"),
            token_ids=prompt,
            params=SamplingParams(max_tokens=4, ignore_eos=True),
            cache_salt=b"s" * 16,
        )
    )
    tokens: list[int] = []
    surprisal: list[float] = []
    while target.has_work:
        output = target.step()
        if not tokens and output.request_ids:
            used = time.process_time() - began
        tokens += np.frombuffer(output.token_ids, np.int32).tolist()
        surprisal += np.frombuffer(output.signals, np.float32).reshape(-1, 7)[:, 0].tolist()
    target.check()
    (end,) = output.finished
    return end, tokens, surprisal[0], used


def push_out(target: Engine) -> None:
    """Have the pool give up all that is idle."""
    cache = target.roster.cache
    assert target.tiers is not None
    target.tiers.begin_step(decoding=False)
    target.tiers.step.limit = 60.0
    cache.release(cache.take(target.pool.free + cache.idle))


@pytest.mark.model
def test_a_long_prompt_from_every_tier(smollm: Path, tmp_path: Path, capsys) -> None:
    settings = EngineSettings(
        model=str(smollm), kv_tokens=4096, kv_disk_dir=tmp_path / "kv", kv_deadline_s=60.0, signal_budget=0.0
    )
    target = load_engine(settings)
    prompt = Text.read(load_tokenizer(smollm)).prompt(TOKENS, 0)
    answer(target, prompt[500:])  # the first steps are the slowest
    cold, cold_tokens, surprisal, used = answer(target, prompt)
    found = [("cold", cold, cold_tokens, surprisal, used), ("device", *answer(target, prompt))]
    push_out(target)
    found.append(("host", *answer(target, prompt)))
    push_out(target)
    assert target.tiers is not None
    host, disk = target.tiers.tiers
    time.sleep(0.6)  # what was wanted just now does not go to disk
    while host.store.evict():
        pass
        assert disk.store.flush(30.0)  # its queue is shorter than what is evicted at once
    found.append(("disk", *answer(target, prompt)))
    target.close()
    target = Engine(target.model, settings, source=names.source_of(smollm))
    assert target.tiers is not None
    assert target.tiers.tiers[1].store.flush(30.0)
    found.append(("restart", *answer(target, prompt)))
    target.close()
    with capsys.disabled():
        for name, end, tokens, value, used in found:
            print(
                f"\n{name}: {end.tier_tokens} to first token {end.prefill_s * 1000:.0f} ms, "
                f"processor {used * 1000:.0f} ms, "
                f"surprisal {value:.4f} ({value - surprisal:+.4f}), tokens {tokens}",
                end="",
            )
    for name, end, tokens, value, _ in found:
        tier = {"cold": None, "restart": "disk"}.get(name, name)
        count = 992 if tier == "device" else 960
        assert end.tier_tokens == ({} if tier is None else {tier: count})
        assert tokens == cold_tokens
        assert abs(value - surprisal) < TOLERANCE
