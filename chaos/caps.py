"""How much of a fault a server allows: the largest magnitude of each of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from chaos.faults.base import Fault
from chaos.faults.registry import KINDS, describe


class Caps:
    """The caps of every kind. `given` is `KIND.PARAMETER` → largest magnitude and comes before a kind's own.

    Raises ValueError on a name that no number of any kind has. The bounds of a schema hold besides.
    """

    def __init__(self, given: Mapping[str, float]) -> None:
        self._caps = {name: dict(kind.caps) for name, kind in KINDS.items()}
        for path, cap in given.items():
            name, _, param = path.partition(".")
            if name not in KINDS or param not in numbers_of(KINDS[name]):
                raise ValueError(f"{path!r} is no KIND.PARAMETER that is a number; see `quaver chaos list`")
            self._caps[name][param] = cap
        self.kinds = [self._bounded(kind) for kind in describe()]

    def exceeded(self, fault: Fault) -> str | None:
        """Return what this server allows, in words, when a fault asks for more."""
        for param, cap in self._caps[fault.kind].items():
            if not abs(getattr(fault, param)) <= cap:
                return f"{param} of at most {cap:g}"
        return None

    def _bounded(self, kind: dict[str, Any]) -> dict[str, Any]:
        """Return a kind's description with the caps as bounds in its schema."""
        properties = dict(kind["params"]["properties"])
        for param, cap in self._caps[kind["kind"]].items():
            field = properties[param]
            field = field | {"maximum": min(cap, field.get("maximum", cap))}
            if field.get("minimum", 0) < 0:
                field["minimum"] = max(-cap, field["minimum"])
            properties[param] = field
        return kind | {"params": kind["params"] | {"properties": properties}}


def numbers_of(kind: type[Fault]) -> list[str]:
    """Return the names of a kind's parameters that are numbers."""
    properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return [name for name, field in properties.items() if field.get("type") in ("integer", "number")]
