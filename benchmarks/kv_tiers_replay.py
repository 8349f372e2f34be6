"""Clients that send prompts which begin alike, to engines that keep nothing, pages, or pages and tiers.

Two replays. *Shared*: every request begins with one of several system prompts, drawn at random, and ends
with a message of its own. *Chat*: every request is the next turn of one of many conversations. In both
the beginnings are several times what the page pool holds, so that a cache of pages alone forgets most
of them before they come again.

A client asks, waits for the whole answer, and asks for what is next in the list. All beginnings are
asked for once before anything is counted; then the engines take turns, pass by pass, with the same list.
Throughput is that of whole passes; tokens of those who all come at once at its start are not counted. Gaps
are between the tokens of an answer: they show what packing and unpacking take from answers under way.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import intervals
from benchmarks.kv_tiers_drive import Answer, Driver, Engines
from benchmarks.rows import console
from benchmarks.text import Text
from engine.messages import TierStats

ARMS: dict[str, dict[str, Any]] = {
    "nothing kept": {"prefix_cache": False},
    "pages alone": {"kv_host_mb": 0},
    "with tiers": {},
}
_COUNTED = ("hits", "misses", "stores", "evictions", "loaded_bytes", "stored_bytes", "late")


@dataclass(frozen=True)
class Plan:
    """What is asked: `sessions` beginnings of `beginning` tokens; messages and answers of about so many, half
    as many to half as many again. `grows`: an answer and the next message continue the session."""

    name: str
    sessions: int
    beginning: int
    message: int
    answer: int
    grows: bool
    clients: tuple[int, ...] = (1, 8, 32)
    requests: int = 48  # counted of a pass; before them as many as there are clients, who all come at once
    passes: int = 3
    pool: int = 16384  # tokens
    host_mb: int = 256


SHARED = Plan("shared", sessions=24, beginning=1500, message=60, answer=24, grows=False)
CHAT = Plan("chat", sessions=40, beginning=600, message=60, answer=24, grows=True)
WHOLE = (SHARED, CHAT)
QUICK = tuple(replace(plan, clients=(8,), passes=2) for plan in WHOLE)


@dataclass(frozen=True)
class Asked:
    """A request: what a client adds to a session, and how many tokens it wants."""

    session: int
    message: list[int]
    answer: int


@dataclass
class Arm:
    """An engine with what its sessions hold and what its passes have shown."""

    driver: Driver
    sessions: list[list[int]]
    answers: list[Answer] = field(default_factory=list)
    tokens: int = 0  # of all answers
    seconds: float = 0.0
    before: dict[str, TierStats] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it for the JSON; `ms` in the order of the list."""
        first = [1000 * answer.first_s for answer in self.answers]
        gaps = [1000 * gap for answer in self.answers for gap in answer.gaps_s]
        prompts = sum(len(answer.prompt) for answer in self.answers)
        found: Counter[str] = Counter()
        for answer in self.answers:
            found.update(answer.tier_tokens)
        return {
            "p50_ms": float(np.quantile(first, 0.5)),
            "p95_ms": float(np.quantile(first, 0.95)),
            "gap_p50_ms": float(np.quantile(gaps, 0.5)),
            "gap_p95_ms": float(np.quantile(gaps, 0.95)),
            "tokens_per_s": self.tokens / self.seconds,
            "hit_ratio": {tier: found[tier] / prompts for tier in ("device", "host", "disk")},
            "tiers": {tier: self._moved(tier, stats) for tier, stats in self.driver.stats().items()},
            "ms": first,
        }

    def _moved(self, tier: str, stats: TierStats) -> dict[str, int]:
        return {name: getattr(stats, name) - getattr(self.before[tier], name) for name in _COUNTED}


def measure(engines: Engines, text: Text, plans: Sequence[Plan], folder: Path) -> dict[str, Any]:
    """Return, for each plan and number of clients, the figures of every arm and how they compare."""
    return {
        plan.name: {
            "plan": asdict(plan),
            "clients": {str(count): _replay(engines, text, plan, count, folder) for count in plan.clients},
        }
        for plan in plans
    }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The figure of the issue: eight clients, shared prompts, p95 with tiers ÷ that of pages alone."""
    eight = found.get("shared", {}).get("clients", {}).get("8")
    return {} if eight is None else {"shared_prompt_p95_ratio": eight["p95_ratio"]["pages alone"]["median"]}


def _replay(engines: Engines, text: Text, plan: Plan, clients: int, folder: Path) -> dict[str, Any]:
    arms = {}
    for name, settings in ARMS.items():
        wanted = {"kv_tokens": plan.pool} | settings
        if name == "with tiers":
            wanted |= {"kv_host_mb": plan.host_mb, "kv_disk_dir": folder / f"{plan.name} {clients}"}
        sessions = [text.prompt(plan.beginning, 7 * i) for i in range(plan.sessions)]
        arms[name] = Arm(engines.engine(**wanted), sessions)
    source, messages = random.Random(clients), itertools.count()
    names = list(arms)
    for number in range(-1, plan.passes):
        order = _order(plan, plan.requests + clients, source) if number >= 0 else range(plan.sessions)
        asked = [
            Asked(session, text.prompt(_about(plan.message, source), 3 * i + 1), _about(plan.answer, source))
            for session, i in zip(order, messages, strict=False)
        ]
        what = "before" if number < 0 else f"pass {number + 1} of {plan.passes}"
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = _pass(arms[name], asked, plan, clients, counted=number >= 0)
            console.print(f"[dim]{plan.name}, {clients} clients, {what}: {name} {seconds:.1f} s")
    figures = {name: arm.as_dict() for name, arm in arms.items()}
    for arm in arms.values():
        arm.driver.close()
    mine = figures["with tiers"]["ms"]
    return {
        "arms": figures,
        "p95_ratio": {
            name: asdict(intervals.quantile_ratio(mine, figures[name]["ms"], 0.95))
            for name in ARMS
            if name != "with tiers"
        },
    }


def _order(plan: Plan, count: int, source: random.Random) -> list[int]:
    """Sessions in the order of their requests: any, or those of one turn of all before any has another."""
    if not plan.grows:
        return [source.randrange(plan.sessions) for _ in range(count)]
    return [i % plan.sessions for i in range(count)]


def _about(count: int, source: random.Random) -> int:
    return source.randint(count // 2, count + count // 2)


def _pass(arm: Arm, asked: Sequence[Asked], plan: Plan, clients: int, counted: bool) -> float:
    """Have so many clients ask for all of a list; return the seconds it took."""
    if counted and not arm.before:
        arm.before = arm.driver.stats()
    waiting, running = deque(asked), dict[int, int]()  # answers' sessions
    answers: list[Answer] = []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < clients:
            if plan.grows and waiting[0].session in running.values():
                break
            one = waiting.popleft()
            answer = arm.driver.submit(arm.sessions[one.session] + one.message, one.answer)
            running[id(answer)] = one.session
            answers.append(answer)
        for answer in arm.driver.step():
            session = running.pop(id(answer))
            if plan.grows:
                arm.sessions[session] = answer.prompt + answer.tokens
    seconds = time.perf_counter() - began
    if counted:
        arm.seconds += seconds
        arm.tokens += sum(len(answer.tokens) for answer in answers)
        arm.answers += answers[clients:]
    return seconds
