"""Random work on tiny tiers with faults: the books stay right, and so do the values of what comes back."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Engine
from engine.kv.disk import DiskStore
from engine.kv.host import HostStore
from engine.kv.int8 import BlockLayout
from engine.kv.policy import Recompute
from engine.kv.tier_policy import TierPolicy
from engine.kv.tiers import BLOCK_PAGES, Loading, Tiers
from engine.messages import Finish, Submit
from engine.settings import EngineSettings
from tests.engine.kv.test_disk_faults import FaultyFiles
from tests.engine.kv.test_prefix import (
    CONFIG,
    MODEL,
    ONE,
    PAGE,
    TWO,
    Handed,
    computed,
    prompt_of,
    submit,
    take,
)

LAYOUT = BlockLayout(
    layers=CONFIG.layers,
    tokens=BLOCK_PAGES * PAGE,
    kv_heads=CONFIG.kv_heads,
    head_dim=CONFIG.head_dim,
)
HOST_BLOCKS, DISK_BLOCKS, FILE = 6, 24, 4096
DEADLINE_S = 0.05
#: Of values of about 1, most of them computed after others that were in 8 bits: root of the mean square of
#: the error, of a page. Other tokens' pages are off by more than 0.5.
TOLERANCE = 0.1


def tiers_of(target: Engine, folder: Path, files: FaultyFiles, deadline_s: float = DEADLINE_S) -> Tiers:
    """Give an engine without tiers a host of a few blocks, and a disk of a few more."""
    disk = DiskStore(
        folder,
        layout_bytes=LAYOUT.size,
        fingerprint=b"random model",
        capacity_mb=1,
        deadline_s=deadline_s,
        pause_s=0.001,
        files=files,
    )
    disk._index.capacity_bytes = DISK_BLOCKS * FILE
    tiers = Tiers(
        target.roster.cache,
        HostStore(capacity_bytes=HOST_BLOCKS * LAYOUT.size, block_bytes=LAYOUT.size),
        disk,
        LAYOUT,
        recompute=Recompute(PAGE),
        deadline_s=deadline_s,
        policy=TierPolicy(disk_age_s=0.0),
    )
    target.tiers = target.roster.tiers = tiers
    return tiers


class Loaded(Handed):
    """Notes what is loaded too: all pages up to there, as they then are."""

    def __init__(self, target: Engine, tiers: Tiers) -> None:
        super().__init__(target)
        self.count = 0
        advance = tiers.advance

        def note(loading: Loading, pages: list[int], held: int) -> int:
            now = advance(loading, pages, held)
            if now > held:
                self.count += 1
                reader = next(s for s in target.roster.running if s.loading is loading)
                own = pages[: now // PAGE]
                values = torch.stack([target.pool.keys[:, own], target.pool.values[:, own]])
                self.found.append((reader.tokens[:now], values))
            return now

        tiers.advance = note  # type: ignore[method-assign]


class TiersMachine(RuleBasedStateMachine):
    """Prompts with common beginnings; a pool, a host and a disk that are each too small for them."""

    @initialize(step_tokens=st.sampled_from([24, 60]))
    def begin(self, step_tokens: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.files = FaultyFiles()
        self.settings = {"step_tokens": step_tokens}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.sent: dict[str, Submit] = {}
        self.past: list[list[int]] = [prompt_of(70, 1), prompt_of(100, 2)]
        self.start()

    def start(self) -> None:
        values: dict[str, Any] = {"kv_tokens": 256, "page_size": PAGE, "max_running": 3, "kv_host_mb": 0}
        self.engine = Engine(MODEL, EngineSettings(**values, signal_budget=0.0, **self.settings))
        self.tiers = tiers_of(self.engine, Path(self.folder.name) / "kv", self.files)
        self.handed = Loaded(self.engine, self.tiers)

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(1, 60), max_size=30),
        salt=st.sampled_from([ONE, ONE, ONE, TWO, b""]),
        choices=st.sampled_from([1, 1, 2]),
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
            data.draw(st.sampled_from(list(self.sent))), data.draw(st.none() | st.integers(0, 1))
        )

    @rule(share=st.sampled_from([0.3, 1.0]))
    def give_up_idle_pages(self, share: float) -> None:
        cache = self.engine.roster.cache
        self.tiers.begin_step(decoding=False)
        cache.release(cache.take(self.engine.pool.free + int(share * cache.idle)))

    @rule()
    def empty_the_host(self) -> None:
        while self.tiers.host.evict():
            pass
        if not self.files.hang and not self.files.slow_s:
            self.tiers.tiers[1].store.flush()

    @rule(
        fault=st.sampled_from(["none", "none", "read", "write", "create", "hang", "slow", "torn", "flipped"])
    )
    def disk_is(self, fault: str) -> None:
        files = self.files
        files.go.set()
        files.hang.clear()
        files.go.clear()
        files.fail = {fault: errno.EIO} if fault in ("read", "write", "create") else {}
        files.torn, files.flipped = fault == "torn", fault == "flipped"
        files.slow_s = 0.02 if fault == "slow" else 0.0
        if fault == "hang":
            files.hang["read"] = 2

    @rule()
    def taint(self) -> None:
        """A fault acts on a page: nobody else reads it, and it never goes down."""
        victim = next((s for s in self.engine.roster.running if s.computed), None)
        if victim is not None:
            page = victim.pages[(victim.computed - 1) // PAGE]
            self.engine.roster.taint([page])
            self.engine.pool.keys[:, page] += 50.0

    @rule()
    def restart(self) -> None:
        self.disk_is("none")
        self.end()
        self.start()

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
            if tokens:
                error = values - computed(tuple(tokens), **self.settings)
                assert error.square().mean((1, 3, 4, 5)).sqrt().max() < TOLERANCE
        for request_id, end in self.ends.items():
            whole = [*self.sent[request_id].token_ids, *self.tokens.get(request_id, [])]
            if end.reason == "length" and whole not in self.past and len(whole) < 120:
                self.past.append(whole)

    def end(self) -> None:
        while self.engine.has_work:
            take(self.engine.step(), self.tokens, self.ends)
            self.right()
        assert self.ends.keys() == self.sent.keys()
        host, disk = self.tiers.host, self.tiers.tiers[1].store
        assert not any(entry.pins for entry in host._entries.values())
        assert not any(entry.pins for entry in disk._index.entries.values())
        self.engine.close()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.disk_is("none")
            self.end()
            self.folder.cleanup()


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = hypothesis_settings(max_examples=15, stateful_step_count=25, deadline=None)
