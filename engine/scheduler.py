"""Who is admitted and what the next step computes: pure functions over the queue and what runs.

A sequence is admitted when the pages for its whole prompt and its longest answer are free, or only kept
by the prefix cache, so nothing that runs is ever evicted and no order of arrivals can deadlock. The
flow that has been served least is admitted next (`engine.fairness`), a flow's own requests in order of
arrival; when the next one does not fit, nobody overtakes it. Decodes go first, then prompts in chunks,
those of the least served flow before others, within one budget of tokens.

A prompt begins with the pages that the prefix cache has of it. Choices with one prompt (`n` > 1) are
siblings: the first computes what is missing, the others wait until its whole pages are there and read
them. A page with several readers is never written. While a prompt waits for blocks of a lower tier,
nothing of it is computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from engine.fairness import Flow, flow_of
from engine.kv.loading import Loading
from engine.kv.prefix import Chain, PrefixCache
from engine.messages import Submit
from engine.models.step import Floats


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice being generated. `tokens` is prompt + answer; the first `computed` are in the pages.

    `siblings` is one list that all open choices with the same prompt share, this one among them. Its
    first `shared` tokens were not computed for it: `tier_tokens` says where they came from; `loading` is
    what it still waits for, `loading_s` what it has waited. `chain` names its pages in the prefix cache;
    without one it neither reads nor keeps any. `tainted`: a fault has touched its pages, so that nobody
    else may read them. `mass` is what its prompt's last queries have attended to so far, by token.
    """

    request: Submit
    arrived: float
    tokens: list[int]
    prompt_length: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0
    siblings: list[Sequence] = field(default_factory=list)
    chain: Chain | None = None
    shared: int = 0
    tainted: bool = False
    loading: Loading | None = None
    tier_tokens: dict[str, int] = field(default_factory=dict)
    loading_s: float = 0.0
    mass: Floats | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Request id and choice."""
        return self.request.meta.request_id, self.request.choice

    @property
    def flow(self) -> Flow:
        """Whose share it is served from."""
        return flow_of(self.request.meta)

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens that are not in the pages yet."""
        return len(self.tokens) - self.computed

    @property
    def longest(self) -> int:
        """Tokens it may come to hold."""
        return self.prompt_length + self.request.params.max_tokens

    @property
    def decoding(self) -> bool:
        """Whether its next step is one token of the answer."""
        return self.pending == 1 and self.emitted > 0

    def add_mass(self, mass: Floats) -> None:
        """Take in what more of its prompt's last queries attend to: [tokens up to the last of them]."""
        if self.mass is not None:
            mass[: len(self.mass)] += self.mass
        self.mass = mass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to compute in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def emits(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that a token is sampled after it."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence to admit, its first `shared` tokens read from the pages of `donor`, or the cache's."""

    sequence: Sequence
    donor: Sequence | None
    shared: int


def chunks_of(
    running: Ordered[Sequence],
    *,
    step_tokens: int,
    served: Mapping[Flow, float] | None = None,
    prompt_tokens: int | None = None,
    whole_chunks: bool = False,
) -> list[Chunk]:
    """Choose what the next step computes, decodes first; changes nothing.

    `served` are weighted tokens by flow (absent: none). `prompt_tokens` bounds the prompt tokens of a
    step that decodes too. With `whole_chunks`, chunks end at multiples of `step_tokens` or at the
    prompt's end whatever else runs (deterministic mode), so a step may exceed both bounds.
    """
    served = served or {}
    chunks = [Chunk(s, s.computed, 1) for s in running if s.decoding]
    budget = step_tokens
    if not whole_chunks:
        budget = max(step_tokens - len(chunks), 1)
        if chunks and prompt_tokens is not None:
            budget = max(min(budget, prompt_tokens), 1)
    prompts = [s for s in running if not s.decoding and s.loading is None]
    for sequence in sorted(prompts, key=lambda s: served.get(s.flow, 0.0)):
        count = min(sequence.pending, step_tokens if whole_chunks else budget)
        if count > budget:
            break
        chunks.append(Chunk(sequence, sequence.computed, count))
        budget -= count
        if budget == 0:
            break
    return chunks


def sharing_unit(page_size: int, step_tokens: int, whole_chunks: bool) -> int:
    """Return the tokens of which a multiple is shared: chunks behind it are then cut as without it."""
    return math.lcm(page_size, step_tokens) if whole_chunks else page_size


def shareable(sequence: Sequence, unit: int) -> int:
    """Return how much of a prompt can be read instead of computed: at least one token is computed."""
    return (sequence.prompt_length - 1) // unit * unit


def admissions(
    waiting: Ordered[Sequence],
    *,
    room: int,
    free_pages: int,
    page_size: int,
    served: Mapping[Flow, float] | None = None,
    unit: int | None = None,
    cache: PrefixCache | None = None,
) -> list[Admission]:
    """Return who is admitted, at most `room`, in order; changes nothing.

    `free_pages` are those that nobody owns and those that are idle in `cache`. Those whose sibling is at
    their prompt wait and stop nobody. `unit` is what `sharing_unit` says (absent: a page).

    An idle page of the cache is either read by whom is admitted or given up, never both: it counts as
    taken by the first who reads it.
    """
    served, unit = served or {}, unit or page_size
    queues: dict[Flow, deque[Sequence]] = {}
    for sequence in waiting:
        queues.setdefault(sequence.flow, deque()).append(sequence)
    levels = {flow: served.get(flow, 0.0) for flow in queues}
    admit: list[Admission] = []
    computing: set[int] = set()  # prompts that one of `admit` is to compute, by their siblings' list
    claimed: set[int] = set()  # idle pages that one of `admit` is to read
    while levels and len(admit) < room:
        flow = min(levels, key=levels.__getitem__)
        if not queues[flow]:
            del levels[flow]
            continue
        sequence = queues[flow].popleft()
        shared = shareable(sequence, unit)
        donor = _donor(sequence, shared)
        idle: set[int] = set()
        if shared and donor is None:
            siblings = sequence.siblings
            if id(siblings) in computing or any(s.pages and not s.tainted for s in siblings):
                continue
            wanted, found = shared, _cached(cache, sequence, shared // page_size)
            shared = len(found) * page_size // unit * unit
            if cache is not None:
                idle = {p for p in found[: shared // page_size] if cache.is_idle(p)} - claimed
            if shared < wanted:
                computing.add(id(siblings))
        pages = -(-sequence.longest // page_size) - shared // page_size + len(idle)
        if pages > free_pages:
            break
        free_pages -= pages
        claimed |= idle
        levels[flow] += (sequence.prompt_length - shared) / flow.weight
        admit.append(Admission(sequence, donor, shared))
    return admit


def _donor(sequence: Sequence, shared: int) -> Sequence | None:
    """Return a running sibling that has the first `shared` tokens in its pages."""
    if not shared:
        return None
    return next((s for s in sequence.siblings if s.pages and s.computed >= shared and not s.tainted), None)


def _cached(cache: PrefixCache | None, sequence: Sequence, limit: int) -> list[int]:
    """Return the pages that the cache has of a prompt's first `limit`."""
    if cache is None or sequence.chain is None:
        return []
    return cache.lookup(sequence.chain, limit)
