"""Puts the figures together: one dictionary, as it is written to JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from alerting.baseline import Baseline
from alerting.canary.baseline import CanaryBaseline, Judge
from alerting.causes import explain, load_causes
from alerting.judge import Verdict
from alerting.limits import conformal_threshold
from alerting.rules import Rules
from alerting.scores import Frozen
from chaos.score import replay
from chaos.score.answer import Answer
from chaos.score.plan import Case
from chaos.score.run_length import RunLength, run_length
from chaos.score.signals import ROUTE, raw_fires, scores
from chaos.score.statistics import (
    Estimate,
    auroc,
    paired_auroc,
    paired_difference,
    rate_upper,
    share,
)

ALPHA = 0.05
PASSIVE, TAP = "combined", "combined_tap"
#: Scores that others use too, by the names they are known by. Of ours, RAUQ has its heads frozen.
PEERS = {
    "response length": "length",
    "max softmax probability": "response_doubt",
    "perplexity": "response_surprisal",
    "entropy": "response_entropy",
    "EPR": "EPR",
    "RAUQ": "rauq",
}
_BLIND_DRAWS = 200

Scored = list[dict[str, float]]


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated, by cell, and what was fitted on calibration prompts before."""

    answers: Mapping[str, Sequence[Answer]]
    canaries: Mapping[str, Sequence[Answer]]
    calm: Sequence[Mapping[str, float]]  # scores of healthy answers that limits are set on
    clean_replay: Sequence[Answer]
    frozen: Frozen
    baseline: Baseline
    canary_baseline: CanaryBaseline
    rules: Rules
    temperature: float
    at_once: int


def card(cases: Sequence[Case], material: Material) -> dict[str, Any]:
    """Return the whole card but for how it was made."""
    return _Card(material).whole(cases)


