"""Blocks on their way down: what the page pool gives up, what the host makes room from, what is saved at
the end. The engine thread does it all; the disk's writes alone are a thread's of its own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from engine.kv.host import HostStore, Victim
from engine.kv.int8 import BlockLayout, pack
from engine.kv.loading import Tier
from engine.kv.pages import BLOCK_PAGES
from engine.kv.policy import Recompute
from engine.kv.prefix import Chain, Entry, PrefixCache
from engine.kv.reuse import Reuse
from engine.kv.step_time import StepTime
from engine.kv.store import Found, Slot
from engine.kv.tier_policy import Pace, TierPolicy

_AHEAD = 0.15  # share of a step's time after which no page is copied ahead
_LOOK_AHEAD = 32  # leaves of the prefix cache, from which pages are copied before their room is wanted
_LOOK_BACK = 128  # blocks seen on the way from there
_PROVEN = 0.5  # hits, faded, from which on a page is taken to be wanted again
_POLL_S = 0.0005
_SAVE_S = 3.0  # at the end, to bring to disk what would be lost


class Storing:
    """Packs what leaves `cache` into the first of `tiers`, and hands what the host gives up to the disk."""

    def __init__(
        self,
        cache: PrefixCache,
        tiers: Sequence[Tier],
        layout: BlockLayout,
        step: StepTime,
        *,
        recompute: Recompute,
        policy: TierPolicy,
        kernels: ctypes.CDLL | None,
    ) -> None:
        self.policy = policy
        self._cache, self._tiers, self._layout, self._step = cache, tiers, layout, step
        self._recompute = recompute
        self._kernels = kernels
        self._short = False
        self._reuse = Reuse()
        self._copies = Pace()  # what copying a block takes
        self._prompt_s = 0.0  # what computing a prompt token takes
        self._save_until = 0.0
        first, last = tiers[0], tiers[-1]
        self._host = first.store if isinstance(first.store, HostStore) else None
        cache.leaving = self._leaving
        if self._host is not None and last is not first:
            self._host.evicted = self._demote

    def write_ahead(self) -> None:
        """While the pool is short of free pages, store blocks of idle pages that are to go soon."""
        pool = self._cache.pool
        self._short = self.policy.short(1 - pool.free / pool.pages, self._short)
        if self._short and self._pays(0):
            for entry in islice(self._idle(), _LOOK_BACK):
                if self._step.spent >= _AHEAD * self._step.limit:
                    return
                if not entry.copied:
                    self._store(entry)

    def wanted(self, chain: Chain, first: int, stop: int, prompt_s: float) -> None:
        """Take note of a prompt that wants its blocks from `first` to `stop`; `prompt_s` computes a token."""
        self._prompt_s = prompt_s
        for index in range(first, stop):
            if not self._reuse.wanted(chain.names[(index + 1) * BLOCK_PAGES - 1]):
                return

    def close(self) -> None:
        """Bring to disk what fits into a few seconds; take no more."""
        if self._tiers[-1].name == "disk":
            self._save()
        self._cache.leaving = None

    def _leaving(self, entry: Entry) -> None:
        """Store a block before the first of its pages, which is its last, is given up, if that pays.

        What was read again while it was here is likely to be so later: it is stored in any case.
        """
        if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
            self._reuse.leaves(entry.name)
            if not (entry.use.hits >= _PROVEN or self._pays(entry.depth)):
                self._tiers[0].skipped += not entry.copied
            elif self._step.left:
                self._store(entry)

    def _pays(self, depth: int) -> bool:
        """Whether copying a block with so many pages before its last is expected to save time."""
        compute_s = self._prompt_s * BLOCK_PAGES * self._recompute.tokens(depth)
        return self.policy.copy_all or self._reuse.pays(self._copies.seconds, compute_s)

    def _idle(self) -> Iterator[Entry]:
        """Blocks of idle pages, by their last: from the next leaves to go back to the roots."""
        for leaf in self._cache.next_to_leave(_LOOK_AHEAD):
            entry: Entry | None = leaf
            while entry is not None and self._cache.is_idle(entry.page):
                if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
                    yield entry
                entry = entry.parent

    def _store(self, last: Entry, tier: Tier | None = None) -> None:
        """Pack the block whose last page is that of `last`, unless the tier, the first by default, has it."""
        began = time.perf_counter()
        with self._step.measured():
            block = [last]
            while len(block) < BLOCK_PAGES:
                parent = block[-1].parent
                assert parent is not None, "a page is kept without its parent"
                block.append(parent)
            block.reverse()
            tier, tokens = tier or self._tiers[0], b"".join(entry.tokens for entry in block)
            if last.copied and tier is self._tiers[0] and self._is_below(last, tokens):
                return
            last.copied = True
            pages, keep = [entry.page for entry in block], self._kept(block)
            size = self._layout.partial_size(int(keep.sum()))
            slot = self._slot(tier, last.name, tokens, last.salt, size=size, entropy=last.entropy)
            if slot is None:
                return
            layout, kernels = self._layout, self._kernels
            packed = pack(self._cache.pool, pages, layout, slot.buffer, keep=keep, kernels=kernels)
            slot.complete(packed)
            if packed:
                self._count(tier, size)
                self._copies.learn(time.perf_counter() - began)

    def _is_below(self, last: Entry, tokens: bytes) -> bool:
        """Whether a tier below the first has a block, or will: its copy went there already."""
        lower = (tier.store.lookup(last.name, tokens, last.salt) for tier in self._tiers[1:])
        return any(found is not Found.MISS for found in lower)

    def _kept(self, block: list[Entry]) -> NDArray[np.bool_]:
        """Which tokens of a block's pages it holds: bool [tokens]. What has lost some loses no more."""
        live = ~self._cache.pool.dead[[entry.page for entry in block]].reshape(-1)
        judged = [entry.keep for entry in block if entry.keep is not None]
        return np.concatenate(judged) if live.all() and len(judged) == len(block) else live

    def _count(self, tier: Tier, size: int) -> None:
        """Count a block of `size` bytes that came to a tier from above."""
        kept = self._layout.kept(size)
        tier.stored_bytes += size
        tier.kept_tokens += kept
        tier.dropped_tokens += self._layout.tokens - kept

    def _demote(self, victim: Victim) -> None:
        """Hand a block that leaves the host to the disk; when its queue is full the block is lost."""
        if self._save_until or self.policy.to_disk(victim.age_s, victim.entropy):
            disk, size = self._tiers[-1], victim.block.size
            slot = self._slot(disk, victim.name, victim.tokens, victim.salt, size=size)
            if slot is not None:
                slot.buffer[:] = victim.block
                slot.complete(True)
                self._count(disk, size)

    def _save(self) -> None:
        """Bring what the pool keeps and the host holds to the disk, what was wanted last first, while there
        is time; of the pool a block after those before it, without which it is of no use."""
        self._save_until = time.monotonic() + _SAVE_S
        disk = self._tiers[-1]
        for entry in sorted(self._cache.entries(), key=lambda entry: (-entry.use.last, entry.depth)):
            if time.monotonic() > self._save_until:
                return
            if entry.depth % BLOCK_PAGES == BLOCK_PAGES - 1:
                self._store(entry, disk)
        if self._host is not None:
            for name in self._host.newest():
                if time.monotonic() > self._save_until:
                    return
                self._host.evict(name)

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
