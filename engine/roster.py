"""Who waits, who runs, and with which pages: the books of an engine, without its computing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.fairness import Shares
from engine.kv.pages import PagePool
from engine.kv.policy import Recompute
from engine.kv.prefix import PrefixCache
from engine.load import StepCost
from engine.scheduler import Admission, Chunk, Sequence, plan, shareable, sharing_unit


class Roster:
    """Every sequence is in exactly one of `waiting` and `running`.

    One that runs owns the pages for its longest answer, one that waits owns none. Siblings that run
    share the whole pages of their prompt, and everybody those that `cache` keeps; what a step writes
    lies in pages with one owner. `recompute` says what a page takes that is not computed.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        step_tokens: int,
        max_running: int,
        itl_slo_s: float,
        whole_chunks: bool,
        cache: PrefixCache | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache or PrefixCache(pool)
        self.recompute = recompute or Recompute(pool.page_size)
        self.saved_s = 0.0  # computing that hits made unnecessary
        self.step_tokens = step_tokens
        self.max_running = max_running
        self.itl_slo_s = itl_slo_s
        self.whole_chunks = whole_chunks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.shares = Shares()
        self.cost = StepCost()

    @property
    def everyone(self) -> list[Sequence]:
        """All sequences, those that wait first."""
        return [*self.waiting, *self.running]

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        salt = sequence.request.cache_salt
        if salt:
            sequence.chain = self.cache.chain(salt, sequence.request.token_ids)
        everyone = self.everyone
        if all(other.flow != sequence.flow for other in everyone):
            self.shares.arrive(sequence.flow)
        twin = next((other for other in everyone if _same_prompt(other, sequence)), sequence)
        sequence.siblings = twin.siblings
        sequence.siblings.append(sequence)
        self.waiting.append(sequence)

    def plan(self, now: float) -> list[Chunk]:
        """Admit whoever is next at time `now`, and return the chunks of the next step."""
        decodes = sum(sequence.decoding for sequence in self.running)
        chosen = plan(
            self.running,
            self.waiting,
            step_tokens=self.step_tokens,
            max_running=self.max_running,
            free_pages=self.pool.free + self.cache.idle,
            page_size=self.pool.page_size,
            served=self.shares.served,
            prompt_tokens=self.cost.prompt_within(self.itl_slo_s, decodes) if self.itl_slo_s else None,
            whole_chunks=self.whole_chunks,
            cache=self.cache,
        )
        for admission in chosen.admit:  # all of them, before room for the first is made
            admission.sequence.pages = self._shared(admission)
        for admission in chosen.admit:
            self._admit(admission, now)
        for chunk in chosen.chunks:
            if chunk.sequence.decoding:
                self.shares.charge(chunk.sequence.flow, 1)
        return chosen.chunks

    def learn(self, chunks: list[Chunk], seconds: float) -> None:
        """Take in how long the step over `chunks` took. Call it after their tokens are counted."""
        prompt = sum(chunk.count for chunk in chunks if chunk.start < chunk.sequence.prompt_length)
        decodes = sum(chunk.start >= chunk.sequence.prompt_length for chunk in chunks)
        self.cost.learn(prompt, decodes, seconds)

    def keep(self, chunks: Iterable[Chunk]) -> None:
        """Put the pages that `chunks` filled into the cache. Call it before their sequences are removed.

        With whole chunks only those of prompts, as far as chunks are whole: the values of others may
        depend, in the last bit, on how the batch was composed.
        """
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.chain is None or sequence.tainted:
                continue
            computed = sequence.computed
            if self.whole_chunks:
                computed = min(computed, sequence.prompt_length // self.step_tokens * self.step_tokens)
            full = computed // self.pool.page_size
            self.cache.keep(sequence.chain, sequence.tokens, sequence.pages, full)

    def taint(self, pages: Iterable[int]) -> None:
        """Have nobody else read pages that a fault has touched, nor what was computed from them."""
        touched = set(pages)
        for sequence in self.running:
            sequence.tainted = sequence.tainted or not touched.isdisjoint(sequence.pages)
        self.cache.taint(touched)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and its pages back."""
        if sequence.pages:
            self.running.remove(sequence)
            self.cache.release(sequence.pages)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)
        sequence.siblings.remove(sequence)
        if not self.waiting and not self.running:
            self.shares.clear()

    def check(self) -> None:
        """Raise AssertionError if a page is lost, or is to be written and has several owners."""
        owned = Counter(page for sequence in self.running for page in sequence.pages)
        self.cache.check(owned.elements())
        assert not any(sequence.pages for sequence in self.waiting), "a waiting sequence owns pages"
        for sequence in self.running:
            unwritten = sequence.pages[sequence.computed // self.pool.page_size :]
            assert all(owned[page] == 1 for page in unwritten), "a page with several owners is to be written"
            assert sequence in sequence.siblings, "a sequence has left its siblings"

    def _admit(self, admission: Admission, now: float) -> None:
        sequence = admission.sequence
        self.waiting.remove(sequence)
        sequence.pages += self.cache.take(self.pool.needed(sequence.longest) - len(sequence.pages))
        sequence.computed = sequence.shared = admission.shared
        sequence.admitted = now
        self.shares.admit(sequence.flow, sequence.pending)
        self.running.append(sequence)

    def _shared(self, admission: Admission) -> list[int]:
        """Make a sequence an owner of the pages that it reads, and return them."""
        sequence, donor = admission.sequence, admission.donor
        count = admission.shared // self.pool.page_size
        if donor is not None:
            self.cache.share(donor.pages[:count])
            return donor.pages[:count]
        if sequence.chain is None:
            return []
        self.saved_s += self.cost.prompt_s * sum(map(self.recompute.tokens, range(count)))
        unit = sharing_unit(self.pool.page_size, self.step_tokens, self.whole_chunks)
        wanted = shareable(sequence, unit) // self.pool.page_size
        return self.cache.acquire(sequence.chain, count, wanted)


def _same_prompt(one: Sequence, other: Sequence) -> bool:
    return one.key[0] == other.key[0] and one.request.token_ids == other.request.token_ids
