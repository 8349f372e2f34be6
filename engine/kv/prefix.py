"""The prefix cache: pages of the pool kept beyond their sequence, found again by name.

The cache is one owner of each page that it keeps, beside the sequences that hold it. A page that it
owns alone is idle, and given up when somebody needs room, lowest rank first (`engine.kv.policy`).

Invariants, checked by `check`:
- free + idle + in use = all pages;
- a page in use has its parent in use, so that of idle pages leaves can always be given up first, and
  all of them in the end: a sequence that computed what is kept already takes the page that is kept;
- a kept page was computed in full, and never is written again.

What a name stands for is not believed: a hit has the tokens' keyed digest and the parent right too.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.kv import names
from engine.kv.drop import Judgement
from engine.kv.pages import PagePool
from engine.kv.policy import Cost, Policy, Recompute, Use


@dataclass(eq=False, slots=True)
class Entry:
    """A page that is kept. `children` are the kept pages that continue it.

    `tokens` (int32 LE) and the tenant's `salt` are for the tiers below, which have digests of their own.
    """

    name: bytes
    digest: bytes
    tokens: bytes
    salt: bytes
    page: int
    depth: int
    parent: Entry | None
    use: Use
    children: set[Entry] = field(default_factory=set)
    rank: float = 0.0  # as it lies in the heap
    copied: bool = False  # with the pages before it, to the tier below: a block ends here
    keep: NDArray[np.bool_] | None = None  # of its tokens, those that stay when it is packed; None: all
    entropy: float | None = None  # of the attention of the last prompt that judged it


@dataclass(eq=False, slots=True)
class Chain:
    """Names and keyed digests of a sequence's full pages, as far as its tokens are known.

    Its first `kept` pages are in the cache, the last of them is `tip`.
    """

    salt: bytes
    key: bytes
    names: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    kept: int = 0
    tip: Entry | None = None


@dataclass(slots=True)
class Counters:
    """Pages since the start: of prompts, found and not found; given up; with a name that lied."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    collisions: int = 0


