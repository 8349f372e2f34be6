"""Who waits, who runs, and with which pages: the books of an engine, without its computing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from engine.fairness import Shares
from engine.kv.loading import Loading
from engine.kv.pages import PagePool
from engine.kv.policy import Recompute
from engine.kv.prefix import PrefixCache
from engine.kv.tiers import Tiers
from engine.load import StepCost
from engine.scheduler import Admission, Chunk, Sequence, admissions, chunks_of, shareable, sharing_unit

#: Of those that run at a time, the keys of those whose prompts wait.
Hold = Callable[[list[Sequence], float], set[tuple[str, int]]]


class Roster:
    """Every sequence is in exactly one of `waiting` and `running`.

    One that runs owns the pages for its longest answer, one that waits owns none. Siblings that run
    share the whole pages of their prompt, and everybody those that `cache` keeps; what a step writes
    lies in pages with one owner. `recompute` says what a page takes that is not computed. One that is
    `loading` runs, owns its pages, and is not computed until what it waits for is there.
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
        tiers: Tiers | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache or PrefixCache(pool)
        self.recompute = recompute or Recompute(pool.page_size)
        self.tiers = tiers
        self.saved_s = 0.0  # computing that hits in the pool made unnecessary
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

    def plan(self, now: float, hold: Hold | None = None) -> list[Chunk]:
        """Admit whoever is next at time `now`, and return the chunks of the next step.

        `hold` names those that run and whose prompts are left alone in this step.
        """
        decodes = sum(sequence.decoding for sequence in self.running)
        served = dict(self.shares.served)
        if self.tiers is not None:
            self.tiers.begin_step(decodes > 0)
        self._admit(now)
        self._load()
        held = hold(self.running, now) if hold is not None else set()
        chunks = chunks_of(
            [sequence for sequence in self.running if sequence.key not in held] if held else self.running,
            step_tokens=self.step_tokens,
            served=served,
            prompt_tokens=self.cost.prompt_within(self.itl_slo_s, decodes) if self.itl_slo_s else None,
            whole_chunks=self.whole_chunks,
        )
        for chunk in chunks:
            if chunk.sequence.decoding:
                self.shares.charge(chunk.sequence.flow, 1)
        return chunks

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
            computed = chunk.sequence.computed
            if self.whole_chunks:
                whole = chunk.sequence.prompt_length // self.step_tokens * self.step_tokens
                computed = min(computed, whole)
            self._keep(chunk.sequence, computed)
            self._judge(chunk.sequence)

    def taint(self, pages: Iterable[int]) -> None:
        """Have nobody else read pages that a fault has touched, nor what was computed from them."""
        touched = set(pages)
        for sequence in self.running:
            sequence.tainted = sequence.tainted or not touched.isdisjoint(sequence.pages)
        self.cache.taint(touched)

    def seclude(self, sequence: Sequence) -> bool:
        """Make a running sequence the only owner of its pages, and taint them.

        Those with other owners are copied. False, and nothing changed, when there is no room for the copies.
        """
        places = [i for i, page in enumerate(sequence.pages) if self.pool.owners(page) > 1]
        if self.pool.free + self.cache.idle < len(places):
            return False
        copies = self.cache.take(len(places))
        shared = [sequence.pages[i] for i in places]
        self.pool.copy(shared, copies)
        for place, page in zip(places, copies, strict=True):
            sequence.pages[place] = page
        self.cache.release(shared)
        self.taint(sequence.pages)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and its pages back."""
        if sequence.pages:
            self._cancel(sequence)
            self.running.remove(sequence)
            if sequence.tainted:
                self.pool.clear(page for page in sequence.pages if self.pool.owners(page) == 1)
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
        if self.tiers is not None:
            waited = {sequence.loading for sequence in self.running} - {None}
            assert waited == self.tiers.loadings, "a load outlives its sequence, or the reverse"

    def _admit(self, now: float) -> None:
        """Let in whoever is next, and begin to load what lower tiers have of their prompts."""
        chosen = admissions(
            self.waiting,
            room=self.max_running - len(self.running),
            free_pages=self.pool.free + self.cache.idle,
            page_size=self.pool.page_size,
            served=self.shares.served,
            unit=self._unit,
            cache=self.cache,
        )
        for admission in chosen:  # all of them, before room for the first is made, here or in the host
            self._share(admission)
        for admission in chosen:
            sequence = admission.sequence
            self.waiting.remove(sequence)
            sequence.pages += self.cache.take(self.pool.needed(sequence.longest) - len(sequence.pages))
            self._copy(sequence)
            sequence.admitted = now
            self.shares.admit(sequence.flow, sequence.pending)
            self.running.append(sequence)

    def _copy(self, sequence: Sequence) -> None:
        """Copy what the cache has of the next page: what two prompts have in common may end in its middle.

        Whoever asks the same again computes one token.
        """
        if sequence.chain is None or sequence.loading is not None or self.whole_chunks:
            return
        rest = sequence.tokens[sequence.computed : sequence.prompt_length - 1]
        found, count = self.cache.similar(sequence.chain, sequence.computed // self.pool.page_size, rest)
        if found is not None:
            self.pool.copy([found], [sequence.pages[sequence.computed // self.pool.page_size]])
            sequence.computed = sequence.shared = sequence.computed + count
            sequence.tier_tokens["device"] = sequence.computed

    def _load(self) -> None:
        """Take in blocks that have come for those who wait for them; a flow is not charged for them."""
        for sequence in self.running:
            loading = sequence.loading
            if loading is None or self.tiers is None:
                continue
            self._catch_up(sequence, loading)
            computed = self.tiers.advance(loading, sequence.pages, sequence.computed)
            if computed > sequence.computed:
                self.shares.charge(sequence.flow, sequence.computed - computed)
                sequence.computed = sequence.shared = computed
                self._keep(sequence, computed)
            if loading.over:
                _loaded(sequence, loading)

    def _catch_up(self, sequence: Sequence, loading: Loading) -> None:
        """Read the pages that the cache has got since, from another's loading of the same blocks."""
        chain, size = sequence.chain, self.pool.page_size
        held, limit = sequence.computed // size, (sequence.prompt_length - 1) // size
        if chain is None or self.tiers is None or held >= limit or not self.cache.keeps(chain.names[held]):
            return
        found = self.cache.lookup(chain, limit)
        if len(found) <= held:  # a name that lied
            return
        self.cache.share(found[held:])
        self.cache.release(sequence.pages[held : len(found)])
        sequence.pages[held : len(found)] = found[held:]
        count = len(found) * size
        self.shares.charge(sequence.flow, sequence.computed - count)
        device = sequence.tier_tokens.get("device", 0)
        sequence.tier_tokens["device"] = device + count - sequence.computed
        sequence.computed = sequence.shared = count
        self.tiers.skip(loading, count)

    def _keep(self, sequence: Sequence, computed: int) -> None:
        if sequence.chain is not None and not sequence.tainted:
            full = computed // self.pool.page_size
            self.cache.keep(sequence.chain, sequence.tokens, sequence.pages, full)

    def _judge(self, sequence: Sequence) -> None:
        """Say what stays of a prompt's pages, once its last queries have been asked what they attend to."""
        if sequence.mass is None or sequence.computed < sequence.prompt_length:
            return
        mass, sequence.mass = sequence.mass, None
        drop = None if self.tiers is None else self.tiers.drop
        if drop is not None and sequence.chain is not None and not sequence.tainted:
            unseen = sequence.prompt_length - len(mass)  # by those that were asked: a last one alone is not
            judgement = drop.judge(np.pad(mass, (0, unseen)))
            if judgement is not None:
                self.cache.judge(sequence.chain, judgement)

    def _cancel(self, sequence: Sequence) -> None:
        """Let go of what a sequence waits for."""
        if sequence.loading is not None and self.tiers is not None:
            self.tiers.cancel(sequence.loading)
            _loaded(sequence, sequence.loading)

    def _share(self, admission: Admission) -> None:
        """Make a sequence an owner of the pages that it reads, and look for what follows them."""
        sequence, donor = admission.sequence, admission.donor
        sequence.computed = sequence.shared = admission.shared
        if admission.shared:
            sequence.tier_tokens["device"] = admission.shared
        count = admission.shared // self.pool.page_size
        if donor is not None:
            self.cache.share(donor.pages[:count])
            sequence.pages = donor.pages[:count]
        elif sequence.chain is not None:
            self.saved_s += self.cost.prompt_s * sum(map(self.recompute.tokens, range(count)))
            wanted = shareable(sequence, self._unit) // self.pool.page_size
            sequence.pages = self.cache.acquire(sequence.chain, count, wanted)
            if self.tiers is not None:
                whole = sequence.prompt_length // self.pool.page_size
                sequence.loading = self.tiers.begin(
                    sequence.chain, sequence.tokens, count, whole, self.cost.prompt_s
                )

    @property
    def _unit(self) -> int:
        return sharing_unit(self.pool.page_size, self.step_tokens, self.whole_chunks)


def _loaded(sequence: Sequence, loading: Loading) -> None:
    """Note what a loading that is over has brought."""
    sequence.tier_tokens |= loading.tokens
    sequence.loading_s = loading.took
    sequence.loading = None


def _same_prompt(one: Sequence, other: Sequence) -> bool:
    return one.key[0] == other.key[0] and one.request.token_ids == other.request.token_ids
