"""What the card covers: each fault at each magnitude, and its harmless control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from chaos.faults.registry import KINDS, PROMPT_KINDS
from chaos.prompts import Item, twins

Nature = Literal["numeric", "semantic"]

Twin = Callable[[Item], Item]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a row has to reach at least: AUROCs of the passive score and of the better of tap and canary;
    responses and canaries until the page. None: reported only."""

    passive: float | None = None
    probed: float | None = None
    responses: float | None = None
    canaries: float | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the card: a fault with its numbers. `beside_control`: struck answers are compared with those
    under the control, since the fault asks another question than the prompt does."""

    name: str
    title: str
    kind: str
    params: dict[str, Any] = {}
    beside_control: bool = False
    cause: str | None = None  # of alerting/causes.yaml, which should be named first
    target: Target = Target()

    @property
    def nature(self) -> Nature:
        """Numeric controls run the fault's own path to no effect; semantic ones change the text."""
        return "semantic" if self.kind in PROMPT_KINDS else "numeric"

    @property
    def control(self) -> str:
        """Name of the control's cell."""
        return f"{self.name}.control"

    @property
    def healthy(self) -> str:
        """Name of the cell that struck answers are compared with."""
        return self.control if self.beside_control else CLEAN.name

    def cells(self) -> Iterator[Cell]:
        """Yield what has to be generated for it beside the clean answers that all share."""
        yield Cell(name=self.name, kind=self.kind, params=self.params)
        yield Cell(name=self.control, kind=self.kind, params={**self.params, **KINDS[self.kind].control})


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of answers: the same prompts and seeds in every cell, under a fault or as a twin."""

    name: str
    kind: str | None = None
    params: dict[str, Any] = {}
    twin: str | None = None


CLEAN = Cell(name="clean")

#: Ways to ask another question about the same passage, by name.
TWINS: dict[str, Twin] = {
    twin.__name__: twin for twin in (twins.absent, twins.answered, twins.lacking, twins.sparing, twins.cited)
}

#: Every fault of the card. Magnitudes are fixed here, before anything is measured.
CASES: tuple[Case, ...] = (
    Case(
        name="absent_slot",
        title="Question that the passage does not answer",
        kind="absent_slot",
        beside_control=True,
        cause="beyond_knowledge",
        target=Target(passive=0.78, probed=0.80, responses=20, canaries=10),
    ),
    Case(
        name="authority",
        title="Invented authority against the passage",
        kind="authority",
        target=Target(canaries=10),
    ),
    Case(name="premise", title="Question that takes a falsehood for granted", kind="premise"),
    Case(name="citation", title="Citation of a document that is not there", kind="citation"),
    Case(
        name="truncation",
        title="The sentence that answers is gone",
        kind="truncation",
        params={"side": "needle"},
        cause="context_lost",
        target=Target(passive=0.76, probed=0.82, responses=20, canaries=8),
    ),
    Case(
        name="noise_1",
        title="Logit noise, σ 1",
        kind="noise",
        params={"sigma": 1.0},
        cause="logits_changed",
        target=Target(passive=0.57, probed=0.70, canaries=30),
    ),
    Case(
        name="noise_2",
        title="Logit noise, σ 2",
        kind="noise",
        params={"sigma": 2.0},
        cause="logits_changed",
        target=Target(passive=0.76, probed=0.92, responses=25, canaries=8),
    ),
    Case(
        name="noise_3",
        title="Logit noise, σ 3",
        kind="noise",
        params={"sigma": 3.0},
        cause="logits_changed",
        target=Target(passive=0.90, probed=0.98, responses=8, canaries=4),
    ),
    Case(name="hidden_noise", title="Noise on the hidden state before the head", kind="hidden_noise"),
    Case(name="head_noise", title="Noise on the weights of the head", kind="head_noise"),
    Case(name="sampler", title="Sampler at temperature 1.8", kind="sampler"),
    Case(name="template", title="Another model's chat template", kind="template"),
    Case(
        name="keys_rolled",
        title="Keys rolled, all layers",
        kind="kv_roll",
        cause="keys_misaligned",
        target=Target(passive=0.98, probed=0.98, responses=6, canaries=4),
    ),
    Case(
        name="keys_rolled_five",
        title="Keys rolled, five layers",
        kind="kv_roll",
        params={"first_layer": 10, "layers": 5},
        cause="keys_misaligned",
        target=Target(passive=0.85, probed=0.95, responses=12, canaries=6),
    ),
    Case(
        name="rope_16",
        title="Rotary positions off by 16",
        kind="kv_rope",
        params={"positions": 16},
        cause="positions_off",
        target=Target(passive=0.70, probed=0.80, responses=25, canaries=8),
    ),
    Case(
        name="pages_swapped",
        title="Pages of another prompt",
        kind="kv_swap",
        params={"pages": 8},
        cause="context_lost",
        target=Target(passive=0.70, probed=0.80, responses=25, canaries=8),
    ),
    Case(name="head_stuck", title="A head stuck on one position", kind="head_stuck"),
)
