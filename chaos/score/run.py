"""Makes the card: generate (resumable), fit on calibration prompts, measure on prompts never seen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from alerting.canary import baseline as canaries
from alerting.canary.baseline import Answer as CanaryAnswer
from alerting.canary.baseline import CanaryBaseline
from alerting.rules import load_rules
from alerting.scores import fit
from chaos.prompts import Item, generate
from chaos.score import peers
from chaos.score.answer import Answer, Store
from chaos.score.bench import Bench
from chaos.score.card import Material, card
from chaos.score.plan import CASES, CLEAN, Case, Cell
from chaos.score.replay import QUANTIZATION, baseline_of, reading
from chaos.score.signals import MODEL, held_out_scores, response
from engine.settings import EngineSettings

TEMPERATURE = 0.7
_SEED = 7_000
_FORMAT = 2  # of what is kept: another one is generated again
#: Calibration prompts with and without what answers them, as `quaver calibrate` asks them too.
_CONTRAST = (
    (Cell(name="contrast.lacking", twin="lacking"), True),
    (Cell(name="contrast.sparing", twin="sparing"), False),
    (Cell(name="contrast.absent", twin="absent"), True),
    (Cell(name="contrast.answered", twin="answered"), False),
)

#: Settings that change what the model computes: answers of others are not gone on with.
_NUMERIC = {"backend", "dtype", "weight_bits", "compensation"}

#: How canaries are asked under a fault and its control: so many together, as some faults need company, and
#: not through the prefix cache: what it holds by then is not what it held in health, and rounding follows.
_STRUCK_WAY = (4, False)

Progress = Callable[[str, int, int], None]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is generated: answers a cell, healthy answers for the limits, questions for each half of both
    contrasts, the replay without a fault, canaries and their rounds in health (8 or more) and under each
    fault."""

    n: int = 96
    calibration: int = 640
    contrast: int = 160
    replay: int = 2000
    canaries: int = 24
    canary_rounds: int = 24
    canary_struck: int = 2

    @classmethod
    def quick(cls, n: int = 24) -> Sizes:
        """Small enough for a few minutes on two cores; the intervals are wide."""
        return cls(n=n, calibration=240, contrast=60, replay=300, canaries=12, canary_rounds=12)

    def total(self, cases: Sequence[Case]) -> int:
        """Answers to generate in all."""
        cells = 1 + sum(len(list(case.cells())) for case in cases)
        canary = self.canaries * (self.canary_rounds + self.canary_struck * cells)
        return self.calibration + len(_CONTRAST) * self.contrast + cells * self.n + self.replay + canary


def score(
    settings: EngineSettings, sizes: Sizes, folder: Path, progress: Progress, cases: Sequence[Case] = CASES
) -> dict[str, Any]:
    """Generate what is not yet in `folder`, and return the card.

    `progress` hears the cell, the answers so far and those in all. Raises ModelError without a model, OSError
    when the folder cannot be written.
    """
    began = time.time()
    run = _Run(settings, sizes, folder, progress, cases)
    material = run.material()
    made = card(cases, material)
    return {
        "made": {
            "model": settings.model,
            "temperature": TEMPERATURE,
            "sizes": msgspec.to_builtins(sizes),
            "started": began,
            "seconds": time.time() - began,
            "resumed": run.resumed,
            "lm_polygraph": peers.version(),
        },
        **made,
    }


