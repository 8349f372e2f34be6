"""How many responses it takes until somebody is paged: answers replayed through the server's detectors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

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
from alerting.judge import Verdict
from alerting.metrics import AlertMetrics
from alerting.rules import Rules
from chaos.score.answer import Answer
from chaos.score.signals import MODEL, tell
from chaos.score.statistics import Floats

QUANTIZATION = "scored"
HEALTHY = 0.03  # share of readers who leave in health, below what a baseline takes for healthy
_ORDERS = 15
_BEFORE = 40  # healthy responses before the fault
_AFTER = 200  # healthy responses that a page may take to end
_GAP_S = 1.0


class Delay(msgspec.Struct, frozen=True):
    """Responses and tokens until the page, and healthy responses after the fault until it was over: medians
    over several orders, null when most orders saw none; `missed` is the share of orders without a page."""

    responses: float | None
    missed: float
    tokens: float | None = None
    reset: float | None = None


class Pages(msgspec.Struct, frozen=True):
    """Alerts raised while only healthy responses came, and how those that nobody broke off were judged, by
    their place."""

    responses: int
    l2: int
    l1: int
    verdicts: dict[int, Verdict]


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
        self.verdicts: dict[int, Verdict] = {}
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
            on_verdict=self._take,
        )
        self._evaluator.use(baseline, MODEL, QUANTIZATION)
        self._count = 0
        self._left = False
        self._firing: set[str] = set()

    def hear(self, answer: Answer) -> None:
        """Take one more answer, whose reader leaves as often as in health."""
        self.now += _GAP_S
        self._count += 1
        self._left = self._random.random() < HEALTHY
        tell(
            self._evaluator,
            answer,
            f"r{self._count}",
            now=self.now,
            temperature=self._temperature,
            interrupted=self._left,
        )
        self._evaluator.tick()

    def paging(self) -> bool:
        """Whether a page has been raised and is not over."""
        return bool(self._firing)

    def _take(self, _: str, verdict: Verdict) -> None:
        if not self._left:
            self.verdicts[self._count - 1] = verdict

    def _hear(self, alert: Alert) -> None:
        if alert.state == "firing":
            self.raised.append(alert)
        if alert.level == "L2":
            (self._firing.add if alert.state == "firing" else self._firing.discard)(alert.name)


def delay(
    rules: Rules, baseline: Baseline, healthy: Sequence[Answer], struck: Sequence[Answer], temperature: float
) -> Delay:
    """Count struck responses, after healthy ones, until an L2 fires, and healthy ones from then until it is
    over, in several orders of the answers."""
    counts: list[int] = []
    tokens: list[int] = []
    resets: list[int] = []
    for order in range(_ORDERS):
        rng = random.Random(order)
        server = _Server(rules, baseline, temperature, order)
        for answer in rng.sample(list(healthy), min(_BEFORE, len(healthy))):
            server.hear(answer)
        if server.paging():
            continue  # falsely: this order counts as missed
        said = 0
        for number, answer in enumerate(rng.sample(list(struck), len(struck)), 1):
            server.hear(answer)
            said += len(answer.token_rows)
            if server.paging():
                counts.append(number)
                tokens.append(said)
                resets += _reset(server, rng.choices(healthy, k=_AFTER))
                break
    return _delay(counts, tokens, resets)


def _reset(server: _Server, healthy: Sequence[Answer]) -> Iterator[int]:
    """Yield after how many healthy responses no page is open any more; nothing when one stays."""
    for number, answer in enumerate(healthy, 1):
        server.hear(answer)
        if not server.paging():
            yield number
            return


def clean_pages(rules: Rules, baseline: Baseline, answers: Sequence[Answer], temperature: float) -> Pages:
    """Replay healthy answers once, in their order."""
    server = _Server(rules, baseline, temperature, 0)
    for answer in answers:
        server.hear(answer)
    levels = [alert.level for alert in server.raised]
    return Pages(len(answers), levels.count("L2"), levels.count("L1"), server.verdicts)


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
    return _delay(counts)


def _delay(counts: Sequence[int], tokens: Sequence[int] = (), resets: Sequence[int] = ()) -> Delay:
    return Delay(_median(counts), 1 - len(counts) / _ORDERS, _median(tokens), _median(resets))


def _median(counts: Sequence[int]) -> float | None:
    """The median over all orders, those without a count being endless; null where it is endless."""
    middle = float(np.median([*counts, *[float("inf")] * (_ORDERS - len(counts))]))
    return middle if np.isfinite(middle) else None
