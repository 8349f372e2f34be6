"""Faults inside the model process: `quaver serve` names this module's `factory` to the worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chaos.faults.base import Fault
from chaos.faults.head_noise import HeadNoise
from chaos.faults.hidden_noise import HiddenNoise
from chaos.faults.kv_pages import PageFault
from chaos.faults.noise import Noise
from chaos.faults.registry import MODEL_KINDS
from chaos.faults.sampler import Sampler
from chaos.faults.slow_prefill import SlowPrefill
from chaos.faults.tier_disk import TierFault
from chaos.head_hook import HeadHook
from chaos.leases import Lease, Leases
from chaos.selector import Selector, parse_selector
from chaos.tier_hook import StoreFaults
from engine.messages import AttachFault, RequestMeta, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from chaos.tier_files import TierFiles
    from engine import scheduler
    from engine.hooks import ModelHook
    from engine.kv.disk import DiskStore
    from engine.kv.disk_files import Files
    from engine.kv.host import HostStore
    from engine.models.config import ModelConfig
    from engine.roster import Roster


class ModelFaults(Leases[Fault]):
    """Implements `engine.hooks.ModelHook`: faults at every place of a step."""

    on_tiers = False
    on_prompts = False
    on_pages = False
    on_head = False
    on_logits = False
    on_sampling = False

    def __init__(self) -> None:
        super().__init__(MODEL_KINDS)
        self._struck: dict[str, dict[tuple[str, int], int]] = {}
        self._held: dict[str, dict[tuple[str, int], float]] = {}
        self._heads = HeadHook()
        self._stores = StoreFaults()
        self._files: TierFiles | None = None

    def attach(self, message: AttachFault) -> None:
        """Take a fault into force; raises ValueError when anything in the message is not valid."""
        kind = MODEL_KINDS.get(message.kind)
        selected = parse_selector(message.selector) != Selector()
        if kind is not None and kind.scope == "process" and selected:
            raise ValueError(f"{kind.kind} acts on the whole model process and takes no selector")
        super().attach(message)

    def files(self) -> Files:
        """Return the file system as the disk tier is to use it: with the faults that are in force."""
        from chaos.tier_files import TierFiles  # noqa: PLC0415 (reads LZ4, which few servers need)

        self._files = TierFiles(self)
        return self._files

    def tiers(self, host: HostStore | None, disk: DiskStore | None) -> None:
        """Strike what the stores of the tiers hold."""
        self._stores.act(self.chain(time.monotonic()), host, disk)

    def hold(
        self, running: Sequence[scheduler.Sequence], now: float
    ) -> tuple[set[tuple[str, int]], dict[str, list[str]]]:
        """Return whose prompt waits at `now`, and the fault ids by the id of each request that was met.

        A prompt is held once by each fault, as long as its tokens say, and never longer than the fault lasts.
        """
        held: set[tuple[str, int]] = set()
        touched: dict[str, list[str]] = {}
        for lease in self.chain(now):
            if not isinstance(lease.fault, SlowPrefill):
                continue
            known = self._held.get(lease.fault_id, {})
            until: dict[tuple[str, int], float] = {}
            for sequence in running:
                if (
                    sequence.decoding
                    or sequence.loading is not None
                    or not lease.matches(sequence.request.meta)
                ):
                    continue
                wait = lease.fault.delay_ms / 1000 * sequence.pending
                until[sequence.key] = known.get(sequence.key, now + wait)
                touched.setdefault(sequence.key[0], []).append(lease.fault_id)
                if until[sequence.key] > now:
                    held.add(sequence.key)
            self._held[lease.fault_id] = until
        return held, touched

    def pages(self, roster: Roster, config: ModelConfig) -> dict[str, list[str]]:
        """Strike pages of sequences that decode; return the fault ids by the id of each request struck.

        What is struck belongs to its sequence alone and is tainted first; where there is no room for that the
        fault waits.
        """
        touched: dict[str, list[str]] = {}
        running = {sequence.key for sequence in roster.running}
        for lease in self.chain(time.monotonic()):
            if isinstance(lease.fault, PageFault):
                known = self._struck.get(lease.fault_id, {})
                done = {key: count for key, count in known.items() if key in running}
                self._struck[lease.fault_id] = done
                for sequence in _strike(lease, lease.fault, roster, config, done):
                    touched.setdefault(sequence.key[0], []).append(lease.fault_id)
        return touched

    def head(
        self,
        metas: Sequence[RequestMeta],
        choices: Sequence[int],
        steps: Sequence[int],
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
    ) -> tuple[dict[int, Tensor], dict[int, list[str]]]:
        """Return the logits [vocab] of each row that changes, and the fault ids of each that was touched."""
        leases = self.chain(time.monotonic())
        return self._heads.apply(leases, metas, choices, steps, hidden=hidden, head=head)

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
            if not isinstance(fault, Noise):
                continue
            for row, (meta, choice, step) in enumerate(zip(metas, choices, steps, strict=True)):
                if step < fault.from_token or not lease.matches(meta):
                    continue
                if result is logits:
                    result = logits.clone()
                result[row] = fault.perturb(result[row], lease.seed, meta.request_id, choice, step)
                changed.setdefault(row, []).append(lease.fault_id)
        return result, changed

    def sampling(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], params: Sequence[SamplingParams]
    ) -> tuple[list[SamplingParams], dict[int, list[str]]]:
        """Return how each row is sampled and, for each row that was touched, the fault ids."""
        result = list(params)
        touched: dict[int, list[str]] = {}
        for lease in self.chain(time.monotonic()):
            if not isinstance(lease.fault, Sampler):
                continue
            for row, (meta, choice) in enumerate(zip(metas, choices, strict=True)):
                if lease.matches(meta):
                    result[row] = lease.fault.forced(result[row], lease.seed, meta.request_id, choice)
                    touched.setdefault(row, []).append(lease.fault_id)
        return result, touched

    def _changed(self) -> None:
        super()._changed()
        kinds = [type(lease.fault) for lease in self._chain]
        self.on_tiers = any(issubclass(kind, TierFault) for kind in kinds)
        self.on_pages = any(issubclass(kind, PageFault) for kind in kinds)
        self.on_prompts = SlowPrefill in kinds
        self.on_head = HiddenNoise in kinds or HeadNoise in kinds
        self.on_logits = Noise in kinds
        self.on_sampling = Sampler in kinds
        self._struck = {fault_id: self._struck.get(fault_id, {}) for fault_id in self._leases}
        self._stores.let_go(self._leases)
        if self._files is not None:
            self._files.let_go()
        self._held = {fault_id: self._held.get(fault_id, {}) for fault_id in self._leases}
        self._heads.keep(self._leases)


def _strike(
    lease: Lease[Fault],
    fault: PageFault,
    roster: Roster,
    config: ModelConfig,
    done: dict[tuple[str, int], int],
) -> list[scheduler.Sequence]:
    """Let one fault act; returns the sequences struck, and counts in `done` the full pages each had then."""
    pool = roster.pool
    places: dict[tuple[str, int], list[int]] = {}
    for sequence in roster.running:
        if (
            sequence.decoding
            and sequence.emitted >= fault.from_token
            and lease.matches(sequence.request.meta)
        ):
            places[sequence.key] = fault.due(sequence, pool, done.get(sequence.key, 0), lease.seed)
    struck: list[scheduler.Sequence] = []
    for group in fault.groups([sequence for sequence in roster.running if places.get(sequence.key)]):
        if all(roster.seclude(sequence) for sequence in group):
            fault.strike(group, [places[sequence.key] for sequence in group], pool, config, lease.seed)
            done |= {sequence.key: sequence.computed // pool.page_size for sequence in group}
            struck += group
    return struck


def factory() -> ModelHook:
    """Return the hook of a fresh model process: nothing in force."""
    return ModelFaults()
