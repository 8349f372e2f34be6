"""Faults in and before the LM head: what they make of the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from chaos.faults.base import Fault
from chaos.faults.head_noise import HeadNoise
from chaos.faults.hidden_noise import HiddenNoise
from chaos.leases import Lease
from engine.messages import RequestMeta

if TYPE_CHECKING:
    from torch import Tensor


class HeadHook:
    """Hidden states first, then the head's weights, whose noise is drawn once for each lease."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    def keep(self, fault_ids: Iterable[str]) -> None:
        """Forget what belongs to other leases."""
        self._weights = {name: self._weights[name] for name in fault_ids if name in self._weights}

    def apply(
        self,
        leases: Iterable[Lease[Fault]],
        metas: Sequence[RequestMeta],
        choices: Sequence[int],
        steps: Sequence[int],
        *,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
    ) -> tuple[dict[int, Tensor], dict[int, list[str]]]:
        """Return the logits [vocab] of each row that changes, and the fault ids of each that was touched."""
        import torch  # noqa: PLC0415

        states: dict[int, Tensor] = {}
        noisy: dict[int, list[Lease[Fault]]] = {}
        touched: dict[int, list[str]] = {}
        for lease in leases:
            for row, (meta, choice, step) in enumerate(zip(metas, choices, steps, strict=True)):
                if not lease.matches(meta):
                    continue
                if isinstance(lease.fault, HiddenNoise) and step >= lease.fault.from_token:
                    state = states.get(row, hidden[row])
                    states[row] = lease.fault.perturb(state, lease.seed, meta.request_id, choice, step)
                elif isinstance(lease.fault, HeadNoise):
                    noisy.setdefault(row, []).append(lease)
                else:
                    continue
                touched.setdefault(row, []).append(lease.fault_id)
        changed = [
            row
            for row in touched
            if not torch.equal(states.get(row, hidden[row]), hidden[row])
            or any(isinstance(lease.fault, HeadNoise) and lease.fault.sigma for lease in noisy.get(row, []))
        ]
        if not changed:
            return {}, touched
        given = torch.stack([states.get(row, hidden[row]) for row in changed])
        logits = head(given)
        for place, row in enumerate(changed):
            for lease in noisy.get(row, []):
                logits[place] += (self._of(lease, head, hidden.shape[1]) @ given[place].bfloat16()).float()
        return dict(zip(changed, logits, strict=True)), touched

    def _of(self, lease: Lease[Fault], head: Callable[[Tensor], Tensor], width: int) -> Tensor:
        assert isinstance(lease.fault, HeadNoise)
        found = self._weights.get(lease.fault_id)
        if found is None:
            found = self._weights[lease.fault_id] = lease.fault.weights(head, width, lease.seed)
        return found
