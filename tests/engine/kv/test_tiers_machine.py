"""Random work on tiny tiers with faults: the books stay right, and so do the values of what comes back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chaos.model_hook import ModelFaults
from engine.core import Engine
from engine.kv.disk import DiskStore
from engine.kv.disk_files import Files
from engine.kv.host import HostStore
from engine.kv.int8 import BlockLayout
from engine.kv.loading import Loading
from engine.kv.pages import BLOCK_PAGES
from engine.kv.policy import Recompute
from engine.kv.tier_policy import TierPolicy
from engine.kv.tiers import Tiers
from engine.messages import AttachFault, Finish, Submit
from engine.settings import EngineSettings
from tests.engine.kv.test_disk import bytes_of
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
#: As leases: a stall is longer than the deadline.
FAULTS: dict[str, dict[str, Any]] = {
    "host_flip": {"burst": 400, "share": 0.5},
    "disk_flip": {"burst": 16, "share": 0.5},
    "disk_torn": {"how": "zeros", "share": 0.5},
    "disk_stale": {"share": 0.7},
    "disk_io": {"share": 0.5},
    "disk_full": {},
    "disk_slow": {"seconds": 0.02},
    "disk_staging": {},
}
STALL = {"seconds": 5.0, "on": "reads"}


def tiers_of(
    target: Engine,
    folder: Path,
    files: Files,
    deadline_s: float = DEADLINE_S,
    host_blocks: int = HOST_BLOCKS,
) -> Tiers:
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
        HostStore(capacity_bytes=host_blocks * LAYOUT.size, block_bytes=LAYOUT.size),
        disk,
        LAYOUT,
        recompute=Recompute(PAGE),
        deadline_s=deadline_s,
        policy=TierPolicy(disk_age_s=0.0, copy_all=True),
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
        self.hook = ModelFaults()
        self.settings = {"step_tokens": step_tokens}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finish] = {}
        self.sent: dict[str, Submit] = {}
        self.past: list[list[int]] = [prompt_of(70, 1), prompt_of(100, 2)]
        self.start()

    def start(self) -> None:
        values: dict[str, Any] = {"kv_tokens": 256, "page_size": PAGE, "max_running": 3, "kv_host_mb": 0}
        self.engine = Engine(MODEL, EngineSettings(**values, signal_budget=0.0, **self.settings), self.hook)
        self.tiers = tiers_of(self.engine, Path(self.folder.name) / "kv", self.hook.files())
        self.handed = Loaded(self.engine, self.tiers)

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(1, 60), max_size=30),
        salt=st.sampled_from([ONE, ONE, ONE, TWO, b""]),
        choices=st.sampled_from([1, 1, 2]),
        steps=st.integers(0, 12),
    )
    def arrive(self, data: st.DataObject, tail: list[int], salt: bytes, choices: int, steps: int) -> None:
        # How many prompts are past depends on the disk's pace, which no draw may.
        head = self.past[data.draw(st.integers(0, 99)) % len(self.past)]
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
        self.tiers.disk.flush()

    @rule(kind=st.sampled_from(["stall", *FAULTS]), seed=st.integers(0, 3))
    def a_fault_begins(self, kind: str, seed: int) -> None:
        params = FAULTS.get(kind, STALL)
        kind = kind if kind in FAULTS else "disk_slow"
        self.hook.detach(kind)
        self.hook.attach(AttachFault(fault_id=kind, kind=kind, params=params, seed=seed, ttl_s=600.0))

    @rule()
    def the_faults_end(self) -> None:
        self.hook.detach(None)

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
        pool, roster = self.engine.pool, self.engine.roster
        in_use = {page for sequence in roster.running for page in sequence.pages}
        assert pool.free + roster.cache.idle + len(in_use) == pool.pages
        assert self.tiers.host.counters.bytes_used <= self.tiers.host.capacity_bytes
        for tokens, values in self.handed.take():
            if tokens:
                error = values - computed(tuple(tokens), **self.settings)
                assert error.square().mean((1, 3, 4, 5)).sqrt().max() < TOLERANCE
        for request_id, end in self.ends.items():
            whole = [*self.sent[request_id].token_ids, *self.tokens.get(request_id, [])]
            if end.reason == "length" and whole not in self.past and len(whole) < 120:
                self.past.append(whole)

    def end(self) -> None:
        self.the_faults_end()
        while self.engine.has_work:
            take(self.engine.step(), self.tokens, self.ends)
            self.right()
        assert self.ends.keys() == self.sent.keys()
        host, disk = self.tiers.host, self.tiers.disk
        assert not any(entry.pins for entry in host._entries.values())
        assert not any(entry.pins for entry in disk._index.entries.values())
        self.engine.close()
        assert host.counters.bytes_used == 0
        # A torn file takes less than it counts for; what is to be deleted counts until it is.
        known = sum(entry.header.file_bytes for entry in disk._index.entries.values())
        assert disk.counters.bytes_used == known + sum(disk._index.dead.values())
        assert bytes_of(disk.folder) <= disk.counters.bytes_used <= disk.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.end()
            self.folder.cleanup()


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = hypothesis_settings(max_examples=15, stateful_step_count=25, deadline=None)
