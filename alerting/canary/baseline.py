"""How known prompts are answered in health, as a versioned JSON file, and how far an answer is from that.

Canaries are asked in rounds, under each of `CONDITIONS` in turn, since what else is in a batch, and what
comes from the prefix cache, changes how numbers are rounded: some greedy answers take another turn by it.
Whole cycles of conditions are kept together. One cycle in three gives each canary's own means and, each
round of it against the others, the tails of distances from them. The other cycles set the limits and say
how often health passes them: a limit is the k-th smallest of n scores that neither means nor tails have
seen, so a new answer passes it at a rate that is Beta(n − k + 1, k) distributed, whose upper quantiles are
the Clopper–Pearson bounds of n − k events in n. Every canary and condition is in n equally often, which
makes a count vary less than such draws do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from alerting.baseline import BaselineError
from alerting.canary.reading import SIGNALS, Array, Reading
from alerting.files import write
from alerting.limits import Count, Tail, conformal_threshold
from alerting.scores.frozen import Packed
from engine.api.body import decode

FORMAT_VERSION = 1
#: Of each round in turn: how many canaries are asked together, and whether through the prefix cache. Live
#: ones are asked alone, or beside traffic.
CONDITIONS = ((1, False), (4, True), (4, False), (1, True))
ROUNDS = 2 * len(CONDITIONS)  # at least
LEVELS = (0.2, 0.05, 0.01)
ANSWER = "answer"
#: Distances as small as these carry no meaning: nats, a probability, units of the spread among prompts.
_FLOORS = {
    "entropy": 0.02,
    "confidence": 0.01,
    "entropy_post": 0.02,
    "surprisal_post": 0.02,
    "heads": 0.02,
    "onset": 0.02,
}
_CLIP = 20.0  # of one head's distance
_SPREAD = 1e-3
_SURE = 0.9  # a canary that is right less often in health says nothing by being wrong


class Profile(msgspec.Struct, frozen=True):
    """One canary in health: means of `SIGNALS`, its heads, and how many of its answers were right."""

    means: list[float]
    heads: Packed
    onset: Packed
    right: Count


@dataclass(frozen=True)
class Answer:
    """One healthy answer."""

    canary: str
    reading: Reading
    right: bool


class CanaryBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `thresholds` and `counts` are by test: `signals@<level>` and `answer`."""

    version: int
    created: str
    model: str
    quantization: str
    prompts: str  # prompt.digest
    profiles: dict[str, Profile]
    spread: dict[str, Packed]  # of heads and onset among the canaries
    tails: dict[str, Tail]
    thresholds: dict[str, float]
    counts: dict[str, Count]

    def mismatch(self, model: str | None, quantization: str | None, prompts: str) -> str | None:
        """Return why this baseline does not hold for what runs now, or None."""
        if self.prompts != prompts:
            return "the canaries have changed since their baseline was made; run `quaver calibrate`"
        if (self.model, self.quantization) != (model, quantization):
            return (
                f"the canaries' baseline is of {self.model} ({self.quantization}), {model} ({quantization}) "
                "runs; run `quaver calibrate`"
            )
        return None

    def limits(self, level: float) -> dict[str, float]:
        """Return how far each signal alone must be from its canary's own to pass the limit of a level."""
        threshold = self.thresholds[_signals(level)]
        return {name: tail.value(threshold) for name, tail in self.tails.items()}

    def rates(self, confidence: float, drift: float) -> dict[str, float]:
        """Return the healthy rates of all tests: their upper bounds, times `drift`."""
        return {name: min(1.0, drift * count.upper(confidence)) for name, count in self.counts.items()}


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One answer beside its own in health: distances by signal, their score (−ln of the healthy tail
    probability of the largest), and which tests it failed."""

    distances: dict[str, float]
    score: float
    tests: dict[str, bool]
    cause: str  # the signal that lies furthest out


class Judge:
    """A baseline unpacked for use."""

    def __init__(self, baseline: CanaryBaseline) -> None:
        self._baseline = baseline
        self._ruler = _Ruler(
            {
                name: Reading(np.asarray(p.means, np.float32), _unpacked(p.heads), _unpacked(p.onset))
                for name, p in baseline.profiles.items()
            },
            _unpacked(baseline.spread["heads"]),
            _unpacked(baseline.spread["onset"]),
        )

    def compare(self, canary: str, reading: Reading, right: bool) -> Comparison | None:
        """Compare an answer of a canary; None when the baseline has none of it."""
        profile = self._baseline.profiles.get(canary)
        if profile is None:
            return None
        distances = self._ruler.distances(canary, reading)
        scores = _scores(distances, self._baseline.tails)
        score = max(scores.values(), default=0.0)
        tests = {name: score > limit for name, limit in self._baseline.thresholds.items()}
        if _sure(profile.right):
            tests[ANSWER] = not right
        return Comparison(
            distances=distances,
            score=score,
            tests=tests,
            cause=max(scores, key=scores.__getitem__, default=ANSWER),
        )


def build(
    rounds: Sequence[Sequence[Answer]], *, model: str, quantization: str, prompts: str
) -> CanaryBaseline:
    """Build a baseline from whole rounds of healthy answers, each of every canary.

    Raises BaselineError when there are fewer than `ROUNDS`, or they do not hold the same canaries.
    """
    if len(rounds) < ROUNDS:
        raise BaselineError(f"{len(rounds)} rounds of canaries are too few: at least {ROUNDS} are needed")
    names = sorted(answer.canary for answer in rounds[0])
    if any(sorted(answer.canary for answer in healthy) != names for healthy in rounds):
        raise BaselineError("not every canary was answered in every round; see the server's log")
    cycles = [number // len(CONDITIONS) for number in range(len(rounds))]
    own = [healthy for cycle, healthy in zip(cycles, rounds, strict=True) if cycle % 3 == 0]
    others = [a for cycle, healthy in zip(cycles, rounds, strict=True) if cycle % 3 for a in healthy]
    means = _means(own)
    heads = _spread([mean.heads for mean in means.values()])
    onset = _spread([mean.onset for mean in means.values()])
    fitted: list[dict[str, float]] = []
    for number, healthy in enumerate(own):
        ruler = _Ruler(_means(own[:number] + own[number + 1 :]), heads, onset)
        fitted += [ruler.distances(a.canary, a.reading) for a in healthy]
    right = Counter(a.canary for healthy in own for a in healthy if a.right)
    draft = CanaryBaseline(
        version=FORMAT_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        quantization=quantization,
        prompts=prompts,
        profiles={
            name: Profile(
                [float(value) for value in mean.means],
                _packed(mean.heads),
                _packed(mean.onset),
                Count(right[name], len(own)),
            )
            for name, mean in means.items()
        },
        spread={"heads": _packed(heads), "onset": _packed(onset)},
        tails={
            name: Tail.of([d[name] for d in fitted if name in d] or [0.0], floor)
            for name, floor in _FLOORS.items()
        },
        thresholds={},
        counts={},
    )
    judge = Judge(draft)
    found = [c for a in others if (c := judge.compare(a.canary, a.reading, a.right)) is not None]
    scores = [comparison.score for comparison in found]
    thresholds = {_signals(level): conformal_threshold(scores, level) for level in LEVELS}
    counts = {
        name: Count(sum(score > limit for score in scores), len(scores)) for name, limit in thresholds.items()
    }
    if wrong := [comparison.tests[ANSWER] for comparison in found if ANSWER in comparison.tests]:
        counts[ANSWER] = Count(sum(wrong), len(wrong))
    return msgspec.structs.replace(draft, thresholds=thresholds, counts=counts)


def save(baseline: CanaryBaseline, path: Path) -> None:
    """Write a baseline; readers see the old file or the whole new one."""
    write(path, msgspec.json.encode(baseline))


def load(path: Path) -> CanaryBaseline:
    """Read a baseline; raises BaselineError when it is damaged or of another version."""
    try:
        baseline = decode(path.read_bytes(), CanaryBaseline)
        if baseline.version != FORMAT_VERSION:
            raise ValueError(f"version {baseline.version}, not {FORMAT_VERSION}")
        Judge(baseline)
    except OSError as error:
        raise BaselineError(f"cannot read the canaries' baseline {path}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise BaselineError(f"{path} is no baseline of canaries ({error}); run `quaver calibrate`") from error
    return baseline


class _Ruler:
    """Measures how far an answer is from its canary's own mean."""

    def __init__(self, means: Mapping[str, Reading], heads: Array, onset: Array) -> None:
        self._means = means
        self._heads, self._onset = heads, onset

    def distances(self, canary: str, reading: Reading) -> dict[str, float]:
        """Return the distance of every signal that is there in both."""
        mean = self._means[canary]
        found = dict(zip(SIGNALS, np.abs(reading.means - mean.means).tolist(), strict=True))
        found["heads"] = _apart(reading.heads, mean.heads, self._heads)
        found["onset"] = _apart(reading.onset, mean.onset, self._onset)
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _apart(values: Array, mean: Array, spread: Array) -> float:
    """Root mean square over heads of the distance in units of the spread among prompts; NaN: no values."""
    if values.shape != mean.shape:
        return math.nan
    z = (values - mean) / spread
    z = z[np.isfinite(z)]
    return float(np.sqrt(np.square(z.clip(-_CLIP, _CLIP)).mean())) if z.size else math.nan


def _means(rounds: Sequence[Sequence[Answer]]) -> dict[str, Reading]:
    """Mean of each canary's answers, cell by cell; a cell that is absent in one is absent."""
    found: dict[str, list[Reading]] = {}
    for answer in chain.from_iterable(rounds):
        found.setdefault(answer.canary, []).append(answer.reading)
    return {
        name: Reading(
            *(np.mean([getattr(one, part) for one in mine], axis=0) for part in ("means", "heads", "onset"))
        )
        for name, mine in found.items()
    }


def _spread(arrays: Sequence[Array]) -> Array:
    found: Array = np.std(np.stack(arrays), axis=0) + np.float32(_SPREAD)
    return found


def _scores(distances: Mapping[str, float], tails: Mapping[str, Tail]) -> dict[str, float]:
    return {name: tails[name].score(value) for name, value in distances.items()}


def _signals(level: float) -> str:
    return f"signals@{level:g}"


def _sure(right: Count) -> bool:
    return right.trials > 0 and right.events >= _SURE * right.trials


def _packed(array: Array) -> Packed:
    return Packed.of(array, "<f2")


def _unpacked(packed: Packed) -> Array:
    return packed.array().astype(np.float32)
