"""How known prompts are answered in health, as a versioned JSON file, and how far an answer is from that.

The healthy rounds are dealt to three heaps: the first gives each canary's own means, the second the
tails and limits of distances from them, the third counts how often health passes those limits. The
false-alarm bounds rest on the third alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
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
ROUNDS = 6  # at least, two for each heap
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
        tests = {_signals(level): score > self._baseline.thresholds[_signals(level)] for level in LEVELS}
        if ANSWER in self._baseline.counts and _sure(profile.right):
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
    heaps = [[answer for healthy in rounds[heap::3] for answer in healthy] for heap in range(3)]
    own = {name: [a for a in heaps[0] if a.canary == name] for name in sorted({a.canary for a in rounds[0]})}
    if any({a.canary for a in heap} != own.keys() for heap in heaps):
        raise BaselineError("not every canary was answered in every round; see the server's log")
    means = {
        name: Reading(
            *(_middle([getattr(a.reading, part) for a in mine]) for part in ("means", "heads", "onset"))
        )
        for name, mine in own.items()
    }
    heads = _spread([mean.heads for mean in means.values()])
    onset = _spread([mean.onset for mean in means.values()])
    ruler = _Ruler(means, heads, onset)
    fitted = [ruler.distances(a.canary, a.reading) for a in heaps[1]]
    tails = {
        name: Tail.of([d[name] for d in fitted if name in d] or [0.0], floor)
        for name, floor in _FLOORS.items()
    }
    strongest = [max(_scores(d, tails).values(), default=0.0) for d in fitted]
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
                Count(sum(a.right for a in own[name]), len(own[name])),
            )
            for name, mean in means.items()
        },
        spread={"heads": _packed(heads), "onset": _packed(onset)},
        tails=tails,
        thresholds={_signals(level): conformal_threshold(strongest, level) for level in LEVELS},
        counts={},
    )
    sure = {name for name, profile in draft.profiles.items() if _sure(profile.right)}
    judge = Judge(draft)
    found = [(a, judge.compare(a.canary, a.reading, a.right)) for a in heaps[2]]
    counts = {
        name: Count(sum(c.tests[name] for _, c in found if c is not None), len(found))
        for name in draft.thresholds
    }
    asked = [a for a, _ in found if a.canary in sure]
    if asked:
        counts[ANSWER] = Count(sum(not a.right for a in asked), len(asked))
    return msgspec.structs.replace(draft, counts=counts)


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


def _middle(arrays: Sequence[Array]) -> Array:
    """Mean of several answers, cell by cell; a cell that is absent in one is absent."""
    found: Array = np.mean(np.stack(arrays), axis=0)
    return found


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
