"""What keeping costs where nothing is ever asked again: prompts that share no page, a pool that is full.

An engine that keeps nothing and one that does have the same requests and take turns of two steps, so
that whatever else is at work on this machine meets both alike. What the disk's threads do in the other's
turn is put where it belongs.

A server learns that nothing comes back (`engine.kv.reuse`). *At first* is before that, with copies of all
that leaves the pool; what counts is how it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

from benchmarks import intervals
from benchmarks.kv_tiers_drive import Driver, Engines, background_s
from benchmarks.rows import console
from benchmarks.text import Text

_BLOCK = 2  # engine steps until the other of a pair has its turn


@dataclass(frozen=True)
class Load:
    """`batch` prompts of `prompt` tokens at once, answers of `answer` tokens."""

    batch: int
    prompt: int
    answer: int


#: One is nearly all prompt, of which keys and values are packed the fastest; one is mostly answers.
LOADS = {"prompts": Load(4, 1000, 8), "answers": Load(8, 120, 96)}


@dataclass(frozen=True)
class Plan:
    """Pairs of each load and way of keeping, after those that fill the pool of so many tokens."""

    pairs: int = 14
    first: int = 6  # pairs at first
    pool: int = 8192
    settling: int = 60  # passes of prompts, at most, until copying has ended
    loads: Mapping[str, Load] = field(default_factory=lambda: LOADS)


QUICK = Plan(pairs=4, first=2)
_OTHERS = 100_000  # number of the first pass by which an engine settles


def measure(engines: Engines, text: Text, plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the share of tokens per second lost, for each way of keeping and each load."""
    found: dict[str, Any] = {}
    ways = {"host": {}, "host and disk": {"kv_disk_dir": folder / "kv", "kv_host_mb": 64}}
    for way, settings in ways.items():
        for name, load in plan.loads.items():
            # As in the engine's benchmark prompts are not cut, so that the two do the same in each turn.
            common = {"kv_tokens": plan.pool, "itl_slo_ms": 0}
            pair = engines.engine(prefix_cache=False, **common), engines.engine(**settings, **common)
            warm = -(-plan.pool // (load.batch * (load.prompt + load.answer)))
            numbers = count()
            for _ in range(warm):
                _compare(pair, _prompts(text, load, next(numbers)), load.answer)
            first = [_loss(pair, text, load, next(numbers)) for _ in range(plan.first)]
            settled = _settle(pair[1], text, plan)
            losses = [_loss(pair, text, load, next(numbers)) for _ in range(plan.pairs)]
            stats = {tier: stats.stored_bytes for tier, stats in pair[1].stats().items()}
            for driver in pair:
                driver.close()
            found[f"{way}, {name}"] = asdict(intervals.of(losses)) | {
                "losses": losses,
                "at_first": asdict(intervals.of(first)) | {"losses": first},
                "copies_ended_after_blocks": settled,
                "stored_bytes": stats,
                "found_tokens": pair[1].found_tokens,
                "load": asdict(load),
            }
            console.print(
                f"[dim]nothing reused, {way}, {name}: {intervals.of(losses).median:+.1%} of tokens/s, "
                f"{intervals.of(first).median:+.1%} at first"
            )
    return found


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The figure of the issue: the worst upper bound."""
    return {"no_reuse_overhead_upper95": max(row["upper95"] for row in found.values())}


def _loss(pair: tuple[Driver, Driver], text: Text, load: Load, number: int) -> float:
    without, with_ = _compare(pair, _prompts(text, load, number), load.answer)
    return 1 - without / with_


def _settle(driver: Driver, text: Text, plan: Plan) -> int | None:
    """Have an engine compute prompts until it copies none; return how many blocks left it till then."""
    load = max(plan.loads.values(), key=lambda load: load.batch * load.prompt)
    for number in range(_OTHERS, _OTHERS + plan.settling):
        before = driver.stats()["host"]
        _submit(driver, _prompts(text, load, number), load.answer)
        while driver.engine.has_work:
            driver.step()
        after = driver.stats()["host"]
        if after.skipped > before.skipped and after.stores == before.stores:
            return before.stores + before.skipped
    return None


def _prompts(text: Text, load: Load, number: int) -> list[list[int]]:
    """Prompts whose first page nobody has had: its first tokens are those of its number."""
    vocabulary = max(text.tokens)
    wanted = []
    for place in range(number * load.batch, (number + 1) * load.batch):
        head = [5 + place % (vocabulary - 5), 5 + place // (vocabulary - 5)]
        wanted.append(head + text.prompt(load.prompt - len(head), place))
    return wanted


def _compare(pair: tuple[Driver, Driver], prompts: list[list[int]], answer: int) -> tuple[float, float]:
    """Seconds that each of the two took for the same requests."""
    seconds = [0.0, 0.0]

    def turn(mine: int, work: Callable[[Driver], None]) -> None:
        """The first of the pair has no threads, so that all they do is the second's."""
        began, before = time.perf_counter(), background_s()
        work(pair[mine])
        strange = background_s() - before if mine == 0 else 0.0
        seconds[mine] += time.perf_counter() - began - strange
        seconds[1] += strange

    for mine in (0, 1):
        turn(mine, lambda driver: _submit(driver, prompts, answer))
    order = cycle((0, 1))
    while any(driver.engine.has_work for driver in pair):
        first = next(order)
        for mine in (first, 1 - first):
            turn(mine, _steps)
    return seconds[0], seconds[1]


def _submit(driver: Driver, prompts: list[list[int]], answer: int) -> None:
    for prompt in prompts:
        driver.submit(prompt, answer)


def _steps(driver: Driver) -> None:
    for _ in range(_BLOCK):
        if driver.engine.has_work:
            driver.step()
