"""Healthy responses as the baseline counts them, with the statistics that need a fit first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from alerting.rules import FITTED
from alerting.scores import Frozen, Response, response_scores
from alerting.scores.fit import fit_heads_of, fit_usual, folds
from alerting.scores.frozen import Heads


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One healthy response: its statistics, the raw presets that called it an L1, its rows if kept, and the
    kind of its prompt, "" where that is not known."""

    route: str
    band: str
    group: str = ""
    statistics: dict[str, float]
    raw_l1: list[str] = []
    kept: Response | None = None


SPENT = 4  # of so many samples one makes the fit of the heads


def to_collect(count: int) -> int:
    """Return how many samples of a band leave `count` when the fit of the heads has taken its own."""
    return -(-count * SPENT // (SPENT - 1))


def to_spend(samples: Sequence[Sample], every: int = SPENT) -> set[int]:
    """Return the places of every fourth (or so) kept sample of each band."""
    kept: dict[str, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.kept is not None:
            kept.setdefault(sample.band, []).append(at)
    return {at for band in kept.values() for at in band[::every]}


def scored(
    samples: list[Sample], contrast: Sequence[tuple[Response, bool]] = ()
) -> tuple[list[Sample], dict[str, Frozen]]:
    """Add the statistics that need a fit to the samples that were kept whole; return the fits, by band.

    Where the kinds of prompts are known each kind is scored by a fit that has not seen it. Else, where there
    is layer detail, every fourth kept sample of a band makes the fit of the heads and is no sample any more.
    """
    groups = [sample.group for sample in samples if sample.kept is not None]
    parts = folds(groups)
    if parts and all(groups):
        return _crossed(samples, contrast, parts)
    spent = to_spend(samples)
    heads = fit_heads_of([samples[at].kept for at in sorted(spent)], contrast)  # type: ignore[misc]
    if heads is not None:
        samples = [sample for at, sample in enumerate(samples) if at not in spent]
    frozen = _fits(samples, heads)
    return [_with_scores(sample, frozen) for sample in samples], frozen


def _crossed(
    samples: list[Sample], contrast: Sequence[tuple[Response, bool]], parts: Sequence[Set[str]]
) -> tuple[list[Sample], dict[str, Frozen]]:
    def fits(out: Set[str]) -> dict[str, Frozen]:
        """Fit on all kinds of prompts but these: the heads on one half, how scores vary on the other."""
        own = [s for s in samples if s.kept is not None and s.group not in out]
        spent = to_spend(own, every=2)
        heads = fit_heads_of(
            [own[at].kept for at in sorted(spent)],  # type: ignore[misc]
            [(response, lacks) for response, lacks in contrast if response.group not in out],
        )
        return _fits([s for at, s in enumerate(own) if heads is None or at not in spent], heads)

    blind = {group: frozen for out in parts for frozen in (fits(out),) for group in out}
    none: dict[str, Frozen] = {}
    result = [_with_scores(s, none if s.kept is None else blind[s.group]) for s in samples]
    return result, fits(frozenset())


def _fits(samples: Sequence[Sample], heads: Heads | None) -> dict[str, Frozen]:
    """Fit how scores vary in every band that has whole samples."""
    frozen: dict[str, Frozen] = {}
    for band in {sample.band for sample in samples}:
        whole = [s.kept for s in samples if s.band == band and s.kept is not None]
        if whole:
            frozen[band] = fit_usual(whole, heads)
    return frozen


def _with_scores(sample: Sample, frozen: Mapping[str, Frozen]) -> Sample:
    if sample.kept is None or sample.band not in frozen:
        return msgspec.structs.replace(sample, kept=None)
    kept = sample.kept
    found = response_scores(kept.tokens, kept.layers, kept.sentence, frozen[sample.band])
    fitted = {name: found[name] for name in FITTED if name in found}
    return msgspec.structs.replace(sample, statistics=sample.statistics | fitted, kept=None)
