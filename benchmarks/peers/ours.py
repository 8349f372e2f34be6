"""Our engine in this process, with and without everything that `quaver serve` hangs on it.

Signals are `off`, `budget` (the default settings) or `full` (every token, every layer). Unless
they are off, each step is told to the very observers that `quaver serve` composes (metrics, records,
spans, detectors), and their background tasks get their turn between steps. Nothing overlaps with
the engine here, so this is the dearest way to have signals.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Coroutine
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks.limits import weights_of
from benchmarks.peers.base import Prompt
from benchmarks.peers.observers import Observers
from engine.core import Engine, load_engine
from engine.messages import RequestMeta, SamplingParams, StepOutput, Submit
from engine.process.client import PING_S
from engine.settings import EngineSettings

Signals = Literal["off", "budget", "full"]
#: Weights of the `reference` backend, which knows no 8 and no 4 bits.
PLAIN_BITS = 16
#: Whatever the settings say when nobody sets them: what `quaver serve` runs.
DEFAULT_BITS = 0
#: Bits that a weight of the layers and one of the LM head takes, scale and base of blocks of 32 included.
_STORED = {PLAIN_BITS: (16.0, 32.0), 8: (9.0, 9.0), 4: (5.0, 9.0)}
#: Steps that a prompt may take while others decode: what a sequence must have to spare for each.
_SPARE = 4

T = TypeVar("T")


def bits_there() -> list[int]:
    """Return the widths of weights that this engine can be asked for, widest first."""
    return [8, 4] if "weight_bits" in EngineSettings.model_fields else [PLAIN_BITS]


def settings_of(bits: int, signals: Signals, threads: int, **more: Any) -> EngineSettings:
    """Return the settings that stand for one row of the table. The one place that knows their names."""
    # Without a bound on the time between tokens prompts are not cut, so that all sequences begin together.
    wanted: dict[str, Any] = {"threads": threads, "max_running": 32, "itl_slo_ms": 0, **more}
    if bits == PLAIN_BITS:
        wanted["backend"] = "reference"
    elif bits != DEFAULT_BITS:
        wanted["weight_bits"] = str(bits)
    wanted |= {"off": {"signal_budget": 0.0}, "budget": {}, "full": {"signal_budget": 1.0}}[signals]
    return EngineSettings(**wanted)


class Ours:
    """One model and, made when first asked for, an engine for each way of having signals."""

    def __init__(self, bits: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._bits, self._threads = bits, threads
        self._state = tempfile.TemporaryDirectory(prefix="quaver-bench-")
        self._runs: dict[tuple[Signals, bool], Run] = {}
        self._first = load_engine(settings_of(bits, "off", threads))
        gc.collect()
        gc.freeze()

    def describe(self) -> dict[str, Any]:
        """Return what the engine says of itself, and the bytes of weights that a step reads."""
        ready = self._first.ready()
        bits = PLAIN_BITS if ready.backend == "reference" else self._bits
        stored = _STORED.get(bits)
        return {
            "backend": ready.backend,
            "dtype": ready.dtype,
            "quantization": ready.quantization,
            "weight_bits": bits or "default",
            "weight_bytes": None if stored is None else weights_of(self._first.model.config, *stored),
        }

    def prefill(self, prompt: Prompt, signals: Signals) -> float:
        """Seconds from a prompt to its first token, observers included."""
        run = self._run(signals)
        return self._do(run, run.prefill(prompt))

    def prepare(self, prompts: list[Prompt], steps: int, signals: Signals, observed: bool = True) -> None:
        """Prefill `prompts`; what ran before in this engine ends."""
        run = self._run(signals, observed)
        self._do(run, run.prepare(prompts, steps))

    def decode(self, steps: int, signals: Signals, observed: bool = True) -> float:
        """Seconds that `steps` further tokens of every sequence took."""
        run = self._run(signals, observed)
        return self._do(run, run.decode(steps))

    def compare(self, prompts: list[Prompt], steps: int, block: int, pair: list[Signals]) -> list[float]:
        """Seconds that whole answers of `steps` tokens took with each of two ways of having signals.

        The two take turns of `block` engine steps, so that whatever else is at work on this machine meets
        both alike. What one's threads do in the other's turn is put where it belongs.
        """
        runs = [self._run(signals) for signals in pair]
        for run in runs:
            self._do(run, run.clear())
        seconds = [0.0, 0.0]

        def turn(mine: int, work: Coroutine[Any, Any, None]) -> None:
            other, began = runs[1 - mine], time.perf_counter()
            before = other.background_s()
            self._do(runs[mine], work)
            strange = other.background_s() - before
            seconds[mine] += time.perf_counter() - began - strange
            seconds[1 - mine] += strange

        for i in (0, 1):
            turn(i, runs[i].submit(prompts, steps))
        for first in cycle((0, 1)):
            if not any(run.at_work for run in runs):
                break
            for i in (first, 1 - first):
                turn(i, runs[i].steps(block))
        for i in (0, 1):
            turn(i, runs[i].settle())
        return seconds

    def score(self, windows: list[Prompt], path: Literal["prefill", "decode"]) -> dict[str, Any]:
        """Probabilities and likeliest tokens of whole windows, by prompts or token by token."""
        from benchmarks.peers.scoring import score  # noqa: PLC0415

        with torch.inference_mode():
            return score(self._first.model, windows, path)

    def _run(self, signals: Signals, observed: bool = True) -> Run:
        key = signals, observed and signals != "off"
        if key not in self._runs:
            settings = settings_of(self._bits, signals, self._threads)
            engine = Engine(self._first.model, settings)
            observers = Observers(Path(self._state.name) / signals, engine.ready()) if key[1] else None
            self._runs[key] = run = Run(engine, signals, observers)
            self._do(run, run.start())
        return self._runs[key]

    def _do(self, run: Run, work: Coroutine[Any, Any, T]) -> T:
        with torch.inference_mode():
            return run.loop.run_until_complete(work)


class Run:
    """An engine, what it is at, and who hears of it."""

    def __init__(self, engine: Engine, signals: Signals, observers: Observers | None) -> None:
        self.loop = asyncio.new_event_loop()  # its own, as a front has
        self._engine = engine
        self._full = signals == "full"
        self._observers = observers
        self._requests = 0
        self._charged_at, self._charged_s = time.monotonic(), 0.0
        self._emitted: dict[str, int] = {}  # tokens of each request that is not over

    @property
    def at_work(self) -> bool:
        return self._engine.has_work

    def background_s(self) -> float:
        """Processor seconds of the observers' own threads so far."""
        return 0.0 if self._observers is None else self._observers.background_s()

    async def start(self) -> None:
        if self._observers is not None:
            await self._observers.start()

    async def prefill(self, prompt: Prompt) -> float:
        await self.clear()
        began = time.perf_counter()
        self._submit(prompt, 2)  # two tokens, so that the end of the request is not in the measured time
        while not (await self._step()).request_ids:
            pass
        return time.perf_counter() - began

    async def prepare(self, prompts: list[Prompt], steps: int) -> None:
        await self.clear()
        spare = _SPARE * len(prompts)  # those that are prefilled first decode while the others are
        for prompt in prompts:
            self._submit(prompt, steps + 1 + spare)
        while not all(self._emitted.values()):
            await self._step()

    async def decode(self, steps: int) -> float:
        count = len(self._emitted)
        began = time.perf_counter()
        for _ in range(steps):
            output = await self._step()
            assert len(output.request_ids) == count, "a sequence is over before the measurement"
        return time.perf_counter() - began

    async def submit(self, prompts: list[Prompt], steps: int) -> None:
        for prompt in prompts:
            self._submit(prompt, steps)

    async def steps(self, count: int) -> None:
        for _ in range(count):
            if self._engine.has_work:
                await self._step()

    async def settle(self) -> None:
        if self._observers is not None:
            self._observers.settle()

    def _submit(self, prompt: Prompt, tokens: int) -> None:
        self._requests += 1
        request = Submit(
            meta=RequestMeta(request_id=f"bench-{self._requests}"),
            token_ids=prompt,
            params=SamplingParams(max_tokens=tokens, ignore_eos=True, full_signals=self._full),
        )
        self._engine.submit(request)
        self._emitted[request.meta.request_id] = 0
        if self._observers is not None:
            self._observers.started(request)

    async def _step(self) -> StepOutput:
        output = self._engine.step()
        for request_id in output.request_ids:
            self._emitted[request_id] += 1
        for finish in output.finished:
            del self._emitted[finish.request_id]
        if self._observers is not None:
            self._observers.heard(output)
            self._charge()
        await asyncio.sleep(0)  # the front's event loop turns after each step, whoever listens
        return output

    def _charge(self) -> None:
        """Tell the engine what its observers took, as often as a front does."""
        assert self._observers is not None
        now = time.monotonic()
        if now - self._charged_at > PING_S:
            spent = self._observers.spent_s()
            self._engine.charge(spent - self._charged_s)
            self._charged_at, self._charged_s = now, spent

    async def clear(self) -> None:
        for request_id in self._emitted:
            self._engine.abort(request_id)
        while self._engine.has_work:
            await self._step()
