"""What the demo breaks, and how long each part may take on the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOTAL_S = 600.0  # what the whole run is planned to take
STREAMS = 16  # readers at once, as many as the engine decodes together
MAX_TOKENS = 24
CLEAN = 100  # responses in a clean window, at least
RECOVERY = 16  # responses after a fault before the next step, at least
FINALE_BASE = 48  # responses of impatient readers before the last fault
FINALE_S = 90.0
FINALE_TOKENS = 48
FINALE_SIGMA = 4.0
FEW, MANY = 24, 100  # bounds of a control or fault window, in responses
CALIBRATION = (160, 360)  # bounds of the calibration, in responses
CALIBRATION_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One fault beside its harmless control. `why_missed` is said when no alert fires."""

    name: str
    title: str
    kind: str
    params: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    why_missed: str


_SURE = (
    "the model repeats the falsehood as surely as it would the truth, so no signal of doubt moves "
    "(docs/signals.md); known-answer probes and users' feedback see it"
)

#: In order, grouped by the clean window that comes first.
EXPERIMENTS: tuple[tuple[Experiment, ...], ...] = (
    (
        Experiment(
            name="authority",
            title="an invented authority contradicts the passage",
            kind="authority",
            control={"harmless": True},
            why_missed=_SURE,
        ),
        Experiment(
            name="premise",
            title="the question rests on a false premise",
            kind="premise",
            control={"harmless": True},
            why_missed=_SURE,
        ),
    ),
    (
        Experiment(
            name="truncation",
            title="the end of the passage is cut off, and the answer with it",
            kind="truncation",
            params={"side": "suffix", "ratio": 0.4},
            control={"side": "suffix", "ratio": 0.4, "spare_question": True},
            why_missed="too few answers hung on the sentences that were cut: the rate did not rise enough",
        ),
    ),
    (
        Experiment(
            name="noise",
            title="Gaussian noise of σ 2 on the logits",
            kind="noise",
            params={"sigma": 2.0},
            control={"sigma": 0.0},
            why_missed="too few answers were hit hard enough: the rate did not rise enough",
        ),
    ),
)


def experiments() -> list[Experiment]:
    """Return all experiments in order."""
    return [experiment for group in EXPERIMENTS for experiment in group]


def calibration_size(rate: float) -> int:
    """Return how many healthy responses to calibrate on, at `rate` responses a second."""
    least, most = CALIBRATION
    return max(least, min(most, int(rate * CALIBRATION_S)))


@dataclass(frozen=True)
class Plan:
    """Sizes of the windows in responses, and the seconds they should take together."""

    rate: float  # responses a second
    clean: int
    fault: int
    recovery: int
    seconds: float
    fits: bool

    def limit_s(self, responses: int) -> float:
        """Return how long to wait for so many responses before going on without them."""
        return 2.5 * responses / self.rate + 20.0


def make_plan(rate: float, left_s: float) -> Plan:
    """Size the windows to `left_s` seconds at `rate` responses a second.

    Clean windows keep their least size whatever the machine; `fits` says whether that works out.
    """
    faults, cleans = len(experiments()), len(EXPERIMENTS)
    in_flight = 3 * faults * STREAMS  # answers that span the edge of a control or fault window
    fixed = cleans * CLEAN + faults * RECOVERY + FINALE_BASE + in_flight
    wanted = ((left_s - FINALE_S) * rate - fixed) / (2 * faults)
    fault = int(max(FEW, min(MANY, wanted)))
    seconds = (fixed + 2 * faults * fault) / rate + FINALE_S
    return Plan(rate, CLEAN, fault, RECOVERY, seconds, seconds <= left_s + 1.0)
