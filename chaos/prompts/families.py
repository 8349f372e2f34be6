"""What the passages are about: families of subjects, the slots a question may ask for, their values.

Read from `families.yaml`, which says how it is written.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec
import yaml

from chaos.prompts.item import Split


class Slot(msgspec.Struct, frozen=True):
    """One fact of a family: three statements, three questions (or none), and the values it takes."""

    statements: tuple[str, str, str]
    values: tuple[str, ...]
    questions: tuple[str, ...] = ()


class Unstated(msgspec.Struct, frozen=True):
    """A fact that no passage states: a question for it, and the statement that would answer it."""

    statement: str
    question: str
    values: tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """Subjects of one sort. `names` are the subjects, `intros` opening sentences without a fact."""

    names: tuple[str, ...]
    intros: tuple[str, str, str]
    slots: dict[str, Slot]
    absent: dict[str, Unstated]

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the slots that have questions."""
        return tuple(name for name, slot in self.slots.items() if slot.questions)


class _Numbers(msgspec.Struct, frozen=True, rename={"start": "from", "stop": "below"}):
    start: int
    stop: int
    step: int = 1


def _load() -> tuple[dict[str, tuple[str, ...]], dict[str, Family]]:
    raw: dict[str, Any] = yaml.safe_load(files("chaos.prompts").joinpath("families.yaml").read_text("utf-8"))
    pools: dict[str, tuple[str, ...]] = {}

    def expand(values: Any) -> tuple[str, ...]:
        if isinstance(values, str):
            return pools[values]
        if isinstance(values, dict):
            numbers = msgspec.convert(values, _Numbers)
            return tuple(map(str, range(numbers.start, numbers.stop, numbers.step)))
        return tuple(map(str, values))

    pools.update({name: expand(values) for name, values in raw["pools"].items()})
    for family in raw["families"].values():
        family["names"] = expand(family["names"])
        for slot in (*family["slots"].values(), *family["absent"].values()):
            slot["values"] = expand(slot["values"])
    return pools, msgspec.convert(raw["families"], dict[str, Family])


POOLS, FAMILIES = _load()

_CALIBRATION = ("person", "zoo", "book", "product", "event", "hotel")

#: The families of each split. `demo` shares those of `calibration`, with other subjects and values;
#: `tuning` and `test` are held out: nothing of theirs is seen before.
GROUPS: dict[Split, tuple[str, ...]] = {
    "calibration": _CALIBRATION,
    "demo": _CALIBRATION,
    "tuning": ("town", "company", "museum", "farm"),
    "test": ("ship", "school", "bridge", "song", "island", "train"),
}
