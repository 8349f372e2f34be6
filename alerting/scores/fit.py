"""Fits what the scores need to know of health. Sees healthy responses, and nothing of any fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from alerting.scores.contrast import fit_logistic
from alerting.scores.frozen import Frozen, Heads, pack, usual_of
from alerting.scores.heads import HeadModel, HeadSums, fit_heads
from alerting.scores.rauq import fit_rauq
from alerting.scores.response import FLOORS, response_scores
from alerting.scores.rows import SURPRISAL, Floats, Response, token_array, usable

FOLDS = 3


class FitError(ValueError):
    """There is too little to fit on; the message says what is missing."""


def fit(healthy: Sequence[Response], contrast: Sequence[tuple[Response, bool]] = ()) -> Frozen:
    """Fit on healthy responses in order of arrival, at least two of them with tokens.

    Every second one sets the moments of the heads, the others how the scores vary under health: on the
    first they would look better than they are. Raises FitError.
    """
    return fit_usual(healthy[1::2], fit_heads_of(healthy[::2], contrast))


def folds(groups: Iterable[str]) -> list[frozenset[str]]:
    """Return `FOLDS` parts of the kinds of prompts: the kinds of one are scored by a fit on the others.

    Prompts to come are of other kinds too. A fit knows what healthy answers to its own kinds vary in, so
    limits of scores that have seen the kind would be too near. Empty where there are too few kinds.
    """
    names = sorted({*groups} - {""})
    return [] if len(names) < FOLDS else [frozenset(names[fold::FOLDS]) for fold in range(FOLDS)]


def fit_heads_of(healthy: Sequence[Response], contrast: Sequence[tuple[Response, bool]] = ()) -> Heads | None:
    """Fit the heads on healthy responses; None where there is too little layer detail.

    `contrast` are further answers, each with whether it was given *without* what it needs (a passage whose
    answering sentence was taken out): of calibration prompts only.
    """
    rows = [usable(r.layers) for r in healthy]
    model = fit_heads(rows)
    if model is None:
        return None
    weights = None
    if contrast:
        known = [(z, bad) for r, bad in contrast if (z := standardised(model, r)) is not None]
        known += [(z, False) for r in healthy if (z := standardised(model, r)) is not None]
        weights = fit_logistic(np.stack([z for z, _ in known]), [bad for _, bad in known])
    return pack(model, fit_rauq(rows, model.shape), weights)


def fit_usual(healthy: Sequence[Response], heads: Heads | None) -> Frozen:
    """Fit how the scores vary over healthy responses that `heads` were not fitted on. Raises FitError."""
    surprisals = [found[:, SURPRISAL] for r in healthy if len(found := token_array(r.tokens)[0])]
    if not surprisals:
        raise FitError("there are no healthy responses with signals to score by: collect more")
    frozen = Frozen(
        responses=len(surprisals),
        tokens=sum(map(len, surprisals)),
        surprisal=float(np.concatenate(surprisals).mean()),
        usual={},
        heads=heads,
    )
    scores = [response_scores(r.tokens, r.layers, r.sentence, frozen) for r in healthy]
    return msgspec.structs.replace(frozen, usual=usual_of(scores, FLOORS))


def standardised(model: HeadModel, response: Response) -> Floats | None:
    """Return a response's standardised heads [HEAD_SIGNALS, layers, heads], None without detail."""
    sums = HeadSums(model)
    for row in usable(response.layers):
        sums.add(row)
    return sums.standardised()
