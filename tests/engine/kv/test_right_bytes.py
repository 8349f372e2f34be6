"""Many requests at once, a pool, a host and a disk that are all too small, and faults: whose bytes were read?

Every answer is compared with that of an engine without caches. As long as the tokens are the same, what the
model thought of them must be too, within what 8 bits cost; where they part, the engine without caches must
have been about to say the other one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from chaos.model_hook import ModelFaults
from engine.core import Engine
from engine.kv.host import HostStore
from engine.messages import TOKEN_SIGNALS, AttachFault, Submit
from engine.settings import EngineSettings
from tests.engine.kv.test_prefix import MODEL, ONE, PAGE, TWO, submit
from tests.engine.kv.test_prefix import engine as plain
from tests.engine.kv.test_tiers_machine import FAULTS, tiers_of

REQUESTS, AT_ONCE = 400, 8
#: Nats between what a token surprised with and without caches.
TOLERANCE = 0.5
SURPRISAL = TOKEN_SIGNALS.index("surprisal")


@dataclass
class Answer:
    """Tokens, how each surprised (nats), and the log probabilities of the 20 most likely in its place."""

    tokens: list[int] = field(default_factory=list)
    surprisals: list[float] = field(default_factory=list)
    likely: list[dict[int, float]] = field(default_factory=list)


def requests() -> list[Submit]:
    """Prompts with common beginnings, of two tenants."""
    source = random.Random(5)
    heads = [[source.randrange(1, 61) for _ in range(length)] for length in (60, 80, 100, 120)]
    made = []
    for number in range(REQUESTS):
        head = source.choice(heads)
        tail = [source.randrange(1, 61) for _ in range(source.randrange(1, 20))]
        prompt = [*head[: source.randrange(40, len(head))], *tail]
        salt = source.choice([ONE, TWO])
        made.append(submit(f"q{number}", prompt, salt=salt, max_tokens=6, top_logprobs=20))
    return made


def answers(engine: Engine, wanted: list[Submit], hook: ModelFaults | None = None) -> dict[str, Answer]:
    """Return all answers; with a `hook`, other faults are in force every few steps."""
    source, waiting, found = random.Random(6), list(wanted), {}
    steps = 0
    while waiting or engine.has_work:
        while waiting and len(engine.roster.everyone) < AT_ONCE:
            engine.submit(waiting.pop(0))
        steps += 1
        if hook is not None and steps % 7 == 0:
            hook.detach(None)
            for kind in source.sample([*FAULTS], 2):
                fault = AttachFault(fault_id=kind, kind=kind, params=FAULTS[kind], seed=steps, ttl_s=60.0)
                hook.attach(fault)
        output = engine.step()
        tokens = np.frombuffer(output.token_ids, "<i4")
        signals = np.frombuffer(output.signals, "<f4").reshape(-1, len(TOKEN_SIGNALS))
        for row, ids, logprobs in zip(output.logprob_rows, output.logprob_ids, output.logprobs, strict=True):
            answer = found.setdefault(output.request_ids[row], Answer())
            answer.tokens.append(int(tokens[row]))
            answer.surprisals.append(float(signals[row, SURPRISAL]))
            answer.likely.append(dict(zip(ids, logprobs, strict=True)))
    engine.check()
    return found


def distance(got: Answer, right: Answer) -> float:
    """Return by how many nats an answer is off at most, up to where it takes another way."""
    most = 0.0
    for place, (token, expected) in enumerate(zip(got.tokens, right.tokens, strict=True)):
        if token != expected:
            likely = right.likely[place]
            return max(most, likely[expected] - likely.get(token, -np.inf))
        most = max(most, abs(got.surprisals[place] - right.surprisals[place]))
    return most


@pytest.fixture(scope="module")
def right() -> dict[str, Answer]:
    """The answers of an engine without caches, each computed alone."""
    engine = plain(prefix_cache=False)
    return {one.meta.request_id: answers(engine, [one])[one.meta.request_id] for one in requests()}


def distances(folder: Path, right: dict[str, Answer], faults: bool, blind: bool = False) -> list[float]:
    """Return how far each answer is off. `blind`: the host's checksums are all the same."""
    hook = ModelFaults()
    settings = EngineSettings(kv_tokens=256, page_size=PAGE, max_running=4, signal_budget=0.0, kv_host_mb=0)
    engine = Engine(MODEL, settings, hook)
    tiers = tiers_of(engine, folder, hook.files(), deadline_s=0.2, host_blocks=24)
    assert isinstance(tiers.host, HostStore)
    for tier in tiers.tiers:
        tier.pace.learn = lambda _: None  # never too slow to be tried
    if blind:
        tiers.host._checksum = lambda _: 0
    got = answers(engine, requests(), hook if faults else None)
    hook.detach(None)
    stats = {tier.tier: tier for tier in tiers.stats()}
    assert stats["host"].hits > 100
    assert stats["disk"].hits > 10
    if faults and not blind:
        assert stats["host"].corrupt > 5
        assert stats["disk"].corrupt > 5
        assert stats["disk"].errors > 0
    engine.close()
    assert got.keys() == right.keys()
    return [distance(got[name], right[name]) for name in right]


@pytest.mark.parametrize("faults", [False, True])
def test_every_answer_is_what_is_computed_without_caches(
    tmp_path: Path, right: dict[str, Answer], faults: bool
) -> None:
    assert max(distances(tmp_path / "kv", right, faults)) < TOLERANCE


def test_without_checksums_it_would_be_seen(tmp_path: Path, right: dict[str, Answer]) -> None:
    """So the comparison sees bytes that are wrong."""
    assert max(distances(tmp_path / "kv", right, faults=True, blind=True)) > 2 * TOLERANCE
