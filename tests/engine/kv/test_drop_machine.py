"""The state machine of the tiers once more, with tokens dropped: the rest comes back, and stays dropped."""

from __future__ import annotations

import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor

from engine.kv import names
from engine.kv.loading import Tier
from engine.kv.pages import BLOCK_PAGES
from engine.kv.prefix import Entry
from tests.engine.kv.test_drop import POLICY
from tests.engine.kv.test_prefix import PAGE, submit
from tests.engine.kv.test_tiers_machine import TOLERANCE, TiersMachine

Values = tuple[Tensor, Tensor]  # [2, layers, page size, heads, width], and its dead slots [page size]


class DropMachine(TiersMachine):
    """Who reads a block must have the values that were packed under its name, with the same tokens dead."""

    packed: dict[bytes, list[Values]]

    def start(self) -> None:
        if not hasattr(self, "packed"):
            self.packed = {}
        super().start()
        self.tiers.drop = POLICY
        storing = self.tiers.storing
        store, kept = storing._store, storing._kept

        def note(last: Entry, tier: Tier | None = None) -> None:
            block = [last]
            while len(block) < BLOCK_PAGES:
                block.append(block[-1].parent)
            keep = torch.from_numpy(kept(block[::-1])).view(BLOCK_PAGES, PAGE)
            for entry, own in zip(block[::-1], keep, strict=True):
                self.packed.setdefault(entry.name, []).append((self.values([entry.page])[:, :, 0], ~own))
            store(last, tier)

        storing._store = note  # type: ignore[method-assign]

    @rule(number=st.integers(0, 1))
    def come_back(self, number: int) -> None:
        """A prompt is computed, goes down, and is asked for again."""
        prompt = self.past[number]
        for _ in range(2):
            request = submit(f"q{len(self.sent)}", prompt, max_tokens=3)
            self.engine.submit(request)
            self.sent[request.meta.request_id] = request
            for _ in range(8):
                self.step()
            cache = self.engine.roster.cache
            self.tiers.begin_step(decoding=False)
            self.tiers.step.limit = 60.0
            cache.release(cache.take(self.engine.pool.free + cache.idle))

    def values(self, pages: list[int]) -> Tensor:
        pool = self.engine.pool
        return torch.stack([pool.keys[:, pages], pool.values[:, pages]])

    def right(self) -> None:
        """In place of the invariant that values are as computed, which those after dead tokens are not."""
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        self.handed.take()
        pool = self.engine.pool
        for sequence in self.engine.roster.running:
            chain = sequence.chain
            for place, page in enumerate(sequence.pages):
                dead = torch.from_numpy(pool.dead[page].copy())
                if not dead.any():
                    continue
                assert chain is not None and not sequence.tainted
                name = names.page_names(
                    chain.salt, self.engine.roster.cache._fingerprint, sequence.tokens, PAGE
                )
                own = self.values([page])[:, :, 0]
                assert not own[:, :, dead].any()
                assert any(
                    torch.equal(dead, lost)
                    and (own - values)[:, :, ~dead].square().mean().sqrt().nan_to_num() < TOLERANCE
                    for values, lost in self.packed[name[place]]
                )
        for request_id, end in self.ends.items():
            whole = [*self.sent[request_id].token_ids, *self.tokens.get(request_id, [])]
            if end.reason == "length" and whole not in self.past and len(whole) < 120:
                self.past.append(whole)


TestDropMachine = DropMachine.TestCase
TestDropMachine.settings = hypothesis_settings(max_examples=8, stateful_step_count=25, deadline=None)
