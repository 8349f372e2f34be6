"""The scheduler under load, simulated: elastic pool against fixed pools and an unbounded queue.

    python -m benchmarks.scheduler            # the table, and benchmarks/results/scheduler.json
    python -m benchmarks.scheduler --measure  # first measure what a step costs on this machine's engine

Admission, plans and prediction are the engine's own code on a virtual clock; only the time of a step
is drawn, from a formula fitted to measured steps (`benchmarks.step_cost`). Arrivals are those of
benchmarks/data/arrivals.json, at a load relative to what the engine can do: 1.0 is as much work a
second as it gets through with a full batch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.arrivals import DATA
from benchmarks.step_cost import seconds_of
from engine.admission import Door
from engine.api.settings import ApiSettings
from engine.kv.pages import PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.roster import Roster
from engine.scheduler import Sequence
from engine.settings import EngineSettings

RESULT = Path(__file__).with_name("results") / "scheduler.json"
FIRST_TOKEN_SLO_S = 2.0
TIMEOUT_S = 30.0
LOADS = {"steady": 0.7, "bursts": 0.8, "ramp": 1.1, "flood": 1.2}
_FOREVER = 1e9


@dataclass(frozen=True)
class Policy:
    """What is compared. Defaults are the server's."""

    pool: str = "elastic"
    queue: int = EngineSettings.model_fields["max_waiting"].default
    delay_s: float = ApiSettings.model_fields["queue_delay_s"].default
    itl_slo_s: float = EngineSettings.model_fields["itl_slo_ms"].default / 1000
    fair: bool = True
    offered: bool = False  # the prediction counts those turned away too
    pool_limits_batch: bool = False  # at most so many run as the pool has tokens


POLICIES = {
    "elastic (default)": Policy(),
    "fixed pool": Policy(pool="fixed"),
    "elastic, no delay limit": Policy(delay_s=_FOREVER),
    "fixed, no delay limit": Policy(pool="fixed", delay_s=_FOREVER),
    "elastic, at most 2 s": Policy(delay_s=2.0),
    "elastic, queue of 8": Policy(queue=8, delay_s=_FOREVER),
    "fixed, queue of 8": Policy(pool="fixed", queue=8, delay_s=_FOREVER),
    "fixed, unbounded queue": Policy(pool="fixed", queue=1_000_000, delay_s=_FOREVER),
    "elastic, prompts uncut": Policy(itl_slo_s=0.0),
    "elastic, first come first served": Policy(fair=False),
    "elastic, load as offered": Policy(offered=True),
    "pool limits the batch too": Policy(pool_limits_batch=True),
}


@dataclass
class Answer:
    """One request in the simulation; times in virtual seconds."""

    at: float
    tenant: str
    sequence: Sequence
    tokens: int
    shed: str | None = None
    emitted: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.emitted[0] - self.at

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.emitted, self.emitted[1:], strict=False)]


class Simulation:
    """One policy, one trace."""

    def __init__(self, policy: Policy, cost: dict[str, Any], rows: list[list[Any]], rate: float) -> None:
        settings = EngineSettings()
        pool = PagePool(
            layers=1,
            pages=settings.kv_tokens // settings.page_size,
            page_size=settings.page_size,
            kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
        )
        self.policy, self.cost, self.max_running = policy, cost, settings.max_running
        self.roster = Roster(
            pool,
            step_tokens=settings.step_tokens,
            max_running=settings.max_running,
            itl_slo_s=policy.itl_slo_s,
            whole_chunks=False,
        )
        self.door = Door(
            0.0,
            running=settings.max_running,
            waiting=policy.queue,
            delay_s=policy.delay_s,
            pool="elastic" if policy.pool == "elastic" else "fixed",
        )
        self.rng = random.Random(16)
        self.now = 0.0
        self.answers = [self._answer(i, row, rate) for i, row in enumerate(rows)]
        self.by_id = {answer.sequence.key[0]: answer for answer in self.answers}
        self._next = 0

    def run(self) -> None:
        """Simulate to the last token."""
        while self._next < len(self.answers) or self.roster.everyone:
            if not self.roster.everyone:
                self.now = max(self.now, self.answers[self._next].at)
                self._arrive(self.now)
            else:
                self._step()

    def _answer(self, number: int, row: list[Any], rate: float) -> Answer:
        at, tenant, prompt, answer, max_tokens = row
        meta = RequestMeta(request_id=f"r{number}", tenant=tenant if self.policy.fair else "all")
        tokens = [number] * prompt
        request = Submit(meta=meta, token_ids=tokens, params=SamplingParams(max_tokens=max_tokens))
        sequence = Sequence(request=request, arrived=at / rate, tokens=list(tokens), prompt_length=prompt)
        return Answer(at / rate, tenant, sequence, answer)

    def _arrive(self, until: float) -> None:
        """Bring those who have come by then to the door."""
        while self._next < len(self.answers) and self.answers[self._next].at <= until:
            answer = self.answers[self._next]
            self._next += 1
            meta = answer.sequence.request.meta
            refused = self.door.refuse(meta, 1, answer.at)
            if refused is None:
                self.door.enter(meta, 1, answer.at)
                self.roster.add(answer.sequence)
            else:
                answer.shed = refused.code
                if self.policy.offered:
                    self.door.load.arrive(answer.at)

    def _step(self) -> None:
        if self.policy.pool_limits_batch:
            self.roster.max_running = min(self.max_running, self.door.load.size)
        chunks = self.roster.plan(self.now)
        seconds = seconds_of(self.cost, chunks, self.rng)
        self.now += seconds
        self._arrive(self.now)
        for chunk in chunks:
            sequence, emits = chunk.sequence, chunk.emits
            sequence.computed += chunk.count
            if emits:
                sequence.tokens.append(0)
                self._emit(self.by_id[sequence.key[0]])
        self.roster.learn(chunks, seconds)
        self.door.observe(len(self.roster.running), len(self.roster.waiting))

    def _emit(self, answer: Answer) -> None:
        sequence = answer.sequence
        answer.emitted.append(self.now)
        self.door.begin(sequence.key[0], 0, self.now)
        if len(answer.emitted) == answer.tokens:
            self.roster.remove(sequence)
            queued = max(sequence.admitted - sequence.arrived, 0.0)
            tokens = sequence.prompt_length + answer.tokens
            self.door.leave(sequence.key[0], self.now, tokens=tokens, queued_s=queued, whole=True)


