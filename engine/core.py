"""The engine: submit, abort, step. Token ids in, one `StepOutput` a step out.

One thread owns an engine. It runs alone in the model process, or in any process for tests,
benchmarks and notebooks, with the same code.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine import sampler
from engine.batching import batch_of
from engine.budget import Budget, Grant, Row
from engine.emitted import Emitted, columns
from engine.hooked import Hooked, joined
from engine.hooks import ModelHook
from engine.kv import names
from engine.kv.figures import Figures
from engine.kv.pages import PagePool
from engine.kv.policy import Cost, Recompute
from engine.kv.prefix import PrefixCache
from engine.kv.tiers_open import open_tiers
from engine.messages import (
    EngineStats,
    Finish,
    FinishReason,
    Ready,
    StepOutput,
    Submit,
)
from engine.models.native import NativeLlama
from engine.models.step import Floats, Ints, Model, Output
from engine.roster import Roster
from engine.scheduler import Chunk, Sequence
from engine.settings import EngineSettings, cores
from engine.signals import Aggregates, head_sums, token_signals

MAX_TOP_LOGPROBS = 20
_WAIT_S = 0.01  # of a step that has nothing to compute, for what is being loaded


class RequestError(ValueError):
    """A request that can never run; `code` is the API's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    """Continuous batching over a paged KV pool.

    Its `roster` says who waits and who runs; the engine computes what the roster plans. `source` names
    the model's weights (`engine.kv.names.source_of`).
    """

    def __init__(
        self, model: Model, settings: EngineSettings, hook: ModelHook | None = None, source: bytes = b""
    ) -> None:
        config = model.config
        self.model = model
        self.settings = settings
        self.hooked = Hooked(hook)
        self.max_context = min(settings.max_context, config.max_context)
        self.pool = PagePool(
            layers=config.layers,
            pages=settings.kv_tokens // settings.page_size,
            page_size=settings.page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self.budget = Budget(settings.signal_budget, config.layers)
        recompute = Recompute.of(config, settings.page_size)
        fingerprint = _fingerprint(model, settings, source)
        cache = PrefixCache(self.pool, fingerprint, Cost(recompute))
        self.tiers = open_tiers(
            settings,
            config,
            cache,
            fingerprint=fingerprint,
            recompute=recompute,
            kernels=model.kernels if isinstance(model, NativeLlama) else None,
            drops=model.drops,
            files=hook.files if hook is not None else None,
        )
        self.roster = Roster(
            self.pool,
            step_tokens=settings.step_tokens,
            max_running=settings.max_running,
            itl_slo_s=settings.itl_slo_ms / 1000,
            whole_chunks=settings.deterministic,
            cache=cache,
            recompute=recompute,
            tiers=self.tiers,
        )
        self._sources: dict[tuple[str, int], torch.Generator | None] = {}
        self._aggregates: dict[tuple[str, int], Aggregates] = {}
        self._touched: dict[str, set[str]] = {}
        self._finished: list[Finish] = []
        self._steps = 0
        self.figures = Figures(self.roster)

    @property
    def hook(self) -> ModelHook | None:
        """The faults of this engine."""
        return self.hooked.hook

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or report."""
        return bool(self.roster.everyone or self._finished)

    def ready(self) -> Ready:
        """Describe the engine."""
        config = self.model.config
        return Ready(
            pid=os.getpid(),
            model=config.name,
            quantization=config.quantization,
            dtype=str(self.model.dtype).removeprefix("torch."),
            backend=self.model.name,
            layers=config.layers,
            heads=config.heads,
            vocab=config.vocab,
            max_context=self.max_context,
            kv_pages=self.pool.pages,
            page_size=self.pool.page_size,
            kv_token_bytes=self.pool.token_bytes,
            kv_block_tokens=0 if self.tiers is None else self.tiers.layout.tokens,
            kv_tiers=[] if self.tiers is None else [tier.name for tier in self.tiers.tiers],
            kv_policy={} if self.tiers is None else self.tiers.policy(),
            deterministic=self.settings.deterministic,
        )

    def submit(self, request: Submit) -> None:
        """Queue one choice; raises RequestError when it can never run."""
        self._validate(request)
        if not self.settings.prefix_cache:
            request = msgspec.structs.replace(request, cache_salt=b"")
        sequence = Sequence(
            request=request,
            arrived=time.monotonic(),
            tokens=list(request.token_ids),
            prompt_length=len(request.token_ids),
        )
        if sequence.key in self._aggregates:
            raise RequestError("duplicate_request", f"request {sequence.key} is already running")
        self._aggregates[sequence.key] = Aggregates()
        self._sources[sequence.key] = sampler.generator(request.params, request.choice)
        self.roster.add(sequence)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a choice of a request, or every one, waiting or running; unknown ones are ignored."""
        for sequence in self.roster.everyone:
            if sequence.key[0] == request_id and choice in (None, sequence.key[1]):
                self._finish(sequence, "abort")

    def step(self) -> StepOutput:
        """Compute one step and report what it emitted and what ended, aborts included."""
        began = time.monotonic()
        self.hooked.begin()
        self.hooked.tiers(self.tiers)
        chunks = self.roster.plan(began, self.hooked.hold())
        self.hooked.strike(self.roster, self.model)
        asked = time.perf_counter()
        grant = self._grant(chunks)
        granted_s = time.perf_counter() - asked
        groups = [[chunk] for chunk in chunks] if self.settings.deterministic else [chunks]
        computed = [self._compute(group, grant) for group in groups if group]
        calls = [call for call in computed if call is not None]
        self.roster.keep(chunks)
        for call in calls:
            self._account(call, grant.stride)
        found = columns(calls)
        touched = self._mark(calls)
        for call in calls:
            for sequence in call.sequences:
                self._end_if_over(sequence)
        self._steps += 1
        moving_s = self._move(waiting=not chunks)
        if not chunks:
            self.hooked.wait()
        duration = time.monotonic() - began
        found["detail_s"] = granted_s + found.get("detail_s", 0.0)
        self.budget.settle(grant, duration, found["detail_s"])
        self.roster.learn(chunks, duration - moving_s)
        return StepOutput(
            step=self._steps,
            time=time.time(),
            duration_s=duration,
            prefill_tokens=sum(c.count for c in chunks if c.start < c.sequence.prompt_length),
            layers=grant.layers,
            layer_stride=grant.stride,
            heads_per_layer=self.model.config.heads,
            touched=touched,
            finished=self._take_finished(),
            stats=self.stats(),
            tiers=self.figures.tiers(),
            kv_ages=self.figures.ages(),
            **found,
        )

    def report(self) -> StepOutput | None:
        """Tell what changes between steps: figures of the KV tiers, whose threads go on. None: not yet."""
        tiers, ages = self.figures.tiers(), self.figures.ages()
        if not tiers and not ages:
            return None
        return self.aside(tiers=tiers, kv_ages=ages)

    def aside(self, **fields: Any) -> StepOutput:
        """Return a report between steps with some `fields` of StepOutput."""
        return StepOutput(
            step=self._steps,
            time=time.time(),
            duration_s=0.0,
            prefill_tokens=0,
            stats=self.stats(),
            **fields,
        )

    def charge(self, seconds: float) -> None:
        """Have the budget pay for what signals took elsewhere, where that is not free: on the cores that the
        model's threads fill."""
        if self.settings.cores >= cores():
            self.budget.charge(seconds)

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        cache = self.roster.cache
        return EngineStats(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            pages_used=self.pool.pages - self.pool.free - cache.idle,
            pages_cached=cache.idle,
            pages_total=self.pool.pages,
            prefix_hits=cache.counters.hits,
            prefix_misses=cache.counters.misses,
            prefix_evictions=cache.counters.evictions,
            prefix_collisions=cache.counters.collisions,
            prefix_saved_s=self.roster.saved_s,
        )

    def close(self) -> None:
        """End what runs and close the stores of the KV cache; after it nothing is submitted or computed."""
        for sequence in self.roster.everyone:
            self._finish(sequence, "abort")
        if self.tiers is not None:
            self.tiers.close()

    def check(self) -> None:
        """Raise AssertionError if the roster's books are wrong, or anything outlives its sequence."""
        self.roster.check()
        keys = {sequence.key for sequence in self.roster.everyone}
        assert self._aggregates.keys() == keys == self._sources.keys(), "state outlives its sequence"
        assert self._touched.keys() <= {key[0] for key in keys}, "fault marks outlive their request"

    def _validate(self, request: Submit) -> None:
        params, prompt = request.params, request.token_ids
        if not prompt:
            raise RequestError("invalid_prompt", "the prompt is empty: it needs at least one token")
        if params.max_tokens < 1:
            raise RequestError("invalid_max_tokens", "max_tokens must be at least 1")
        vocab = self.model.config.vocab
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError("invalid_prompt", f"token ids must be in 0 … {vocab - 1}")
        if any(not 0 <= token < vocab for token in params.logit_bias):
            raise RequestError("invalid_logit_bias", f"logit_bias token ids must be in 0 … {vocab - 1}")
        wanted = len(prompt) + params.max_tokens
        if wanted > self.max_context:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, "
                f"together {wanted}; this model takes {self.max_context}",
            )
        if self.pool.needed(wanted) > self.pool.pages:
            raise RequestError(
                "context_length_exceeded",
                f"{wanted} tokens do not fit the KV pool of {self.pool.pages * self.pool.page_size}; "
                "raise QUAVER_KV_TOKENS or send less",
            )
        if not 0 <= params.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError("invalid_top_logprobs", f"top_logprobs must be 0 … {MAX_TOP_LOGPROBS}")

    def _move(self, waiting: bool) -> float:
        """Copy pages ahead; with nothing to compute, wait for a load. Return the seconds all moving took."""
        if self.tiers is None:
            return 0.0
        self.tiers.storing.write_ahead()
        if waiting:
            self.tiers.wait(_WAIT_S)
        return self.tiers.step.spent

    def _take_finished(self) -> list[Finish]:
        finished, self._finished = self._finished, []
        return finished

    def _grant(self, chunks: list[Chunk]) -> Grant:
        """Ask the budget which of the step's emitting sequences get layer detail, and of which layers."""
        return self.budget.grant(
            [
                Row(
                    chunk.sequence.key,
                    chunk.sequence.emitted,
                    self._aggregates[chunk.sequence.key].risk.score(),
                    chunk.sequence.request.params.full_signals,
                )
                for chunk in chunks
                if chunk.emits
            ]
        )

    def _compute(self, chunks: list[Chunk], grant: Grant) -> Emitted | None:
        """Run one model call over `chunks` and append a token to each sequence that emits.

        Returns None when none does.
        """
        rows = [chunk.sequence for chunk in chunks if chunk.emits]
        wanted = ((i, grant.samples.get(sequence.key)) for i, sequence in enumerate(rows))
        samples = {i: sample for i, sample in wanted if sample is not None}
        scored = self.tiers.drop.window if self.tiers is not None and self.tiers.drop is not None else 0
        batch = batch_of(
            chunks,
            grant.layers,
            [rows[i] for i in samples],
            self.pool.page_size,
            scored=scored,
            hidden=self.hooked.wants_hidden,
        )
        self.pool.revive(batch.slots)
        output = self.model.step(batch, self.pool, [i for i, s in enumerate(rows) if self._needs_logits(s)])
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        for span, mass in output.mass.items():
            chunks[span].sequence.add_mass(mass)
        if not rows:
            return None
        output, altered = self.hooked.head(rows, output, self.model)
        tokens, signals, touched = self._choose(rows, output)
        touched = joined(altered, touched)
        now = time.monotonic()
        for sequence, token in zip(rows, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.first_token = sequence.first_token or now
        return Emitted(rows, output, tokens, signals, samples, touched)

    def _needs_logits(self, sequence: Sequence) -> bool:
        """Whether a row's token cannot be told from the head's statistics alone."""
        params = sequence.request.params
        return self.hooked.wants_logits or params.temperature > 0 or sampler.changes_logits(params)

    def _choose(self, rows: list[Sequence], output: Output) -> tuple[Ints, Floats, dict[int, list[str]]]:
        """Return each row's token [R], its TOKEN_SIGNALS [R, 7] and the faults that changed it."""
        tokens = output.ids[:, 0].copy()
        kept = [rows[i] for i in output.kept]
        if not kept:
            return tokens, token_signals(output, tokens), {}
        adjusted, touched = self._adjust(kept, output.logits)
        params, forced = self.hooked.sampling(kept)
        for sequence, wanted in zip(kept, params, strict=True):
            if self._sources[sequence.key] is None:  # a fault has made a greedy request draw
                self._sources[sequence.key] = sampler.generator(wanted, sequence.request.choice)
        sources = [self._sources[s.key] for s in kept]
        tokens[output.kept] = sampler.sample(adjusted, params, sources, self.model.ops.draw)
        signals = token_signals(output, tokens)
        # Rows that were touched but not changed (noise of σ 0) keep the very same figures.
        changed = [
            i
            for i, p in enumerate(params)
            if (i in touched or sampler.changes_logits(p)) and not torch.equal(adjusted[i], output.logits[i])
        ]
        if changed:
            places = [output.kept[i] for i in changed]
            post = self.model.ops.token_statistics(adjusted[changed], torch.from_numpy(tokens[places]).long())
            signals[places, 5:] = post[:, [0, 4]].numpy()
        acted = joined(touched, forced)
        return tokens, signals, {output.kept[i]: faults for i, faults in acted.items()}

    def _adjust(self, rows: list[Sequence], logits: Tensor) -> tuple[Tensor, dict[int, list[str]]]:
        """Apply faults, then bias and penalties. `logits` itself is never written to."""
        adjusted, touched = self.hooked.logits(rows, logits)
        for i, sequence in enumerate(rows):
            params = sequence.request.params
            if sampler.changes_logits(params):
                adjusted = adjusted.clone() if adjusted is logits else adjusted
                split = sequence.prompt_length
                adjusted[i] = sampler.adjust(
                    adjusted[i], params, sequence.tokens[:split], sequence.tokens[split:]
                )
        return adjusted, touched

    def _account(self, call: Emitted, stride: int) -> None:
        """Add what was emitted to the aggregates of its sequences."""
        for sequence, row in zip(call.sequences, call.signals.tolist(), strict=True):
            self._aggregates[sequence.key].add(row)
        detail = call.output.detail
        if detail is not None:
            began = time.perf_counter()
            rates = [sample.rate for sample in call.samples.values()]
            sums = head_sums(detail.heads, rates, stride)
            for i, total, weight in zip(call.samples, *sums, strict=True):
                self._aggregates[call.sequences[i].key].add_heads(total, weight)
            call.detail_s = detail.seconds + time.perf_counter() - began

    def _mark(self, calls: list[Emitted]) -> dict[str, list[str]]:
        """Return, for each request, the faults that acted on it for the first time."""
        acted = [*self.hooked.acted.items()]
        for call in calls:
            acted += ((call.sequences[i].key[0], faults) for i, faults in call.touched.items())
        first: dict[str, list[str]] = {}
        for request_id, faults in acted:
            known = self._touched.setdefault(request_id, set())
            new = [fault for fault in faults if fault not in known]
            known.update(new)
            if new:
                first.setdefault(request_id, []).extend(new)
        return first

    def _end_if_over(self, sequence: Sequence) -> None:
        params, last = sequence.request.params, sequence.tokens[-1]
        eos = () if params.ignore_eos else self.model.config.eos_ids
        if last in eos or last in params.stop_token_ids:
            self._finish(sequence, "stop")
        elif sequence.emitted == params.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, give its pages back and queue its Finish."""
        self.roster.remove(sequence)
        now = time.monotonic()
        admitted = sequence.admitted or now
        request_id, choice = sequence.key
        aggregates = self._aggregates.pop(sequence.key)
        del self._sources[sequence.key]
        if all(key[0] != request_id for key in self._aggregates):
            self._touched.pop(request_id, None)
        self._finished.append(
            Finish(
                request_id=request_id,
                choice=choice,
                reason=reason,
                prompt_tokens=sequence.prompt_length,
                cached_tokens=sequence.shared,
                tier_tokens=sequence.tier_tokens,
                loading_s=sequence.loading_s,
                completion_tokens=sequence.emitted,
                queued_s=admitted - sequence.arrived,
                prefill_s=(sequence.first_token or now) - admitted,
                aggregates=aggregates.as_dict(),
            )
        )


def load_engine(settings: EngineSettings, hook: ModelHook | None = None) -> Engine:
    """Resolve and load the model that `settings` name and build an engine around it."""
    from engine.models import store  # noqa: PLC0415 (reads files; not needed to type-check callers)
    from engine.models.backend import model_of  # noqa: PLC0415
    from engine.models.loader import load  # noqa: PLC0415

    path = store.resolve(settings.model, settings.model_cache)
    return Engine(model_of(load(path), settings), settings, hook, names.source_of(path))


def _fingerprint(model: Model, settings: EngineSettings, source: bytes) -> bytes:
    """Name all that a page's values depend on beside its tokens."""
    return names.fingerprint(
        model.config,
        source=source,
        kernels=f"{model.name} {settings.weight_bits} {settings.compensation}",
        dtype=str(model.dtype),
        page_size=settings.page_size,
    )
