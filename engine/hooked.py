"""The places of a step where a fault hook may act, as the engine calls them. Without a hook, or with nothing
in force, each costs a look at a flag."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.hooks import ModelHook
from engine.kernels.reference import entropy
from engine.kv.tiers import Tiers
from engine.messages import SamplingParams
from engine.models.step import Model, Output, with_rows
from engine.roster import Hold, Roster
from engine.scheduler import Sequence

Touched = dict[int, list[str]]
_WAIT_S = 0.01  # of a step in which all that could be computed is held


class Hooked:
    """`hook`, asked only where something is in force. `acted`: the faults of this step, by request."""

    def __init__(self, hook: ModelHook | None) -> None:
        self.hook = hook
        self.acted: dict[str, list[str]] = {}
        self._held = False

    def begin(self) -> None:
        """Begin a step."""
        self.acted = {}
        self._held = False

    def tiers(self, tiers: Tiers | None) -> None:
        """Let faults act on blocks of the tiers."""
        if tiers is not None and self.hook is not None and self.hook.on_tiers:
            self.hook.tiers(tiers.host, tiers.disk)

    def hold(self) -> Hold | None:
        """Return what names the prompts that wait in this step; None when none does."""
        hook = self.hook
        if hook is None or not hook.on_prompts:
            return None

        def held(running: list[Sequence], now: float) -> set[tuple[str, int]]:
            keys, touched = hook.hold(running, now)
            self._take(touched)
            self._held = bool(keys)
            return keys

        return held

    def wait(self) -> None:
        """Wait a little, in a step that computed nothing because of a hold."""
        if self._held:
            time.sleep(_WAIT_S)

    def strike(self, roster: Roster, model: Model) -> None:
        """Let faults act on KV pages."""
        if self.hook is not None and self.hook.on_pages:
            self._take(self.hook.pages(roster, model.config))

    @property
    def wants_hidden(self) -> bool:
        """Whether `head` will look at the rows' hidden states."""
        return self.hook is not None and self.hook.on_head

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of every row are needed."""
        return self.hook is not None and (self.hook.on_logits or self.hook.on_sampling)

    def head(self, rows: list[Sequence], output: Output, model: Model) -> tuple[Output, Touched]:
        """Return the output with the distributions that faults in the LM head or before it make."""
        if self.hook is None or not self.hook.on_head or output.hidden is None:
            return output, {}
        changed, touched = self.hook.head(
            [s.request.meta for s in rows],
            [s.request.choice for s in rows],
            [s.emitted for s in rows],
            output.hidden,
            model.head,
        )
        if changed:
            logits = torch.stack(list(changed.values()))
            output = with_rows(output, list(changed), logits, entropy(logits))
        return output, touched

    def logits(self, rows: list[Sequence], logits: Tensor) -> tuple[Tensor, Touched]:
        """Return the logits to sample from; the argument is not written to."""
        if self.hook is None or not self.hook.on_logits:
            return logits, {}
        return self.hook.logits(
            [s.request.meta for s in rows],
            [s.request.choice for s in rows],
            [s.emitted for s in rows],
            logits,
        )

    def sampling(self, rows: list[Sequence]) -> tuple[list[SamplingParams], Touched]:
        """Return how each row is sampled."""
        params = [s.request.params for s in rows]
        if self.hook is None or not self.hook.on_sampling:
            return params, {}
        return self.hook.sampling([s.request.meta for s in rows], [s.request.choice for s in rows], params)

    def _take(self, touched: dict[str, list[str]]) -> None:
        for request_id, faults in touched.items():
            self.acted.setdefault(request_id, []).extend(faults)


def joined(*parts: Touched) -> Touched:
    """Return the faults of each row, in order."""
    result: Touched = {}
    for part in parts:
        for row, faults in part.items():
            result[row] = [*result.get(row, []), *faults]
    return result
