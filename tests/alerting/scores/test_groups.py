"""Limits for kinds of prompts that no fit has seen: each kind's heads have a place of their own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from alerting.limits import conformal_threshold
from alerting.samples import Sample, scored
from alerting.scores import LayerRow, Response, folds, response_scores
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS

LAYERS, HEADS, TOKENS = 6, 4, 8
KINDS, EACH = 9, 30


def responses(kinds: range) -> list[Response]:
    found = []
    for kind in kinds:
        place = np.random.default_rng(kind).normal(0.5, 0.04, (len(HEAD_SIGNALS), LAYERS, HEADS))
        for number in range(EACH):
            rng = np.random.default_rng(1000 * kind + number)
            level = place + rng.normal(0, 0.02, (len(HEAD_SIGNALS), LAYERS, 1))
            heads = level + rng.normal(0, 0.05, (TOKENS, len(HEAD_SIGNALS), LAYERS, HEADS))
            rows = [LayerRow(step, range(LAYERS), part.astype(np.float16)) for step, part in enumerate(heads)]
            tokens = np.full((TOKENS, len(TOKEN_SIGNALS)), 0.5, np.float32)
            tokens += rng.normal(0, 0.05, tokens.shape).astype(np.float32)
            found.append(Response(tokens, rows, 4, f"kind {kind}"))
    order = np.random.default_rng(0).permutation(len(found))
    return [found[at] for at in order]


def passing(known: list[Response], unseen: list[Response]) -> float:
    """Share of unseen kinds' responses beyond the limit that 5 % of the known ones' scores pass."""
    samples = [Sample(route="qa", band="greedy", group=r.group, statistics={}, kept=r) for r in known]
    found, frozen = scored(samples)
    limit = conformal_threshold([s.statistics["heads_residual"] for s in found], 0.05)
    scores = [response_scores(r.tokens, r.layers, r.sentence, frozen["greedy"]) for r in unseen]
    return float(np.mean([score["heads_residual"] > limit for score in scores]))


def test_unseen_kinds_pass_as_seldom_as_allowed_where_kinds_are_known() -> None:
    known, unseen = responses(range(KINDS)), responses(range(KINDS, KINDS + 5))
    assert passing(known, unseen) < 0.1
    assert passing([r._replace(group="") for r in known], unseen) > 0.3


def test_every_sample_counts_where_kinds_are_known() -> None:
    known = responses(range(KINDS))
    samples = [Sample(route="qa", band="greedy", group=r.group, statistics={"a": 1.0}, kept=r) for r in known]
    found, frozen = scored(samples)
    assert len(found) == len(samples)
    assert all(s.kept is None and s.statistics["a"] == 1.0 and "combined" in s.statistics for s in found)
    assert frozen["greedy"].responses == len(samples) // 2
    without, _ = scored([msgspec.structs.replace(s, group="") for s in samples])
    assert len(without) == len(samples) - len(samples[::4])


def test_folds_hold_every_kind_once() -> None:
    assert folds(["a", "b"]) == folds(["", "", ""]) == []
    parts = folds(["b", "a", "c", "d", "", "a"])
    assert sorted(kind for part in parts for kind in part) == ["a", "b", "c", "d"]
    assert len(parts) == 3


@pytest.mark.parametrize("some", [0, 1])
def test_one_response_of_no_known_kind_means_that_kinds_are_not_known(some: int) -> None:
    known = responses(range(4))
    known[some] = known[some]._replace(group="")
    found, _ = scored(
        [Sample(route="qa", band="greedy", group=r.group, statistics={}, kept=r) for r in known]
    )
    assert len(found) < len(known)