class _Run:
    def __init__(
        self,
        settings: EngineSettings,
        sizes: Sizes,
        folder: Path,
        progress: Progress,
        cases: Sequence[Case],
    ) -> None:
        self._settings, self._sizes, self._cases = settings, sizes, cases
        cells = [cell for case in cases for cell in case.cells()]
        own = settings.model_dump(include=_NUMERIC, exclude_defaults=True)
        made_by = [settings.model, own] if own else [settings.model]
        key = msgspec.json.encode([_FORMAT, *made_by, sizes, cells, TEMPERATURE, _SEED, peers.version()])
        self._store = Store(folder / hashlib.sha256(key).hexdigest()[:12])
        self._progress = progress
        self._bench: Bench | None = None
        self._done, self._total = 0, sizes.total(cases)
        self.resumed = False

    def material(self) -> Material:
        sizes = self._sizes
        healthy = self._answers(
            "calibration", generate("calibration", sizes.calibration, seed=11), CLEAN, seed=1
        )
        some = generate("calibration", sizes.contrast, seed=12)
        contrast = [
            (answer, lacks)
            for cell, lacks in _CONTRAST
            for answer in self._answers(cell.name, some, cell, seed=2)
        ]
        items = generate("test", sizes.n, seed=13)
        answers = {"clean": self._answers("clean", items, CLEAN, others=True)}
        for case in self._cases:
            for cell in case.cells():
                compared = cell.name in (case.name, case.healthy)
                answers[cell.name] = self._answers(cell.name, items, cell, others=compared)
        rounds, struck = self._canaries()
        replay = self._answers("replay", generate("test", sizes.replay, seed=14), CLEAN, seed=3)
        rules = load_rules()
        return Material(
            answers=answers,
            canaries=struck,
            calm=held_out_scores(healthy, contrast),
            clean_replay=replay,
            frozen=fit(
                [response(answer) for answer in healthy],
                [(response(answer), lacks) for answer, lacks in contrast],
            ),
            baseline=baseline_of(healthy, contrast, rules, TEMPERATURE),
            canary_baseline=_canary_baseline(rounds),
            rules=rules,
            temperature=TEMPERATURE,
            at_once=self._settings.max_running,
        )

    def _canaries(self) -> tuple[list[list[Answer]], dict[str, list[Answer]]]:
        """Rounds in health, and answers under each fault and control; `clean`: in health again.

        What else is in a batch and what comes from the prefix cache changes how numbers are rounded, and with
        it some greedy answers: in health canaries are asked in every such way, as a server asks its own.
        """
        sizes = self._sizes
        rounds = [
            self._canaries_of(
                CLEAN,
                f"canaries.health.{number}",
                canaries.CONDITIONS[number % len(canaries.CONDITIONS)],
                number,
            )
            for number in range(sizes.canary_rounds)
        ]
        cells = [CLEAN, *(cell for case in self._cases for cell in case.cells())]
        struck = {
            cell.name: [
                answer
                for number in range(sizes.canary_struck)
                for answer in self._canaries_of(
                    cell,
                    f"canaries.{cell.name}.{number}",
                    _STRUCK_WAY,
                    100 + number,
                )
            ]
            for cell in cells
        }
        return rounds, struck

    def _canaries_of(self, cell: Cell, name: str, way: tuple[int, bool], seed: int) -> list[Answer]:
        together, cached = way
        asked = generate("calibration", self._sizes.canaries, seed=15)
        return self._answers(name, asked, cell, seed, temperature=0.0, together=together, cached=cached)

    def _answers(
        self,
        name: str,
        items: Sequence[Item],
        cell: Cell,
        seed: int = 0,
        *,
        temperature: float = TEMPERATURE,
        others: bool = False,
        together: int | None = None,
        cached: bool = False,
    ) -> list[Answer]:
        found = self._store.read(name, len(items))
        if found is None:
            if self._bench is None:
                self._bench = Bench(self._settings)
            found = self._bench.answers(
                items,
                cell,
                temperature=temperature,
                seed=_SEED * seed,
                others=others,
                together=together,
                cached=cached,
                progress=lambda count: self._advance(name, count),
            )
            self._store.write(name, found)
        else:
            self.resumed = True
            self._advance(name, len(items))
        return found

    def _advance(self, name: str, count: int) -> None:
        self._done += count
        self._progress(name, self._done, self._total)


def _canary_baseline(rounds: Sequence[Sequence[Answer]]) -> CanaryBaseline:
    known = [
        [
            CanaryAnswer(answer.item, mine, answer.correct)
            for answer in healthy
            if (mine := reading(answer)) is not None
        ]
        for healthy in rounds
    ]
    return canaries.build(known, model=MODEL, quantization=QUANTIZATION, prompts="score")
