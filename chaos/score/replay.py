"""How many responses it takes until somebody is paged: answers replayed through the server's detectors."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from alerting.alerts import Alert, AlertBook
from alerting.baseline import Baseline
from alerting.breaker import Breaker
from alerting.canary.baseline import CanaryBaseline, Comparison
from alerting.canary.baseline import Judge as CanaryJudge
from alerting.canary.prompt import Guarded
from alerting.canary.reading import Reader, Reading
from alerting.canary.watch import Watch
from alerting.collector import CONTRAST, Collector
from alerting.evaluator import Evaluator
from alerting.metrics import AlertMetrics
from alerting.rules import Rules
from chaos.score.answer import Answer
from chaos.score.signals import MODEL, tell
from chaos.score.statistics import Floats

QUANTIZATION = "scored"
_HEALTHY = 0.03  # share of readers who leave in health, below what a baseline takes for healthy
_ORDERS = 15
_BEFORE = 40  # healthy responses before the fault
_GAP_S = 1.0


class Delay(msgspec.Struct, frozen=True):
    """Responses until the page: the median over several orders, null when most orders saw none; `missed` is
    the share of those."""

    responses: float | None
    missed: float
    tokens: float | None = None


class Pages(msgspec.Struct, frozen=True):
    """Alerts raised while only healthy responses came."""

    responses: int
    l2: int
    l1: int


def baseline_of(
    answers: Sequence[Answer], contrast: Sequence[tuple[Answer, bool]], rules: Rules, temperature: float
) -> Baseline:
    """Build the baseline that `quaver calibrate` would have built from these healthy answers, and from those
    of the contrast, each with whether it lacks what it needs."""
    routes = {lacks: route for route, lacks in CONTRAST.items()}
    collector = Collector(rules)
    for i, answer in enumerate(answers):
        tell(collector, answer, f"c{i}", now=i * _GAP_S, temperature=temperature)
    for i, (answer, lacks) in enumerate(contrast):
        tell(collector, answer, f"l{i}", now=0.0, temperature=temperature, route=routes[lacks], canary=True)
    return collector.build(model=MODEL, quantization=QUANTIZATION)


class _Server:
    """An evaluator as a server has it, with what it raised."""

    def __init__(self, rules: Rules, baseline: Baseline, temperature: float, seed: int) -> None:
        self.raised: list[Alert] = []
        self.now = 1_000_000.0
        self._temperature = temperature
        self._random = random.Random(seed)
        self._evaluator = Evaluator(
            rules,
            rules.default,
            AlertBook(self._hear),
            Breaker(rules.breaker, "observe"),
            AlertMetrics(CollectorRegistry()),
            clock=lambda: self.now,
        )
        self._evaluator.use(baseline, MODEL, QUANTIZATION)
        self._count = 0

    def hear(self, answer: Answer) -> None:
        """Take one more answer, whose reader leaves as often as in health."""
        self.now += _GAP_S
        self._count += 1
        left = self._random.random() < _HEALTHY
        tell(
            self._evaluator,
            answer,
            f"r{self._count}",
            now=self.now,
            temperature=self._temperature,
            interrupted=left,
        )
        self._evaluator.tick()

    def paged(self) -> bool:
        return any(alert.level == "L2" for alert in self.raised)

    def _hear(self, alert: Alert) -> None:
        if alert.state == "firing":
            self.raised.append(alert)


def delay(
    rules: Rules, baseline: Baseline, healthy: Sequence[Answer], struck: Sequence[Answer], temperature: float
) -> Delay:
    """Count struck responses, after healthy ones, until an L2 fires, over several orders of the answers."""
    counts: list[int] = []
    tokens: list[int] = []
    for order in range(_ORDERS):
        rng = random.Random(order)
        server = _Server(rules, baseline, temperature, order)
        for answer in rng.sample(list(healthy), min(_BEFORE, len(healthy))):
            server.hear(answer)
        server.raised.clear()
        said = 0
        for number, answer in enumerate(rng.sample(list(struck), len(struck)), 1):
            server.hear(answer)
            said += len(answer.token_rows)
            if server.paged():
                counts.append(number)
                tokens.append(said)
                break
    return _delay(counts, tokens)


def clean_pages(rules: Rules, baseline: Baseline, answers: Sequence[Answer], temperature: float) -> Pages:
    """Replay healthy answers once, in their order."""
    server = _Server(rules, baseline, temperature, 0)
    for answer in answers:
        server.hear(answer)
    levels = [alert.level for alert in server.raised]
    return Pages(len(answers), levels.count("L2"), levels.count("L1"))


def reading(answer: Answer) -> Reading | None:
    """Return an answer as the canaries' judge reads it."""
    reader = Reader()
    reader.expect("it")
    tell(reader, answer, "it", now=0.0, temperature=0.0, canary=True)
    return reader.take("it")


def compared(judge: CanaryJudge, answers: Sequence[Answer]) -> list[Comparison | None]:
    """Return each answer beside its canary's own in health; None without signals."""
    return [
        None if (mine := reading(answer)) is None else judge.compare(answer.item, mine, answer.correct)
        for answer in answers
    ]


def distances(comparisons: Sequence[Comparison | None]) -> Floats:
    """Return the score of each comparison; 0 for None."""
    return np.array([0.0 if comparison is None else comparison.score for comparison in comparisons])


def canary_delay(
    rules: Rules,
    baseline: CanaryBaseline,
    struck: Sequence[Answer],
    comparisons: Sequence[Comparison | None],
) -> Delay:
    """Count struck canaries until their alert fires, over several orders of the same answers."""
    seen = [(a, c) for a, c in zip(struck, comparisons, strict=True) if c is not None]
    counts: list[int] = []
    for order in range(_ORDERS):
        raised: list[Alert] = []
        watch = Watch(rules, AlertBook(raised.append))
        watch.use(baseline, 0.0)
        drawn = random.Random(order).sample(seen, len(seen))
        for number, (answer, comparison) in enumerate(drawn, 1):
            watch.add(
                str(number),
                answer.item,
                Guarded(),
                comparison,
                cached=False,
                right=answer.correct,
                now=float(number),
            )
            if raised:
                counts.append(number)
                break
    return _delay(counts, [])


def _delay(counts: Sequence[int], tokens: Sequence[int]) -> Delay:
    missed = 1 - len(counts) / _ORDERS
    if missed >= 0.5:
        return Delay(None, missed)
    endless = [*counts, *[float("inf")] * (_ORDERS - len(counts))]
    return Delay(float(np.median(endless)), missed, float(np.median(tokens)) if tokens else None)
