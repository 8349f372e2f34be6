"""Faults inside the model process: `quaver serve` names this module's `factory` to the worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos.faults.noise import Noise
from chaos.leases import Leases
from engine.messages import RequestMeta

if TYPE_CHECKING:
    from torch import Tensor

    from engine.hooks import ModelHook


class LogitHook(Leases[Noise]):
    """Implements `engine.hooks.ModelHook` for the faults that act on logits."""

    def __init__(self) -> None:
        super().__init__({Noise.kind: Noise})

    def logits(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], steps: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, dict[int, list[str]]]:
        """Return logits to sample from and, for each changed row, the fault ids.

        With no match the argument itself comes back; else a copy in which only matched rows differ.
        """
        changed: dict[int, list[str]] = {}
        result = logits
        for lease in self.chain(time.monotonic()):
            fault = lease.fault
            for row, (meta, choice, step) in enumerate(zip(metas, choices, steps, strict=True)):
                if step < fault.from_token or not lease.matches(meta):
                    continue
                if result is logits:
                    result = logits.clone()
                result[row] = fault.perturb(result[row], lease.seed, meta.request_id, choice, step)
                changed.setdefault(row, []).append(lease.fault_id)
        return result, changed


def factory() -> ModelHook:
    """Return the hook of a fresh model process: nothing in force."""
    return LogitHook()
