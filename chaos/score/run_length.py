"""How many healthy responses pass between two false pages: the evidence of many services at once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from alerting.judge import Verdict
from alerting.route import CAP, inputs_of
from alerting.rules import QuantilePreset, Rules
from alerting.sequential import bets, by_statistic, grade
from chaos.score.statistics import Estimate, mean_gap

_STEPS = 20_000
_POOLS, _EACH = 32, 8  # services: so many for each of these draws of families
_BOUND_ROWS = 8192


class RunLength(msgspec.Struct, frozen=True, kw_only=True):
    """Mean responses between pages.

    `resampled`: of healthy answers drawn again and again; its interval is over families of prompts, of which
    each service has others. `at_bound`: with every healthy rate as high as the baseline holds possible, and
    all tests passed together; its interval is the simulation's. `responses` were simulated for each.
    """

    resampled: Estimate
    at_bound: Estimate
    responses: int


def run_length(  # noqa: PLR0917
    rules: Rules,
    verdicts: Sequence[Verdict],
    families: Sequence[str],
    left: float,
    left_bound: float,
    steps: int = _STEPS,
) -> RunLength:
    """Simulate `QuaverJointEvidence` over `steps` responses of many services.

    `verdicts` and `families` are of whole healthy responses; `left` is the share of readers who leave in
    health, `left_bound` the baseline's bound of it.
    """
    inputs = inputs_of(rules.preset(rules.default))
    rates = {name: rate for name, rate in verdicts[0].rates.items() if name in inputs}
    groups = [*by_statistic(rates).values()]
    bounds = [tuple(rates[name] for name in names) for names in groups]
    grades = np.array([[grade(verdict.tests, names) for names in groups] for verdict in verdicts])
    level = (np.arange(_BOUND_ROWS) + 0.5) / _BOUND_ROWS
    together = np.array([np.searchsorted(own, level) for own in bounds]).T
    rng = np.random.default_rng(0)
    services = _Services(rules, [inputs[names[0]] for names in groups], bounds, left_bound)
    plain = services.pages(grades, [np.arange(len(grades))] * _POOLS, left, steps, rng)
    pages = services.pages(grades, _pools(families, rng), left, steps, rng)
    bound = services.pages(together, [np.arange(_BOUND_ROWS)] * _POOLS, left_bound, steps, rng)
    responses = _POOLS * _EACH * steps
    often, seldom = np.quantile(pages, (0.975, 0.025)) / (_EACH * steps)
    found = mean_gap(int(plain.sum()), responses)
    return RunLength(
        resampled=Estimate(
            found.value,
            min(1 / often, found.low) if often and found.low else found.low,
            max(1 / seldom, found.high) if seldom and found.high else None,
        ),
        at_bound=mean_gap(int(bound.sum()), responses),
        responses=responses,
    )


class _Services:
    """What the evidence of every service is multiplied by: columns are statistics × powers."""

    def __init__(
        self, rules: Rules, signals: Sequence[str], bounds: Sequence[tuple[float, ...]], left_bound: float
    ) -> None:
        """Each statistic speaks for one of the joint inputs (`signals`), and has `bounds` of its tests."""
        self._rules = rules
        powers = tuple(rules.rate.powers)
        self._bets = [np.array(bets(powers, rates)) for rates in bounds]  # [grades, powers] each
        self._left = np.array(bets(powers, (left_bound,)))
        preset = rules.preset(rules.default)
        assert isinstance(preset, QuantilePreset)
        mixture = preset.mixture
        shares = {"confidence": mixture.confidence, "entropy": mixture.entropy}
        own = [shares[signal] / signals.count(signal) for signal in signals]
        self._weights = np.repeat([*own, mixture.interruption], len(powers)) / len(powers)

    def pages(
        self,
        grades: NDArray[np.intp],
        pools: Sequence[NDArray[np.intp]],
        left: float,
        steps: int,
        rng: np.random.Generator,
    ) -> NDArray[np.intp]:
        """Return the pages [pools] of the services that draw from each pool of rows of `grades`.

        A page starts a service's evidence anew.
        """
        table = np.concatenate([own[grades[:, at]] for at, own in enumerate(self._bets)], axis=1)
        sizes = np.repeat([len(pool) for pool in pools], _EACH)
        rows = np.repeat([np.resize(pool, sizes.max()) for pool in pools], _EACH, axis=0)
        threshold = self._rules.rate.threshold
        evidence = np.zeros((len(rows), len(self._weights)))
        pages = np.zeros(len(rows), np.intp)
        for _ in range(steps):
            drawn = rows[np.arange(len(rows)), rng.integers(0, sizes)]
            stays = (rng.random(len(rows)) >= left).astype(int)
            evidence += 1
            evidence *= np.concatenate([table[drawn], self._left[stays]], axis=1)
            np.minimum(evidence, CAP * threshold, out=evidence)
            paged = evidence @ self._weights >= threshold
            pages += paged
            evidence[paged] = 0
        return np.add.reduceat(pages, np.arange(0, len(rows), _EACH))


def _pools(families: Sequence[str], rng: np.random.Generator) -> list[NDArray[np.intp]]:
    """Rows of families drawn with replacement, as many as there are."""
    found = np.asarray(families)
    members = [np.flatnonzero(found == name) for name in np.unique(found)]
    drawn = rng.integers(0, len(members), (_POOLS, len(members)))
    return [np.concatenate([members[i] for i in draw]) for draw in drawn]