def capacity(cost: dict[str, Any], rows: list[list[Any]]) -> float:
    """Requests a second when all of a trace is there at once and nobody is turned away."""
    policy = Policy(pool="fixed", queue=1_000_000, delay_s=_FOREVER, itl_slo_s=0.0)
    simulation = Simulation(policy, cost, [[0.0, *row[1:]] for row in rows], 1.0)
    simulation.run()
    return len(rows) / simulation.now


def figures(simulation: Simulation) -> dict[str, Any]:
    """Return what one simulation showed; times in seconds, null where there is nothing."""
    answers = simulation.answers
    served = [answer for answer in answers if answer.shed is None]
    slo = EngineSettings().itl_slo_ms / 1000
    good = [a for a in served if a.first_s <= FIRST_TOKEN_SLO_S and (percentile(a.gaps, 0.95) or 0.0) <= slo]
    gaps = [gap for a in served for gap in a.gaps]
    first = [a.first_s for a in served]
    rarest = min({a.tenant for a in answers}, key=[a.tenant for a in answers].count)
    small = [a for a in answers if a.tenant == rarest]
    return {
        "requests": len(answers),
        "shed": {
            code: sum(a.shed == code for a in answers) for code in sorted({a.shed for a in answers if a.shed})
        },
        "late": sum(value > TIMEOUT_S for value in first),
        "first_token_s": {str(q): percentile(first, q) for q in (0.5, 0.95, 0.99)},
        "inter_token_s": {str(q): percentile(gaps, q) for q in (0.5, 0.95, 0.99)},
        "goodput_rps": len(good) / simulation.now,
        "good": len(good),
        "seconds": simulation.now,
        "small_tenant": {
            "requests": len(small),
            "shed": sum(a.shed is not None for a in small),
            "first_token_p95_s": percentile([a.first_s for a in small if a.shed is None], 0.95),
        },
    }


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    for trace, found in results["traces"].items():
        print(f"\n{trace}: load {found['load']:.1f}, {found['rate_rps']:.2f} requests/s offered on average")
        print(f"{'':34}{'first token p50/p95/p99':>27}{'inter-token ms':>18}{'good/s':>8}{'good':>6}", end="")
        print(f"{'shed':>6}{'late':>6}  small tenant p95, shed")
        for name, row in found["policies"].items():
            first = " / ".join(f"{value:7.2f}" for value in row["first_token_s"].values())
            gaps = " / ".join(f"{1000 * value:4.0f}" for value in row["inter_token_s"].values())
            small = row["small_tenant"]
            print(f"{name:34}{first:>27}{gaps:>18}{row['goodput_rps']:8.2f}{row['good']:6}", end="")
            print(f"{sum(row['shed'].values()):6}{row['late']:6}", end="")
            print(f"  {small['first_token_p95_s']:8.2f} {small['shed']:4}/{small['requests']}")


def main() -> None:
    """Simulate every policy on every trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--measure", action="store_true", help="measure the cost of a step first")
    arguments = parser.parse_args()
    if arguments.measure:
        from benchmarks.step_cost import measure  # noqa: PLC0415 - loads the model

        cost = measure() | machine.describe()
    else:
        cost = json.loads(RESULT.read_text())["cost"]
    traces = json.loads(DATA.read_text())["traces"]
    results: dict[str, Any] = {
        "cost": cost,
        "slo": {"first_token_s": FIRST_TOKEN_SLO_S, "timeout_s": TIMEOUT_S},
        "policies": {name: asdict(policy) for name, policy in POLICIES.items()},
        "traces": {},
    }
    for trace, rows in traces.items():
        rate = LOADS[trace] * capacity(cost, rows)
        found: dict[str, Any] = {"load": LOADS[trace], "rate_rps": rate, "policies": {}}
        for name, policy in POLICIES.items():
            simulation = Simulation(policy, cost, rows, rate)
            simulation.run()
            found["policies"][name] = figures(simulation)
        results["traces"][trace] = found
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
