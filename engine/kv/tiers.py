"""The tiers below the page pool: what the prefix cache gives up goes down, what a prompt needs comes back.

The engine thread drives them, a little in each step: `begin_step` says how long packing and unpacking
may take. Nothing here is needed for a right answer: whatever fails, is late or has no room is
computed again.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.kv import names
from engine.kv.drop import DropPolicy
from engine.kv.host import HostStore
from engine.kv.int8 import BlockLayout, unpack
from engine.kv.loading import Loading, Tier, Wanted
from engine.kv.pages import BLOCK_PAGES, PagePool
from engine.kv.policy import Recompute
from engine.kv.prefix import Chain, PrefixCache
from engine.kv.step_time import ALONE_S, BESIDE_DECODES_S, StepTime
from engine.kv.store import Found
from engine.kv.storing import Storing
from engine.kv.tier_policy import PRESETS, TierPolicy
from engine.messages import TierStats

if TYPE_CHECKING:
    from engine.kv.disk import DiskStore

ASKED = 32  # loads that may be out at once in a tier that takes its time; its queue is longer
_POLL_S = 0.0005


class Tiers:
    """The stores below `cache`, and the loads under way.

    Invariant: each load that is out belongs to one of `loadings`, and each of these to a sequence that
    owns the pages it is for; whoever ends the sequence must `cancel` it.

    After `deadline_s` a loading takes what has come, and waits no longer. What the host gives up goes to
    the disk.
    """

    def __init__(
        self,
        cache: PrefixCache,
        host: HostStore | None,
        disk: DiskStore | None,
        layout: BlockLayout,
        *,
        recompute: Recompute,
        deadline_s: float,
        policy: TierPolicy | None = None,
        drop: DropPolicy | None = None,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        self.cache = cache
        self.tiers: list[Tier] = []  # the nearest first
        if host is not None:
            self.tiers.append(Tier("host", host, at_once=True))
        if disk is not None:
            self.tiers.append(Tier("disk", disk, at_once=False))
        self.host, self.disk = host, disk
        self.layout = layout
        self.loadings: set[Loading] = set()
        self.drop = drop
        self.step = StepTime()
        self._recompute = recompute
        self._deadline_s = deadline_s
        self._kernels = kernels
        self._taken = False  # a block in this step: one is, whatever the time
        self.storing = Storing(
            cache,
            self.tiers,
            layout,
            self.step,
            recompute=recompute,
            policy=policy or TierPolicy(),
            kernels=kernels,
        )
        pool = cache.pool
        #: A block's pages, for one of which the sequence has the first pages already.
        self._apart = PagePool(
            layers=layout.layers,
            pages=BLOCK_PAGES,
            page_size=pool.page_size,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=pool.keys.dtype,
            device=pool.keys.device,
        )

    def begin_step(self, decoding: bool) -> None:
        """Let a new step begin; `decoding`: somebody waits for a next token."""
        self.step.begin(decoding)
        self._taken = False

    def begin(
        self, chain: Chain, tokens: Sequence[int], held: int, limit: int, prompt_s: float
    ) -> Loading | None:
        """Look for blocks that follow the first `held` pages of a prompt, up to its first `limit` pages.

        `prompt_s` is what a prompt token takes to compute. Returns None when there is nothing to load.
        """
        with self.step.measured():
            self.storing.wanted(chain, held // BLOCK_PAGES, limit // BLOCK_PAGES, prompt_s)
            blocks: deque[Wanted] = deque()
            for index in range(held // BLOCK_PAGES, limit // BLOCK_PAGES):
                missing = range(max(index * BLOCK_PAGES, held), (index + 1) * BLOCK_PAGES)
                compute_s = prompt_s * sum(map(self._recompute.tokens, missing))
                wanted = self._find(chain, tokens, index, compute_s)
                if wanted is None:
                    break
                blocks.append(wanted)
            if not blocks:
                return None
            loading = Loading(blocks, time.monotonic(), len(tokens) - 1)
            self.loadings.add(loading)
            self._ask(loading)
            return loading

    def advance(self, loading: Loading, pages: list[int], computed: int) -> int:
        """Unpack what has come into `pages`, which hold `computed` tokens; return how many they do now."""
        late = time.monotonic() - loading.began > self._deadline_s
        if loading.blocks and late and not loading.ready:
            loading.blocks[0].tier.late += 1
            self._give_up(loading)
        while loading.ready and (self.step.left or not self._taken):
            with self.step.measured():
                self._taken = True
                computed = self._take(loading, pages, computed)
                self._ask(loading)
        self._ask(loading)  # again: others may have made room in the queue
        if loading.over:
            self._close(loading)
        return computed

    def skip(self, loading: Loading, computed: int) -> None:
        """Do without the blocks of a loading that end within the first `computed` tokens."""
        while loading.blocks and (loading.blocks[0].index + 1) * self.layout.tokens <= computed:
            load = loading.blocks.popleft().load
            if load is not None:
                load.release()

    def wait(self, seconds: float) -> None:
        """Wait until the next block of a loading is there, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self.loadings and time.monotonic() < until:
            if any(loading.ready or loading.over for loading in self.loadings):
                return
            time.sleep(_POLL_S)

    def cancel(self, loading: Loading) -> None:
        """End a loading, whatever its state."""
        self._cut(loading, 0)
        self._close(loading)

    def stats(self) -> list[TierStats]:
        """Figures of each tier."""
        return [tier.stats(self.layout.tokens) for tier in self.tiers]

    def policy(self) -> dict[str, float | int | str | bool]:
        """What moves blocks: the preset's name, and its figures by their names."""
        told: dict[str, float | int | str | bool] = asdict(self.storing.policy)
        preset = next((name for name, policy in PRESETS.items() if policy == self.storing.policy), "own")
        return (
            {"preset": preset}
            | told
            | {
                "drop": self.drop.most if self.drop is not None else 0.0,
                "deadline_s": self._deadline_s,
                "step_beside_decodes_s": BESIDE_DECODES_S,
                "step_alone_s": ALONE_S,
            }
        )

    def close(self) -> None:
        """End all loads, bring to disk what would be lost, and close the stores."""
        for loading in list(self.loadings):
            self.cancel(loading)
        self.storing.close()
        for tier in self.tiers:
            tier.store.close()

    def _find(self, chain: Chain, tokens: Sequence[int], index: int, compute_s: float) -> Wanted | None:
        """Return the block from the nearest tier that has it and is expected to be worth it."""
        size = self.layout.tokens
        own = names.token_bytes(tokens[index * size : (index + 1) * size])
        name = chain.names[(index + 1) * BLOCK_PAGES - 1]
        for tier in self.tiers:
            if tier.store.lookup(name, own, chain.salt) is Found.MISS:
                tier.absent += 1
            elif tier.pace.beats(compute_s):
                wanted = Wanted(index, name, own, chain.salt, tier, compute_s)
                if tier.at_once:  # pinned from now on: room for this very sequence may be made next
                    wanted.ask()
                return wanted
        return None

    def _ask(self, loading: Loading) -> None:
        """Ask for what comes next, as far as loads may be out."""
        others = [
            wanted.name
            for other in self.loadings
            for wanted in islice(other.blocks, ASKED)
            if wanted.load is not None and not wanted.tier.at_once
        ]
        out = len(others)
        for place, wanted in enumerate(islice(loading.blocks, ASKED)):
            if wanted.load is None:
                if out >= ASKED:
                    return
                if wanted.name in others:  # it will be in the cache, or asked for once that has failed
                    continue
                wanted.ask()
                if wanted.load is None:
                    self._cut(loading, place)
                    return
                out += 1

    def _take(self, loading: Loading, pages: list[int], computed: int) -> int:
        """Unpack the next block, which is ready; without it the rest is of no use."""
        began = time.perf_counter()
        wanted = loading.blocks[0]
        block = wanted.load.result() if wanted.load is not None else None
        if wanted.load is None or block is None:
            self._give_up(loading)
            return computed
        own = pages[wanted.index * BLOCK_PAGES : (wanted.index + 1) * BLOCK_PAGES]
        self._unpack(block, own, computed // self.cache.pool.page_size - wanted.index * BLOCK_PAGES)
        self._promote(wanted, block)
        seconds = wanted.load.seconds
        wanted.load.release()
        loading.blocks.popleft()
        tier, end = wanted.tier, min((wanted.index + 1) * self.layout.tokens, loading.most)
        loading.tokens[tier.name] = loading.tokens.get(tier.name, 0) + end - computed
        tier.loaded_bytes += block.nbytes
        tier.load_times.add(time.monotonic() - wanted.asked)
        loading.settle(wanted, came=True)
        tier.pace.learn(seconds + time.perf_counter() - began)
        return end

    def _unpack(self, block: NDArray[np.uint8], own: list[int], held: int) -> None:
        """Write a block into its pages `own`, but for the first `held`, which others may read."""
        pool = self.cache.pool
        if not held:
            there = unpack(pool, block, own, self.layout, kernels=self._kernels)
        else:
            there = unpack(self._apart, block, range(BLOCK_PAGES), self.layout, kernels=self._kernels)
            pool.keys[:, own[held:]] = self._apart.keys[:, held:]
            pool.values[:, own[held:]] = self._apart.values[:, held:]
        pool.dead[own[held:]] = ~there.reshape(BLOCK_PAGES, -1)[held:]

    def _promote(self, wanted: Wanted, block: NDArray[np.uint8]) -> None:
        """Hold a block of a lower tier in the first too: it is wanted, and packed already."""
        first = self.tiers[0]
        if wanted.tier is not first:
            slot = first.store.prepare_store(wanted.name, wanted.tokens, wanted.salt, size=block.size)
            if slot is not None:
                slot.buffer[:] = block
                slot.complete(True)
                first.promoted += 1
                first.promoted_bytes += block.nbytes

    def _give_up(self, loading: Loading) -> None:
        """Wait no longer: what was waited for the next block is lost."""
        wanted = loading.blocks[0]
        wanted.tier.pace.learn(time.monotonic() - (wanted.asked or loading.began))  # what was lost by it
        loading.settle(wanted, came=False)
        self._cut(loading, 0)

    def _cut(self, loading: Loading, place: int) -> None:
        """Give up the blocks from `place` on."""
        while len(loading.blocks) > place:
            load = loading.blocks.pop().load
            if load is not None:
                load.release()

    def _close(self, loading: Loading) -> None:
        """Settle the accounts of a loading that is over."""
        self.loadings.discard(loading)
        loading.took = time.monotonic() - loading.began
        for tier in self.tiers:
            tier.settle(loading.gains.pop(tier.name, 0.0))
