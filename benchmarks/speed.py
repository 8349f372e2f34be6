"""Prompts and decodes per second, and what signals cost: every engine in turn, round by round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import Peers, Row, Variant, console, take_turns
from benchmarks.text import Text

PROMPT = 128  # tokens of context that decoding begins with


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    prompts: tuple[int, ...]
    steps: dict[int, int]  # batch → steps a round
    answers: dict[int, int]  # batch → tokens of an answer, where the signals' cost is measured
    pairs: int  # of such answers, at the least
    pair_seconds: float  # and pairs go on for so long
    block: int = 2  # engine steps until the other of a pair has its turn


WHOLE = Plan(5, (512, 2048), {1: 64, 8: 32, 16: 24, 32: 16}, {1: 96, 16: 96}, pairs=8, pair_seconds=90)
QUICK = Plan(2, (512,), {1: 32, 16: 8}, {1: 96, 16: 96}, pairs=3, pair_seconds=0)


def prefill(peers: Peers, variants: Sequence[Variant], text: Text, plan: Plan) -> list[Row]:
    """Tokens per second of whole prompts. No prompt is seen twice, so no cache can help."""
    rows: list[Row] = []
    for size in plan.prompts:
        asked = [Row("prefill", size, variant) for variant in variants]

        def measure(row: Row, number: int, size: int = size) -> float:
            prompt = text.prompt(size, number)
            return size / float(peers.of(row.variant).ask("prefill", prompt=prompt, **row.variant.how))

        rounds = plan.rounds if size <= 512 else max(2, plan.rounds - 2)
        rows += take_turns(asked, rounds, measure, f"prefill {size}")
    return rows


def decode(peers: Peers, variants: Sequence[Variant], text: Text, plan: Plan) -> list[Row]:
    """Tokens per second of all sequences together, greedy. A round goes on where the last one ended."""
    rows: list[Row] = []
    for batch, steps in plan.steps.items():
        asked = [Row("decode", batch, variant) for variant in variants]
        prompts = [text.prompt(PROMPT, number) for number in range(batch)]
        for row in asked:
            more = steps * (plan.rounds + 1)
            peers.of(row.variant).ask("prepare", prompts=prompts, steps=more, **row.variant.how)

        def measure(row: Row, _number: int, steps: int = steps) -> float:
            return (
                row.size * steps / float(peers.of(row.variant).ask("decode", steps=steps, **row.variant.how))
            )

        rows += take_turns(asked, plan.rounds, measure, f"decode, batch {batch}")
    return rows


def context_of(batch: int, plan: Plan) -> int:
    """Mean context while `batch` sequences are decoded, the round for warming up aside."""
    return PROMPT + plan.steps[batch] * (plan.rounds + 2) // 2


def signals_cost(
    peers: Peers, pair: tuple[Variant, Variant], text: Text, plan: Plan, batch: int
) -> list[float]:
    """Share of throughput that the second of `pair` loses against the first, a figure a pair of answers.

    Short prompts make for short steps, in which whatever signals cost weighs most.
    """
    losses: list[float] = []
    began, number = time.monotonic(), -1
    while number < plan.pairs or time.monotonic() - began < plan.pair_seconds:
        prompts = [text.prompt(32, number * batch + i) for i in range(batch)]
        without, with_ = peers.of(pair[0]).ask(
            "compare",
            prompts=prompts,
            steps=plan.answers[batch],
            block=plan.block,
            pair=[variant.signals for variant in pair],
        )
        if number >= 0:
            losses.append(1 - without / with_)
        number += 1
    console.print(f"[dim]what signals cost, batch {batch}: {number} pairs")
    return losses
