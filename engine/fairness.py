"""Who is next: each flow's tokens served, divided by its weight.

A flow is a tenant's requests of one priority. Shares are relative: a class with four times the
weight gets four times the tokens while both have work, and nobody ever gets none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.messages import Priority, RequestMeta

#: Share of the engine that a flow of a class gets, relative to `normal`.
WEIGHTS: Final[dict[Priority, float]] = {"high": 4.0, "normal": 1.0, "low": 0.25}


class Flow(NamedTuple):
    """Requests that share one claim."""

    tenant: str
    priority: Priority

    @property
    def weight(self) -> float:
        """Its share of the engine, relative to `normal`."""
        return WEIGHTS[self.priority]


def flow_of(meta: RequestMeta) -> Flow:
    """Return the flow a request belongs to."""
    return Flow(meta.tenant, meta.priority)


class Shares:
    """Tokens served to each flow over its weight; the waiting flow with the least is admitted next.

    Invariant: `level`, the served figure of the last flow admitted, never falls, and a flow that had
    nothing to do starts at it. So idle time saves up no claim, and with finitely many flows each
    admission brings the level nearer to every flow that waits.
    """

    def __init__(self) -> None:
        self.served: dict[Flow, float] = {}
        self.level = 0.0

    def arrive(self, flow: Flow) -> None:
        """Let in a flow of which nothing waits or runs."""
        self.served[flow] = max(self.served.get(flow, 0.0), self.level)

    def admit(self, flow: Flow, tokens: int) -> None:
        """Charge an admission with the prompt tokens that will be computed for it."""
        self.level = max(self.level, self.served[flow])
        self.charge(flow, tokens)

    def charge(self, flow: Flow, tokens: int) -> None:
        """Charge tokens as they are served."""
        self.served[flow] += tokens / flow.weight

    def clear(self) -> None:
        """Forget everything: nobody waits or runs, so there is nobody to be fair to."""
        self.served.clear()
        self.level = 0.0
