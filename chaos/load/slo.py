"""What a request must keep to count as good: limits on its own times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chaos.load.reading import Reading

NAMES = {
    "ttft": "time to the first token, from the intended start",
    "itl": "the longest time between two tokens",
    "tpot": "mean time per output token after the first",
    "e2e": "the whole answer, from the intended start",
}


class SloError(ValueError):
    """A limit that cannot be read; the message says how one is written."""


@dataclass(frozen=True)
class Slo:
    """Limits in seconds by the names of `NAMES`. Without limits every answer read to its end is good."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=0.8,tpot=50ms`: seconds, or milliseconds with `ms`. Raises SloError."""
        limits: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            name, value = name.strip(), value.strip()
            if name not in NAMES:
                raise SloError(
                    f"{name!r} is no limit; there are {', '.join(NAMES)}, as in ttft=0.8,tpot=50ms"
                )
            limits[name] = _seconds(part, value)
        return cls(limits)

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}" for name, limit in self.limits.items())

    def missed(self, reading: Reading) -> list[str]:
        """Name what a reading did not keep: limits, or its outcome where it was not read to its end."""
        if reading.outcome != "read":
            return [reading.outcome]
        found = {
            "ttft": reading.first_token_due_s,
            "itl": max((seconds for seconds, _ in reading.token_gaps()), default=None),
            "tpot": reading.per_output_token_s,
            "e2e": reading.duration_due_s,
        }
        times = ((name, found[name], limit) for name, limit in self.limits.items())
        return [name for name, seconds, limit in times if seconds is not None and seconds > limit]


def _seconds(part: str, value: str) -> float:
    number, unit = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise SloError(f"{part!r}: a limit is a number of seconds above 0, as in ttft=0.8,tpot=50ms")
    return seconds
