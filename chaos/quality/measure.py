"""Asks a server what the probes ask and tells how often it was right; twice the same, with what changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from chaos.load.readers import Readers, closed_loop
from chaos.load.reading import Patience
from chaos.quality.intervals import Rate, difference, rate
from chaos.quality.tasks import PROBES, ROUTE, Probe, Task, tasks

_PATIENT = Patience(median_s=600.0, sigma=0.0, reads=False)
ACCURACY: Probe = "facts"  # the probe whose rate is `prompt_accuracy`


class QualityError(Exception):
    """A measurement that means nothing; the message says why and what to do."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one task: `good` is None where there was no whole answer, `error` says why."""

    id: str
    probe: str
    part: str
    family: str
    good: bool | None
    text: str
    error: str | None = None


def quality(
    url: str,
    key: str,
    n: int = 40,
    seed: int = 0,
    *,
    probes: tuple[Probe, ...] = PROBES,
    route: str = ROUTE,
    readers: int = 8,
) -> dict[str, Any]:
    """Ask `n` tasks of each probe with a client's key, greedily, and return rates with 95 % intervals.

    The result: `rates` by probe and `parts` by part of a probe (see `intervals.Rate`), `prompt_accuracy`,
    `unanswered`, and the `replies`, for `compare`. The same seed asks the same. Raises QualityError when
    fewer than half were answered, or when `n` or a probe makes no sense.
    """
    if n < 1 or not probes or set(probes) - set(PROBES):
        raise QualityError(f"give n of at least 1 and probes among {', '.join(PROBES)}")
    began = time.time()
    asked = tasks(n, seed, probes=probes, route=route)
    replies = asyncio.run(_ask(url, key, asked, readers))
    unanswered = [reply for reply in replies if reply.good is None]
    if len(unanswered) * 2 > len(replies):
        raise QualityError(
            f"{len(unanswered)} of {len(replies)} questions were not answered ({unanswered[0].error}); "
            "see the server's log"
        )
    rates = {probe: _rate(reply for reply in replies if reply.probe == probe) for probe in probes}
    parts = {
        f"{probe}/{part}": _rate(r for r in replies if (r.probe, r.part) == (probe, part))
        for probe, part in sorted({(r.probe, r.part) for r in replies})
    }
    return {
        "n": n,
        "seed": seed,
        "started": began,
        "seconds": time.time() - began,
        "unanswered": len(unanswered),
        "prompt_accuracy": rates[ACCURACY].rate if ACCURACY in rates else None,
        "rates": msgspec.to_builtins(rates),
        "parts": msgspec.to_builtins(parts),
        "replies": msgspec.to_builtins(replies),
    }


def compare(clean: Mapping[str, Any], faulted: Mapping[str, Any]) -> dict[str, Any]:
    """Return by probe what changed from one result of `quality` to another, over tasks answered in both.

    See `intervals.Difference`; `harmed` tells whether its whole interval lies below no change.
    Raises QualityError when they did not ask the same.
    """
    before, after = replies_of(clean), replies_of(faulted)
    if before.keys() != after.keys():
        raise QualityError("the two runs did not ask the same: give them the same n, seed and probes")
    both = [
        (before[name], after[name])
        for name in before
        if before[name].good is not None and after[name].good is not None
    ]
    changes = {}
    for probe in dict.fromkeys(reply.probe for reply in before.values()):
        pairs = [(b, a) for b, a in both if b.probe == probe]
        change = difference(
            [bool(b.good) for b, _ in pairs], [bool(a.good) for _, a in pairs], [b.family for b, _ in pairs]
        )
        changes[probe] = msgspec.to_builtins(change) | {"harmed": change.harmed}
    return changes


async def _ask(url: str, key: str, asked: list[Task], readers: int) -> list[Reply]:
    """Ask every task; replies in the order of tasks."""
    questions = [replace(task.question, tag=task) for task in asked]
    found: dict[str, Reply] = {}
    async with Readers(url, key, patience=_PATIENT) as crowd:
        async for question, reading in closed_loop(crowd, questions, readers, lambda: False):
            task: Task = question.tag
            answered = reading.outcome == "read"
            found[task.id] = Reply(
                id=task.id,
                probe=task.probe,
                part=task.part,
                family=task.family,
                good=task.check(reading.text) if answered else None,
                text=reading.text,
                error=None if answered else reading.error or reading.outcome,
            )
    return [found[task.id] for task in asked]


def _rate(replies: Iterable[Reply]) -> Rate:
    answered = [reply for reply in replies if reply.good is not None]
    return rate([bool(reply.good) for reply in answered], [reply.family for reply in answered])


def replies_of(result: Any) -> dict[str, Reply]:
    """Return the replies of a result of `quality` by id; raises QualityError when it is none."""
    try:
        replies = msgspec.convert(result["replies"], list[Reply])
        msgspec.convert(result["rates"], dict[str, Rate])
    except (KeyError, TypeError, msgspec.ValidationError):
        raise QualityError("not a result of `quaver quality`, as --json writes it") from None
    return {reply.id: reply for reply in replies}