class PrefixCache:
    """Keeps pages of `pool`; whoever takes, shares or releases pages of that pool does it here."""

    def __init__(
        self,
        pool: PagePool,
        fingerprint: bytes = b"",
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.counters = Counters()
        self._fingerprint = fingerprint
        self._policy = policy or Cost(Recompute(pool.page_size))
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._entries: dict[bytes, Entry] = {}
        self._pages: dict[int, Entry] = {}
        self._idle: set[int] = set()
        self._heap: list[tuple[float, bytes]] = []  # idle leaves, and what was one once
        #: Told of each page before room is made of it, while it and all pages before it still are kept.
        self.leaving: Callable[[Entry], None] | None = None

    @property
    def idle(self) -> int:
        """Pages that can be given up."""
        return len(self._idle)

    def entries(self) -> list[Entry]:
        """Return all that is kept, a page after those before it."""
        return list(self._entries.values())

    def ages(self) -> list[float]:
        """Seconds since each of the kept pages came or was last read."""
        now = self._clock()
        return [now - entry.use.last for entry in self._entries.values()]

    def keeps(self, name: bytes) -> bool:
        """Whether a page of that name is kept; what it stands for is not looked at."""
        return name in self._entries

    def is_idle(self, page: int) -> bool:
        """Whether nobody but the cache owns a page."""
        return page in self._idle

    def chain(self, salt: bytes, tokens: Sequence[int]) -> Chain:
        """Return the chain of a sequence that begins with `tokens`."""
        chain = Chain(salt, hashlib.blake2b(salt, key=self._key, digest_size=32).digest())
        self._extend(chain, tokens)
        return chain

    def lookup(self, chain: Chain, limit: int) -> list[int]:
        """Return the longest run of kept pages from the start of `chain`, at most `limit`.

        They are not the caller's until `acquire`.
        """
        return [entry.page for entry in self._run(chain, limit)[0]]

    def acquire(self, chain: Chain, count: int, wanted: int) -> list[int]:
        """Make the caller an owner of the first `count` pages of `chain`, which `lookup` found.

        `wanted` pages would have been of use. Counts them as hits, and the rest as misses.
        """
        found, collided = self._run(chain, wanted)
        now = self._clock()
        for entry in found[:count]:
            entry.use.touch(now, hits=1)
        self.counters.hits += count
        self.counters.misses += wanted - count
        self.counters.collisions += collided
        pages = [entry.page for entry in found[:count]]
        self.share(pages)
        return pages

    def similar(self, chain: Chain, count: int, tokens: Sequence[int]) -> tuple[int | None, int]:
        """Return a page to copy from and how many of `tokens` it begins with, at least one; or None and 0.

        It is, of those kept after the first `count` pages of `chain`, the one with most of them. It is not
        the caller's, and what follows the common tokens in it is no concern of the caller's.
        """
        run, _ = self._run(chain, count)
        if not run or len(run) < count:
            return None, 0
        own, page, common = names.token_bytes(tokens[: self.pool.page_size]), None, 0
        for entry in run[-1].children:
            while (more := 4 * (common + 1)) <= len(own) and entry.tokens[:more] == own[:more]:
                page, common = entry.page, common + 1
        return page, common

    def keep(self, chain: Chain, tokens: Sequence[int], pages: list[int], full: int) -> None:
        """Keep a sequence's first `full` pages, which are computed.

        Where the same tokens are kept already, the kept page takes the place of the sequence's own in
        `pages`. Behind a name that stands for something else nothing is kept.
        """
        self._extend(chain, tokens)
        while chain.kept < full:
            index = chain.kept
            name, digest = chain.names[index], chain.digests[index]
            entry = self._entries.get(name)
            if entry is None:
                start = index * self.pool.page_size
                text = names.token_bytes(tokens[start : start + self.pool.page_size])
                use = Use(self._clock())
                entry = Entry(name, digest, text, chain.salt, pages[index], index, chain.tip, use)
                self._insert(entry)
            elif not _is(entry, digest, chain.tip):
                return
            elif entry.page != pages[index]:
                own, pages[index] = pages[index], entry.page
                self.share([entry.page])
                self.release([own])
            chain.kept, chain.tip = index + 1, entry

    def judge(self, chain: Chain, judgement: Judgement) -> None:
        """Note with the kept pages of a chain which of their tokens stay; what anyone wants to stay does."""
        entry, size = chain.tip, self.pool.page_size
        while entry is not None:
            own = judgement.keep[entry.depth * size : (entry.depth + 1) * size]
            entry.keep = own if entry.keep is None else entry.keep | own
            entry.entropy = judgement.entropy
            entry = entry.parent

    def take(self, count: int) -> list[int]:
        """Hand `count` pages to the caller, idle ones given up as far as needed."""
        while self.pool.free < count and self._idle:
            self._evict()
        return self.pool.take(count)

    def share(self, pages: Iterable[int]) -> None:
        """Give pages one more owner, who must `release` them."""
        pages = list(pages)
        self.pool.share(pages)
        self._idle.difference_update(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back from one of their owners; kept ones may become idle."""
        pages = list(pages)
        self.pool.release(pages)
        now = self._clock()
        idle = [page for page in pages if page in self._pages and self.pool.owners(page) == 1]
        self._idle.update(idle)
        for page in idle:
            entry = self._pages[page]
            entry.use.touch(now)
            self._offer(entry)

    def next_to_leave(self, count: int) -> list[Entry]:
        """Return about the `count` idle leaves that would be given up first."""
        found = (self._offered(*item) for item in self._heap[:count])  # of a heap, the low end
        return [entry for entry in found if entry is not None]

    def taint(self, pages: Iterable[int]) -> None:
        """Forget pages whose values are not what their tokens compute to, and all that continues them.

        Those who own them keep them; that they `keep` nothing more is the caller's to see to.
        """
        for page in pages:
            if page in self._pages:
                self._drop_tree(self._pages[page])

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless pages and entries add up; `owned`: a page for each sequence's."""
        owned = list(owned)
        self.pool.check([*owned, *self._pages])
        used = set(owned)
        assert self._idle == self._pages.keys() - used, "a page is idle that is not, or the reverse"
        assert self.pool.free + len(self._idle) + len(used) == self.pool.pages, "pages do not add up"
        assert len(self._entries) == len(self._pages), "an entry has lost its page"
        offered = set(self._heap)
        for page, entry in self._pages.items():
            parent = entry.parent
            assert entry.page == page and self._entries[entry.name] is entry, "a page has two names"
            if parent is not None:
                assert self._entries.get(parent.name) is parent, "a page is kept without its parent"
                assert entry in parent.children, "a page has left its parent"
                assert page in self._idle or parent.page not in self._idle, "an idle page is continued"
            if page in self._idle and not entry.children:
                assert (entry.rank, entry.name) in offered, "an idle leaf can never be given up"

    def _run(self, chain: Chain, limit: int) -> tuple[list[Entry], bool]:
        """Return the entries found, and whether a name that lied ended them."""
        found: list[Entry] = []
        for name, digest in zip(chain.names[:limit], chain.digests, strict=False):
            entry = self._entries.get(name)
            if entry is None:
                return found, False
            if not _is(entry, digest, found[-1] if found else None):
                return found, True
            found.append(entry)
        return found, False

    def _extend(self, chain: Chain, tokens: Sequence[int]) -> None:
        size = self.pool.page_size
        if len(tokens) // size > len(chain.names):
            chain.names = names.page_names(chain.salt, self._fingerprint, tokens, size, chain.names)
            for start in range(len(chain.digests) * size, len(chain.names) * size, size):
                chain.digests.append(names.token_digest(chain.key, tokens[start : start + size]))

    def _insert(self, entry: Entry) -> None:
        self.pool.share([entry.page])
        self._entries[entry.name] = self._pages[entry.page] = entry
        if entry.parent is not None:
            entry.parent.children.add(entry)

    def _offer(self, entry: Entry) -> None:
        """Put an idle leaf into the heap, and what it once was out of it when that is most of it."""
        if entry.children:
            return
        entry.rank = self._policy.rank(entry.depth, entry.use)
        heapq.heappush(self._heap, (entry.rank, entry.name))
        if len(self._heap) > 2 * len(self._idle) + 64:
            self._heap = list({item for item in self._heap if self._offered(*item) is not None})
            heapq.heapify(self._heap)

    def _offered(self, rank: float, name: bytes) -> Entry | None:
        """Return the idle leaf that an item of the heap stands for, if it still does."""
        entry = self._entries.get(name)
        if entry is None or entry.rank != rank or entry.children or entry.page not in self._idle:
            return None
        return entry

    def _evict(self) -> None:
        entry = None
        while entry is None:
            entry = self._offered(*heapq.heappop(self._heap))
        self.counters.evictions += 1
        if self.leaving is not None:
            self.leaving(entry)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """Forget a leaf."""
        del self._entries[entry.name], self._pages[entry.page]
        self._idle.discard(entry.page)
        self.pool.release([entry.page])
        parent = entry.parent
        if parent is not None:
            parent.children.remove(entry)
            if parent.page in self._idle:
                self._offer(parent)

    def _drop_tree(self, entry: Entry) -> None:
        order = [entry]
        for one in order:
            order += one.children
        for one in reversed(order):
            self._drop(one)


def _is(entry: Entry, digest: bytes, parent: Entry | None) -> bool:
    """Whether an entry is what its name says: these tokens, after those of `parent`."""
    return entry.parent is parent and hmac.compare_digest(entry.digest, digest)
