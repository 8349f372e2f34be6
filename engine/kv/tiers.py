"""The tiers below the page pool: what the prefix cache gives up goes down, what a prompt needs comes back.

The engine thread drives them, a little in each step: `begin_step` says how long packing and unpacking
may take. Nothing here is needed for a right answer: whatever fails, is late or has no room is
computed again.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.kv import names
from engine.kv.drop import DropPolicy
from engine.kv.host import HostStore, Victim
from engine.kv.int8 import BlockLayout, pack, unpack
from engine.kv.loading import Loading, Tier, Wanted
from engine.kv.pages import PagePool
from engine.kv.policy import Recompute
from engine.kv.prefix import Chain, Entry, PrefixCache
from engine.kv.reuse import Reuse
from engine.kv.store import Found, Slot
from engine.kv.tier_policy import PRESETS, Pace, TierPolicy
from engine.messages import TierStats

if TYPE_CHECKING:
    from engine.kv.disk import DiskStore

BLOCK_PAGES = 4

_BESIDE_DECODES_S = 0.02  # of a step, for packing and unpacking
_ALONE_S = 0.05
_AHEAD = 0.15  # share of it after which no page is copied ahead
ASKED = 32  # loads that may be out at once in a tier that takes its time; its queue is longer
_LOOK_AHEAD = 32  # leaves of the prefix cache, from which pages are copied before their room is wanted
_LOOK_BACK = 128  # blocks seen on the way from there
_PROVEN = 0.5  # hits, faded, from which on a page is taken to be wanted again
_POLL_S = 0.0005
_SAVE_S = 3.0  # at the end, to bring to disk what would be lost


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
        self.step_s = 0.0  # spent in this step
        self._policy = policy or TierPolicy()
        self._recompute = recompute
        self._deadline_s = deadline_s
        self._kernels = kernels
        self._limit_s = 0.0
        self._taken = False  # a block in this step: one is, whatever the time
        self._short = False
        self._reuse = Reuse()
        self._copies = Pace()  # what copying a block takes
        self._prompt_s = 0.0  # what computing a prompt token takes
        self._save_until = 0.0
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
        cache.leaving = self._leaving
        if host is not None and disk is not None:
            host.evicted = self._demote

    def begin_step(self, decoding: bool) -> None:
        """Let a new step begin; `decoding`: somebody waits for a next token."""
        self.step_s, self._taken = 0.0, False
        self._limit_s = _BESIDE_DECODES_S if decoding else _ALONE_S

    def begin(
        self, chain: Chain, tokens: Sequence[int], held: int, limit: int, prompt_s: float
    ) -> Loading | None:
        """Look for blocks that follow the first `held` pages of a prompt, up to its first `limit` pages.

        `prompt_s` is what a prompt token takes to compute. Returns None when there is nothing to load.
        """
        began = time.perf_counter()
        self._prompt_s = prompt_s
        self._notice(chain, held // BLOCK_PAGES, limit // BLOCK_PAGES)
        blocks: deque[Wanted] = deque()
        for index in range(held // BLOCK_PAGES, limit // BLOCK_PAGES):
            missing = range(max(index * BLOCK_PAGES, held), (index + 1) * BLOCK_PAGES)
            compute_s = prompt_s * sum(map(self._recompute.tokens, missing))
            wanted = self._find(chain, tokens, index, compute_s)
            if wanted is None:
                break
            blocks.append(wanted)
        loading = None
        if blocks:
            loading = Loading(blocks, time.monotonic(), len(tokens) - 1)
            self.loadings.add(loading)
            self._ask(loading)
        self.step_s += time.perf_counter() - began
        return loading

    def advance(self, loading: Loading, pages: list[int], computed: int) -> int:
        """Unpack what has come into `pages`, which hold `computed` tokens; return how many they do now."""
        late = time.monotonic() - loading.began > self._deadline_s
        if loading.blocks and late and not loading.ready:
            loading.blocks[0].tier.late += 1
            self._give_up(loading)
        while loading.ready and (self.step_s < self._limit_s or not self._taken):
            began = time.perf_counter()
            self._taken = True
            computed = self._take(loading, pages, computed)
            self._ask(loading)
            self.step_s += time.perf_counter() - began
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

    def write_ahead(self) -> None:
        """While the pool is short of free pages, store blocks of idle pages that are to go soon."""
        pool = self.cache.pool
        self._short = self._policy.short(1 - pool.free / pool.pages, self._short)
        if self._short and self._pays(0):
            for entry in islice(self._idle(), _LOOK_BACK):
                if self.step_s >= _AHEAD * self._limit_s:
                    return
                if not entry.copied:
                    self._store(entry)

    def stats(self) -> list[TierStats]:
        """Figures of each tier."""
        return [tier.stats(self.layout.tokens) for tier in self.tiers]

    def policy(self) -> dict[str, float | int | str | bool]:
        """What moves blocks: the preset's name, and its figures by their names."""
        told: dict[str, float | int | str | bool] = asdict(self._policy)
        preset = next((name for name, policy in PRESETS.items() if policy == self._policy), "own")
        return (
            {"preset": preset}
            | told
            | {
                "drop": self.drop.most if self.drop is not None else 0.0,
                "deadline_s": self._deadline_s,
                "step_beside_decodes_s": _BESIDE_DECODES_S,
                "step_alone_s": _ALONE_S,
            }
        )

    def close(self) -> None:
        """End all loads, bring to disk what fits into a few seconds, and close the stores."""
        for loading in list(self.loadings):
            self.cancel(loading)
        if self.tiers[-1].name == "disk":
            self._save()
        self.cache.leaving = None
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

    def _notice(self, chain: Chain, first: int, stop: int) -> None:
        """Take note of the blocks of a prompt that have left."""
        for index in range(first, stop):
            if not self._reuse.wanted(chain.names[(index + 1) * BLOCK_PAGES - 1]):
                return

    def _leaving(self, entry: Entry) -> None:
        """Store a block before the first of its pages, which is its last, is given up, if that pays.

        What was read again while it was here is likely to be so later: it is stored in any case.
        """
        if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
            self._reuse.leaves(entry.name)
            if not (entry.use.hits >= _PROVEN or self._pays(entry.depth)):
                self.tiers[0].skipped += not entry.copied
            elif self.step_s < self._limit_s:
                self._store(entry)

    def _pays(self, depth: int) -> bool:
        """Whether copying a block with so many pages before its last is expected to save time."""
        compute_s = self._prompt_s * BLOCK_PAGES * self._recompute.tokens(depth)
        return self._policy.copy_all or self._reuse.pays(self._copies.seconds, compute_s)

    def _idle(self) -> Iterator[Entry]:
        """Blocks of idle pages, by their last: from the next leaves to go back to the roots."""
        for leaf in self.cache.next_to_leave(_LOOK_AHEAD):
            entry: Entry | None = leaf
            while entry is not None and self.cache.is_idle(entry.page):
                if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
                    yield entry
                entry = entry.parent

    def _store(self, last: Entry, tier: Tier | None = None) -> None:
        """Pack the block whose last page is that of `last`, unless the tier, the first by default, has it."""
        began = time.perf_counter()
        last.copied = True
        block = [last]
        while len(block) < BLOCK_PAGES:
            parent = block[-1].parent
            assert parent is not None, "a page is kept without its parent"
            block.append(parent)
        block.reverse()
        pages, keep = [entry.page for entry in block], self._kept(block)
        tier, tokens = tier or self.tiers[0], b"".join(entry.tokens for entry in block)
        size = self.layout.partial_size(int(keep.sum()))
        slot = self._slot(tier, last.name, tokens, last.salt, size=size, entropy=last.entropy)
        if slot is not None:
            packed = pack(self.cache.pool, pages, self.layout, slot.buffer, keep=keep, kernels=self._kernels)
            slot.complete(packed)
            if packed:
                self._count(tier, size)
                self._copies.learn(time.perf_counter() - began)
        self.step_s += time.perf_counter() - began

    def _kept(self, block: list[Entry]) -> NDArray[np.bool_]:
        """Which tokens of a block's pages it holds: bool [tokens]. What has lost some loses no more."""
        live = ~self.cache.pool.dead[[entry.page for entry in block]].reshape(-1)
        judged = [entry.keep for entry in block if entry.keep is not None]
        return np.concatenate(judged) if live.all() and len(judged) == len(block) else live

    def _count(self, tier: Tier, size: int) -> None:
        """Count a block of `size` bytes that came to a tier from above."""
        kept = self.layout.kept(size)
        tier.stored_bytes += size
        tier.kept_tokens += kept
        tier.dropped_tokens += self.layout.tokens - kept

    def _demote(self, victim: Victim) -> None:
        """Hand a block that leaves the host to the disk; when its queue is full the block is lost."""
        if self._save_until or self._policy.to_disk(victim.age_s, victim.entropy):
            disk, size = self.tiers[-1], victim.block.size
            slot = self._slot(disk, victim.name, victim.tokens, victim.salt, size=size)
            if slot is not None:
                slot.buffer[:] = victim.block
                slot.complete(True)
                self._count(disk, size)

    def _save(self) -> None:
        """Bring what the pool keeps and the host holds to the disk, what was wanted last first, while there
        is time; of the pool a block after those before it, without which it is of no use."""
        self._save_until = time.monotonic() + _SAVE_S
        disk = self.tiers[-1]
        for entry in sorted(self.cache.entries(), key=lambda entry: (-entry.use.last, entry.depth)):
            if time.monotonic() > self._save_until:
                return
            if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
                self._store(entry, disk)
        if self.host is not None:
            for name in self.host.newest():
                if time.monotonic() > self._save_until:
                    return
                self.host.evict(name)

    def _slot(
        self,
        tier: Tier,
        name: bytes,
        tokens: bytes,
        salt: bytes,
        *,
        size: int,
        entropy: float | None = None,
    ) -> Slot | None:
        """Return room for a block, if there is; only what is saved at the end waits for it."""
        store = tier.store
        slot = store.prepare_store(name, tokens, salt, size=size, entropy=entropy)
        while slot is None and time.monotonic() < self._save_until:
            if store.lookup(name, tokens, salt) is not Found.MISS:
                return None
            time.sleep(_POLL_S)
            slot = store.prepare_store(name, tokens, salt, size=size, entropy=entropy)
        return slot
