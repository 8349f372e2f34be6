"""From the signals of a suspicious response to its likely cause: an ordered list of patterns from YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from alerting.rules import RulesError, in_words, read_yaml
from alerting.scores import SCORES, Frozen
from alerting.scores.rows import ENTROPY, token_array
from engine.messages import HEAD_SIGNALS

PACKAGED = Path(__file__).with_name("causes.yaml")

_KL = HEAD_SIGNALS.index("head_kl")

Positive = Annotated[float, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scores(_Strict):
    """Scores in standard deviations: at least so much of each of `all`, less of each of `none`."""

    all: dict[str, float]
    none: dict[str, float] = {}

    @model_validator(mode="after")
    def _known(self) -> Self:
        strange = (self.all.keys() | self.none.keys()) - SCORES.keys()
        if strange:
            raise ValueError(f"no score is named {', '.join(sorted(strange))}")
        return self


class Head(_Strict):
    """One head of one layer, counted from 0 in a model of `layers` layers and `heads` heads."""

    layer: Index
    head: Index
    layers: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    rise: Positive
    kl: Positive
    steps: Annotated[int, Field(ge=1)]


class Climb(_Strict):
    """Lens entropy that climbs in steps after a healthy first token."""

    per_layer: Positive
    first: Positive


class Rule(_Strict):
    """A cause and its one pattern."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    cause: str
    look_at: str
    scores: Scores | None = None
    head: Head | None = None
    climb: Climb | None = None

    @model_validator(mode="after")
    def _one_pattern(self) -> Self:
        if sum(pattern is not None for pattern in (self.scores, self.head, self.climb)) != 1:
            raise ValueError("a rule has exactly one pattern: scores, head or climb")
        return self


class Causes(_Strict):
    """The file."""

    version: Annotated[int, Field(ge=1, le=1)]
    rules: list[Rule]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ValueError("two rules have one name")
        return self


class Found(BaseModel):
    """A rule that holds, and the numbers that say so."""

    name: str
    cause: str
    look_at: str
    evidence: dict[str, float]


class Detail(BaseModel):
    """Layer detail of one token: `lens` [layers] and `heads` [HEAD_SIGNALS, layers, heads] of the `layers`
    (counted from 0) of a model of `of` layers."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    step: int
    layers: Sequence[int]
    of: int
    lens: Any
    heads: Any


def load_causes(path: Path | None = None) -> Causes:
    """Read and check a file of rules (the packaged one when None); raises RulesError."""
    path = path or PACKAGED
    try:
        return Causes.model_validate(read_yaml(path, "causes"))
    except ValidationError as error:
        raise RulesError(f"{path}: {in_words(error)}") from error


def explain(
    causes: Causes, scores: dict[str, float], frozen: Frozen, tokens: Any, details: Sequence[Detail] = ()
) -> list[Found]:
    """Return the rules that hold for a response, the likeliest first.

    `scores` are `response_scores` of it, `tokens` its rows [T, TOKEN_SIGNALS]. A pattern whose signals are
    absent does not hold.
    """
    found = []
    for rule in causes.rules:
        if rule.scores is not None:
            evidence = _scores(rule.scores, scores, frozen)
        elif rule.head is not None:
            evidence = _head(rule.head, details)
        else:
            assert rule.climb is not None
            evidence = _climb(rule.climb, frozen, tokens, details)
        if evidence is not None:
            found.append(Found(name=rule.name, cause=rule.cause, look_at=rule.look_at, evidence=evidence))
    return found


def _scores(pattern: Scores, scores: dict[str, float], frozen: Frozen) -> dict[str, float] | None:
    known = {
        name: frozen.standardise(name, scores[name])
        for name in pattern.all.keys() | pattern.none.keys()
        if name in scores
    }
    if any(name not in known or known[name] < least for name, least in pattern.all.items()):
        return None
    if any(known.get(name, 0.0) >= most for name, most in pattern.none.items()):
        return None
    return {name: round(known[name], 3) for name in pattern.all}


def _head(pattern: Head, details: Sequence[Detail]) -> dict[str, float] | None:
    """The longest run of tokens at which the layer's entropy has risen and its head diverges."""
    entropies: list[float] = []
    run = longest = 0
    rise = kl = 0.0
    for detail in details:
        heads = np.asarray(detail.heads, float)
        wanted = _mapped(pattern.layer, pattern.layers, detail.of)
        if wanted not in detail.layers:
            continue
        place = list(detail.layers).index(wanted)
        entropy = float(np.asarray(detail.lens, float)[place])
        divergence = float(heads[_KL, place, _mapped(pattern.head, pattern.heads, heads.shape[2])])
        before = float(np.median(entropies)) if entropies else np.nan
        holds = entropy - before >= pattern.rise and divergence > pattern.kl
        run = run + 1 if holds else 0
        if run > longest:
            longest, rise, kl = run, entropy - before, divergence
        if not holds and np.isfinite(entropy):
            entropies.append(entropy)
    if longest < pattern.steps:
        return None
    return {"tokens": longest, "rise": round(rise, 3), "head_kl": round(kl, 3)}


def _climb(pattern: Climb, frozen: Frozen, tokens: Any, details: Sequence[Detail]) -> dict[str, float] | None:
    """Means of the lens entropy over thirds of the response, layer by layer."""
    rows, steps = token_array(tokens)
    if not len(rows) or steps[0] != 0 or not details:
        return None
    usual = frozen.usual.get("sentence_entropy")
    if usual is None or abs(rows[0, ENTROPY] - usual[0]) > pattern.first * usual[1]:
        return None
    last = max(detail.step for detail in details) + 1
    thirds: dict[int, list[list[float]]] = {}
    for detail in details:
        third = min(2, detail.step * 3 // last)
        for layer, value in zip(detail.layers, np.asarray(detail.lens, float).tolist(), strict=True):
            if np.isfinite(value):
                thirds.setdefault(layer, [[], [], []])[third].append(value)
    rises = [
        min(np.mean(middle) - np.mean(early), np.mean(late) - np.mean(middle))
        for early, middle, late in thirds.values()
        if early and middle and late
    ]
    climbing = [rise for rise in rises if rise > pattern.per_layer]
    if not rises or len(climbing) * 2 < len(rises):
        return None
    return {"layers": len(climbing), "of": len(rises), "rise": round(float(np.mean(climbing)), 3)}


def _mapped(place: int, of: int, to: int) -> int:
    """The same relative place among `to`."""
    return min(to - 1, round((place + 0.5) / of * to - 0.5))