class _Card:
    def __init__(self, material: Material) -> None:
        self.m = material
        self._scored: dict[str, Scored] = {}
        self.limits = {
            name: conformal_threshold([found[name] for found in material.calm], ALPHA)
            for name in (PASSIVE, TAP)
        }
        self.judge = Judge(material.canary_baseline)
        self._causes = load_causes()
        self.calm_canaries = replay.distances(replay.compared(self.judge, material.canaries["clean"]))

    def whole(self, cases: Sequence[Case]) -> dict[str, Any]:
        pages = replay.clean_pages(self.m.rules, self.m.baseline, self.m.clean_replay, self.m.temperature)
        lengths = self.run_length(pages.verdicts)
        faults = {case.name: self.fault(case) for case in cases}
        return {
            "faults": faults,
            "clean": {
                "responses": pages.responses,
                "paged": pages.l2,
                "upper95": rate_upper(pages.l2, pages.responses),
                "warnings": pages.l1,
                "fpr": _estimate(self.alarms("clean", PASSIVE)),
                "l1": _estimate(share(sum(v.l1 for v in pages.verdicts.values()), len(pages.verdicts))),
                "run_length": {
                    "wanted": self.m.rules.rate.threshold,
                    "simulated": lengths.responses,
                    "resampled": _estimate(lengths.resampled),
                    "at_bound": _estimate(lengths.at_bound),
                },
            },
            "peers": self.peers(cases),
            "raw_rule": self.raw(cases),
            "blind": self.blind(cases),
            "resilience": _resilience(faults),
        }

    def fault(self, case: Case) -> dict[str, Any]:
        m = self.m
        clean, struck = m.answers[case.healthy], m.answers[case.name]
        seen = replay.delay(m.rules, m.baseline, m.answers["clean"], struck, m.temperature)
        gap, healthy_gap = self.gap(case.name), self.gap("clean")
        fired = self.alarms(case.control, PASSIVE)
        canary, canary_fired, canary_seen = self.canary(case)
        return {
            "title": case.title,
            "touched": sum(answer.touched for answer in struck) / len(struck),
            "harm": _estimate(
                paired_difference(_right(struck), _right(clean), [answer.family for answer in clean])
            ),
            "accuracy": {"clean": float(_right(clean).mean()), "struck": float(_right(struck).mean())},
            "passive": _auroc(self.separation(case, PASSIVE)),
            "tap": _auroc(self.separation(case, TAP)),
            "canary": {**_auroc(canary), "fpr": canary_fired.value},
            "fpr_numeric": _estimate(fired) if case.nature == "numeric" else None,
            "fpr_semantic": _estimate(fired) if case.nature == "semantic" else None,
            "recall_at_5": _estimate(self.alarms(case.name, PASSIVE)),
            "responses_to_detect": seen.responses,
            "tokens_to_detect": seen.tokens,
            "seconds_to_detect": None if seen.responses is None else seen.responses * gap,
            "missed": seen.missed,
            "responses_to_reset": seen.reset,
            "seconds_to_reset": None if seen.reset is None else seen.reset * healthy_gap,
            "canary_responses_to_detect": canary_seen.responses,
            "canary_missed": canary_seen.missed,
            "attributed": self.attributed(case),
            "target": msgspec.to_builtins(case.target),
        }

    def gap(self, cell: str) -> float:
        """Seconds from one answer of a cell to the next."""
        return float(np.mean([answer.seconds for answer in self.m.answers[cell]])) / self.m.at_once

    def run_length(self, verdicts: Mapping[int, Verdict]) -> RunLength:
        m = self.m
        families = [m.clean_replay[place].family for place in verdicts]
        bound = m.baseline.interruption_rate(ROUTE, m.rules)
        return run_length(m.rules, [*verdicts.values()], families, replay.HEALTHY, bound)

    def canary(self, case: Case) -> tuple[Estimate, Estimate, replay.Delay]:
        """AUROC of struck canaries against the same ones in health; the share that the control makes
        suspicious at the 5 % limit; canaries until their alert."""
        struck = self.m.canaries[case.name]
        found = replay.compared(self.judge, struck)
        control = replay.distances(replay.compared(self.judge, self.m.canaries[case.control]))
        limit = self.m.canary_baseline.thresholds["signals@0.05"]
        return (
            paired_auroc(self.calm_canaries, replay.distances(found), [answer.family for answer in struck]),
            share(int((control > limit).sum()), len(control)),
            replay.canary_delay(self.m.rules, self.m.canary_baseline, struck, found),
        )

    def separation(self, case: Case, score: str) -> Estimate:
        clean, struck = self.values(case.healthy, score), self.values(case.name, score)
        return paired_auroc(clean, struck, [a.family for a in self.m.answers[case.name]])

    def peers(self, cases: Sequence[Case]) -> dict[str, dict[str, float]]:
        """AUROC of what others use, by its name and fault."""
        library = {name for answer in self.m.answers["clean"] for name in answer.peers} - PEERS.keys()
        return {
            name: {
                case.name: auroc(self.values(case.healthy, score), self.values(case.name, score))
                for case in cases
            }
            for name, score in [*PEERS.items(), *((name, name) for name in sorted(library))]
        }

    def alarms(self, cell: str, score: str) -> Estimate:
        values = self.values(cell, score)
        return share(int((values > self.limits[score]).sum()), len(values))

    def values(self, cell: str, score: str) -> np.ndarray:
        if cell not in self._scored:
            answers = self.m.answers[cell]
            known = scores(answers, self.m.frozen)
            self._scored[cell] = [found | a.peers for a, found in zip(answers, known, strict=True)]
        return np.array([found.get(score, 0.0) for found in self._scored[cell]])

    def attributed(self, case: Case) -> dict[str, Any] | None:
        """Whether the cause of suspicious answers is named: of those past the 5 % limit, the share with the
        right cause first, and with any other."""
        values = self.values(case.name, PASSIVE)
        taps = self.values(case.name, TAP)
        suspicious = (values > self.limits[PASSIVE]) | (taps > self.limits[TAP])
        if case.cause is None or not suspicious.any():
            return None
        answers = zip(self.m.answers[case.name], self._scored[case.name], suspicious, strict=True)
        named = [
            found[0].name if (found := explain(self._causes, s, self.m.frozen, a.token_rows)) else None
            for a, s, past in answers
            if past
        ]
        return {
            "cause": case.cause,
            "right": sum(name == case.cause for name in named) / len(named),
            "wrong": sum(name not in (None, case.cause) for name in named) / len(named),
            "of": len(named),
        }

    def raw(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Share of answers that the fixed numbers call an L1."""
        names = ["clean", *(case.name for case in cases)]
        return {
            name: float(np.mean([raw_fires(answer, self.m.rules) for answer in self.m.answers[name]]))
            for name in names
        }

    def blind(self, cases: Sequence[Case]) -> dict[str, Any]:
        """With the labels of every pair drawn anew nothing may be found: the largest AUROC of chance, beside
        the 99 % band of as many draws."""
        rng = random.Random(0)
        found: dict[str, dict[str, Any]] = {}
        for case in cases:
            pairs = list(
                zip(
                    self.values(case.healthy, PASSIVE).tolist(),
                    self.values(case.name, PASSIVE).tolist(),
                    strict=True,
                )
            )
            drawn = [_shuffled(pairs, rng) for _ in range(_BLIND_DRAWS)]
            low, high = np.quantile(drawn[1:], [0.005, 0.995])
            found[case.name] = {
                "auroc": drawn[0],
                "mean": float(np.mean(drawn)),
                "band": [float(low), float(high)],
            }
        return {
            "faults": found,
            "found_nothing": all(abs(f["mean"] - 0.5) < 0.02 for f in found.values()),
        }


def _shuffled(pairs: Sequence[tuple[float, float]], rng: random.Random) -> float:
    mixed = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    return auroc([a for a, _ in mixed], [b for _, b in mixed])


def _right(answers: Sequence[Answer]) -> np.ndarray:
    return np.array([float(answer.right) for answer in answers])


def _auroc(estimate: Estimate) -> dict[str, Any]:
    return {"auroc": estimate.value, "ci": [estimate.low, estimate.high]}


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "ci": [estimate.low, estimate.high]}


def _resilience(faults: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Share of all harm whose fault is paged by traffic or by canaries; null when nothing was harmed."""
    harm = {name: max(0.0, fault["harm"]["value"] or 0.0) for name, fault in faults.items()}
    total = sum(harm.values())
    if not total:
        return None
    caught = sum(
        harm[name]
        for name, fault in faults.items()
        if fault["responses_to_detect"] is not None or fault["canary_responses_to_detect"] is not None
    )
    return caught / total
