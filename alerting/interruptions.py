"""Interruptions as evidence: who may contribute how much, and how many there were of late.

The cap protects tenants from each other: nobody opens a breaker for the rest by hanging up. It acts
once two tenants had traffic within `TENANT_MEMORY_S`; a tenant alone can shut out only itself.
"""

from __future__ import annotations

from collections import Counter, deque

TENANT_MEMORY_S = 600.0
_MAX_TENANTS = 256
_MAX_OUTCOMES = 10_000


class Tenants:
    """Which tenants had traffic of late."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def note(self, tenant: str, now: float) -> None:
        """A tenant had a response."""
        self._seen[tenant] = now
        if len(self._seen) > _MAX_TENANTS:
            del self._seen[min(self._seen, key=self._seen.__getitem__)]

    def several(self, now: float) -> bool:
        """Return whether more than one had traffic within the memory."""
        return sum(now - seen <= TENANT_MEMORY_S for seen in self._seen.values()) > 1


class TenantCap:
    """Decides, outcome by outcome, what counts.

    An interruption beyond a tenant's share is left out; a completion never is, so the evidence can
    only become weaker by the cap.
    """

    def __init__(self, share: float) -> None:
        self._ratio = share / (1 - share)
        self._tenants = Tenants()
        self._counted: Counter[str] = Counter()

    def allows(self, tenant: str, interrupted: bool, now: float) -> bool:
        """Return whether this outcome counts, and remember it if so."""
        self._tenants.note(tenant, now)
        if not interrupted:
            return True
        others = self._counted.total() - self._counted[tenant]
        if self._tenants.several(now) and self._counted[tenant] > others * self._ratio:
            return False
        self._counted[tenant] += 1
        return True

    def reset(self) -> None:
        """Forget the interruptions counted so far, not the tenants seen."""
        self._counted.clear()


class OutcomeWindow:
    """The outcomes of the last seconds."""

    def __init__(self, seconds: float, share: float) -> None:
        self._seconds = seconds
        self._ratio = share / (1 - share)
        self._tenants = Tenants()
        self._outcomes: deque[tuple[float, str, bool]] = deque(maxlen=_MAX_OUTCOMES)

    def add(self, time: float, tenant: str, interrupted: bool) -> None:
        """Take one outcome in."""
        self._tenants.note(tenant, time)
        self._outcomes.append((time, tenant, interrupted))

    def counts(self, now: float) -> tuple[int, int]:
        """Return (interruptions, responses) after the cap."""
        while self._outcomes and self._outcomes[0][0] < now - self._seconds:
            self._outcomes.popleft()
        interrupted = Counter(tenant for _, tenant, broke_off in self._outcomes if broke_off)
        events, trials = interrupted.total(), len(self._outcomes)
        if interrupted and self._tenants.several(now):
            top = max(interrupted.values())
            beyond = max(0, top - 1 - int((events - top) * self._ratio))
            events, trials = events - beyond, trials - beyond
        return events, trials
