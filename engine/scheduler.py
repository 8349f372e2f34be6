"""What the next step computes: one pure function over the queue and what runs.

A sequence is admitted when the pages for its whole prompt and its longest answer are free, so
nothing that runs is ever evicted and no order of arrivals can deadlock. Admission is first
come, first served. Decodes go first, then prompts in chunks, within one budget of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from engine.messages import Submit


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice being generated. `tokens` is prompt + answer; the first `computed` are in the pages."""

    request: Submit
    arrived: float
    tokens: list[int]
    prompt_length: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Request id and choice."""
        return self.request.meta.request_id, self.request.choice

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def longest(self) -> int:
        """Tokens it may come to hold."""
        return self.prompt_length + self.request.params.max_tokens


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
class Plan:
    """Sequences to admit, in order, and the chunks of the step, decodes first."""

    admit: list[Sequence]
    chunks: list[Chunk]


def plan(
    running: Ordered[Sequence],
    waiting: Ordered[Sequence],
    *,
    step_tokens: int,
    max_running: int,
    free_pages: int,
    page_size: int,
    whole_chunks: bool = False,
) -> Plan:
    """Choose the work of the next step; changes nothing.

    With `whole_chunks`, chunks end at multiples of `step_tokens` or at the prompt's end whatever
    else runs (deterministic mode), so a step may exceed the budget by its decodes.
    """
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for sequence in running:
        pending = len(sequence.tokens) - sequence.computed
        (decodes if pending == 1 and sequence.emitted else prefills).append(sequence)
    chunks = [Chunk(s, s.computed, 1) for s in decodes]

    admit: list[Sequence] = []
    for sequence in waiting:
        pages = -(-sequence.longest // page_size)
        if len(running) + len(admit) == max_running or pages > free_pages:
            break
        free_pages -= pages
        admit.append(sequence)

    budget = step_tokens if whole_chunks else max(step_tokens - len(chunks), 1)
    for sequence in [*prefills, *admit]:
        pending = len(sequence.tokens) - sequence.computed
        count = min(pending, step_tokens if whole_chunks else budget)
        if count > budget:
            break
        chunks.append(Chunk(sequence, sequence.computed, count))
        budget -= count
        if budget == 0:
            break
    return Plan(admit, chunks)
