"""Nobody can tell from the time to a first token what another tenant has asked.

Each trial: one tenant asks a prompt that nobody has asked before; then, on an idle server, another asks it
too, or asks a prompt of the same length that is new to both. Which of them is drawn at random for each trial,
so that whatever drifts (what the pool holds, what is evicted, the machine) drifts for both alike.
"""

from __future__ import annotations

import random
import time

from engine.core import Engine
from engine.kv.tier_policy import TierPolicy
from engine.messages import StepOutput
from engine.settings import EngineSettings
from tests.engine.kv.test_prefix import CONFIG, MODEL, ONE, PAGE, TWO, submit

LENGTH = 100  # tokens of a prompt


def ask(engine: Engine, request_id: str, prompt: list[int], salt: bytes) -> tuple[float, list[StepOutput]]:
    """Return the seconds to the first token, and all steps to the answer's end."""
    began = time.perf_counter()
    engine.submit(submit(request_id, prompt, salt=salt, max_tokens=2))
    steps = [engine.step()]
    while not steps[-1].request_ids:
        steps.append(engine.step())
    first_s = time.perf_counter() - began
    while engine.has_work:
        steps.append(engine.step())
    return first_s, steps


def auroc(positive: list[float], negative: list[float]) -> float:
    """Chance that one of `positive` is smaller than one of `negative`, ties by half."""
    ranked = sorted([(value, 1) for value in positive] + [(value, 0) for value in negative])
    wins = seen = 0
    for _, is_positive in reversed(ranked):
        seen += not is_positive
        wins += seen * is_positive
    return wins / (len(positive) * len(negative))


def trials(count: int, salts: tuple[bytes, bytes]) -> tuple[float, Engine]:
    """Return the AUROC of `count` trials of the second tenant, of times by whether the first had asked."""
    settings = EngineSettings(
        kv_tokens=1024, page_size=PAGE, max_running=4, signal_budget=0.0, kv_host_mb=1, kv_deadline_s=60.0
    )
    engine = Engine(MODEL, settings, source=b"weights")
    assert engine.tiers is not None
    engine.tiers.storing.policy = TierPolicy(copy_all=True)
    draws = random.Random(7)
    times: dict[bool, list[float]] = {True: [], False: []}
    for trial in range(count):
        first, other = ([draws.randrange(1, CONFIG.vocab) for _ in range(LENGTH)] for _ in range(2))
        known = draws.random() < 0.5
        ask(engine, f"{trial}a", first, salts[0])
        seconds, steps = ask(engine, f"{trial}b", first if known else other, salts[1])
        times[known].append(seconds)
        computed = sum(step.prefill_tokens for step in steps)
        cached = steps[-1].finished[0].cached_tokens
        if salts[0] != salts[1]:
            assert (computed, cached) == (LENGTH, 0), "what was asked by another tenant was not computed"
    engine.check()
    return auroc(times[True], times[False]), engine


def test_the_time_to_a_first_token_does_not_tell_what_another_tenant_asked() -> None:
    """Of chance alone 2,000 trials have a standard deviation of 0.013. Most find pool and host full."""
    found, engine = trials(2000, (ONE, TWO))
    assert engine.stats().prefix_evictions > 1000
    assert engine.stats().prefix_hits == 0
    assert engine.tiers is not None
    assert engine.tiers.tiers[0].store.counters.evictions > 1000
    assert 0.45 <= found <= 0.55


def test_within_a_tenant_it_does() -> None:
    """So the measurement sees what there is to see."""
    found, _ = trials(150, (ONE, ONE))
    assert found > 0.7


def test_the_measure_itself() -> None:
    assert auroc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auroc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auroc([1.0, 4.0], [2.0, 3.0]) == 0.5
