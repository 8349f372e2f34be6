"""Requests to an engine in this process, and blocks moved from tier to tier on purpose."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import Engine, load_engine
from engine.kv import names
from engine.kv.disk import DiskStore
from engine.kv.host import HostStore
from engine.messages import RequestMeta, SamplingParams, Submit, TierStats
from engine.models import store
from engine.models.step import Model
from engine.settings import EngineSettings

SALT = b"one tenant's own"
_PAGES_AT_ONCE = 64  # given up in one step, so that all of them can be packed
_FLUSH_S = 60.0


@dataclass
class Answer:
    """One request: when it and its tokens came, and where its prompt was found. Times are of one clock."""

    prompt: list[int]
    asked: float
    came: list[float] = field(default_factory=list)  # when each token did
    tokens: list[int] = field(default_factory=list)
    tier_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.came[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each token to the next."""
        return [after - before for before, after in pairwise(self.came)]


@dataclass(frozen=True)
class Engines:
    """One model, and an engine of it for each way of keeping keys and values. Signals are off."""

    model: Model
    source: bytes
    about: dict[str, Any]

    @classmethod
    def load(cls, threads: int) -> Engines:
        """Load the default model; `threads` compute with it."""
        settings = EngineSettings(threads=threads, signal_budget=0.0, prefix_cache=False)
        first = load_engine(settings)
        ready = first.ready()
        about = {"model": ready.model, "backend": ready.backend, "dtype": ready.dtype, "threads": threads}
        path = store.resolve(settings.model, settings.model_cache)
        return cls(first.model, names.source_of(path), about)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in the page pool."""
        config = self.model.config
        return 2 * config.layers * config.kv_heads * config.head_dim * self.model.dtype.itemsize

    def engine(self, **settings: Any) -> Driver:
        """Return an engine with these settings; without any it has a prefix cache and the host tier."""
        wanted = EngineSettings(threads=self.about["threads"], signal_budget=0.0, **settings)
        return Driver(Engine(self.model, wanted, source=self.source))


class Driver:
    """An engine and the requests that are open in it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: dict[str, Answer] = {}
        self.found_tokens = 0  # of all prompts, in any tier
        self._requests = 0

    def submit(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Ask for `tokens` tokens after `prompt`, greedily."""
        self._requests += 1
        request_id = f"bench-{self._requests}"
        answer = Answer(list(prompt), time.perf_counter())
        self.engine.submit(
            Submit(
                meta=RequestMeta(request_id=request_id),
                token_ids=answer.prompt,
                params=SamplingParams(max_tokens=tokens, ignore_eos=True),
                cache_salt=SALT,
            )
        )
        self.open[request_id] = answer
        return answer

    def step(self) -> list[Answer]:
        """Compute a step; return the answers that it ended."""
        output = self.engine.step()
        now = time.perf_counter()
        tokens = np.frombuffer(output.token_ids, np.int32).tolist()
        for request_id, token in zip(output.request_ids, tokens, strict=True):
            answer = self.open[request_id]
            answer.came.append(now)
            answer.tokens.append(token)
        ended = []
        for finish in output.finished:
            answer = self.open.pop(finish.request_id)
            answer.tier_tokens = finish.tier_tokens
            self.found_tokens += finish.cached_tokens
            ended.append(answer)
        return ended

    def ask(self, prompt: Sequence[int], tokens: int = 2) -> Answer:
        """Return the answer to a prompt that is alone in the engine."""
        answer = self.submit(prompt, tokens)
        while self.engine.has_work:
            self.step()
        return answer

    @property
    def host(self) -> HostStore | None:
        """The host tier's store."""
        stores = [tier.store for tier in self.engine.tiers.tiers] if self.engine.tiers else []
        return next((found for found in stores if isinstance(found, HostStore)), None)

    @property
    def disk(self) -> DiskStore | None:
        """The disk tier's store."""
        stores = [tier.store for tier in self.engine.tiers.tiers] if self.engine.tiers else []
        return next((found for found in stores if isinstance(found, DiskStore)), None)

    def push_to_host(self) -> None:
        """Have the page pool give up all that is idle, each block packed on its way out."""
        cache, tiers = self.engine.roster.cache, self.engine.tiers
        assert tiers is not None
        while cache.idle:
            tiers.begin_step(decoding=False)
            cache.release(cache.take(cache.pool.free + min(cache.idle, _PAGES_AT_ONCE)))

    def push_to_disk(self) -> None:
        """Have the pool and the host give up all they hold, and the disk write it."""
        self.push_to_host()
        host, disk = self.host, self.disk
        assert host is not None and disk is not None
        time.sleep(0.6)  # what was wanted just now does not go to disk
        while host.evict():
            if not disk.flush(_FLUSH_S):
                raise TimeoutError(f"{disk.folder} took more than {_FLUSH_S:.0f} s for one block")

    def stats(self) -> dict[str, TierStats]:
        """Figures of each tier below the pool."""
        return {found.tier: found for found in self.engine.tiers.stats()} if self.engine.tiers else {}

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def background_s() -> float:
    """Processor seconds of the threads that read and write the disk, so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("quaver-kv-") and thread.ident is not None
    ]
    return sum(time.clock_gettime(clock) for clock in clocks)


def forget(files: Sequence[Path]) -> None:
    """Have the system drop what it holds in memory of `files`, where it can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
