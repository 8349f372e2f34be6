"""Healthy responses as the baseline counts them, with the statistics that need a fit first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from alerting.rules import FITTED
from alerting.scores import Frozen, Response, response_scores
from alerting.scores.fit import fit_heads_of, fit_usual


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One healthy response: its statistics, the raw presets that called it an L1, its rows if kept."""

    route: str
    band: str
    statistics: dict[str, float]
    raw_l1: list[str] = []
    kept: Response | None = None


SPENT = 4  # of so many samples one makes the fit of the heads


def to_collect(count: int) -> int:
    """Return how many samples of a band leave `count` when the fit of the heads has taken its own."""
    return -(-count * SPENT // (SPENT - 1))


def to_spend(samples: Sequence[Sample]) -> set[int]:
    """Return the places of every fourth kept sample of each band."""
    kept: dict[str, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.kept is not None:
            kept.setdefault(sample.band, []).append(at)
    return {at for band in kept.values() for at in band[::SPENT]}


def scored(
    samples: list[Sample], contrast: Sequence[tuple[Response, bool]] = ()
) -> tuple[list[Sample], dict[str, Frozen]]:
    """Add the statistics that need a fit to the samples that were kept whole; return the fits, by band.

    Where there is layer detail every fourth kept sample of a band makes the fit of the heads and is no sample
    any more.
    """
    spent = to_spend(samples)
    heads = fit_heads_of([samples[at].kept for at in sorted(spent)], contrast)  # type: ignore[misc]
    if heads is not None:
        samples = [sample for at, sample in enumerate(samples) if at not in spent]
    frozen: dict[str, Frozen] = {}
    for band in {sample.band for sample in samples}:
        whole = [s.kept for s in samples if s.band == band and s.kept is not None]
        if whole:
            frozen[band] = fit_usual(whole, heads)
    return [_with_scores(sample, frozen) for sample in samples], frozen


def _with_scores(sample: Sample, frozen: Mapping[str, Frozen]) -> Sample:
    if sample.kept is None:
        return sample
    tokens, layers, sentence = sample.kept
    found = response_scores(tokens, layers, sentence, frozen[sample.band])
    fitted = {name: found[name] for name in FITTED if name in found}
    return msgspec.structs.replace(sample, statistics=sample.statistics | fitted, kept=None)
