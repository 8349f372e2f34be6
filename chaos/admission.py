"""Whether a fault may start here: the switch, the lever, the caps, the overlaps.

Faults that could reach the same request act on it one after the other, in their declared `order`, whichever
started first. Two of one kind could not be told apart there and are refused; nothing replaces anything.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from chaos.caps import Caps
from chaos.contract import ChaosError, Running, StartFault
from chaos.faults.base import Fault
from chaos.faults.registry import parse_fault
from chaos.selector import Selector, parse_selector
from chaos.settings import ChaosSettings
from chaos.stops import Stops
from engine.messages import RequestMeta

REMEMBERED = 500  # requests, for previews
_LACKING = {
    "host": "no KV cache in the host's memory (QUAVER_KV_HOST_MB is 0 or less than a block, "
    "QUAVER_PREFIX_CACHE is off, or QUAVER_DETERMINISTIC is on)",
    "disk": "no KV cache on disk: start the server with QUAVER_KV_DISK_DIR, without QUAVER_DETERMINISTIC; "
    "if it is, the server's log says why the folder is not used",
}


class Admission:
    """Decides on starts and previews them. Looks at what it is given alone; changes nothing.

    `tiers` returns the tiers of the KV cache below the pool, None while they are not known.
    """

    def __init__(
        self,
        settings: ChaosSettings,
        stops: Stops,
        tiers: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self.settings = settings
        self._tiers = tiers
        self.caps = Caps(settings.chaos_caps)
        self._stops = stops
        self._recent: deque[RequestMeta] = deque(maxlen=REMEMBERED)

    def seen(self, meta: RequestMeta) -> None:
        """Remember a request, for previews. Canaries are no traffic."""
        if not meta.canary:
            self._recent.append(meta)

    def admit(self, request: StartFault, by: str, running: Collection[Running]) -> Running:
        """Return the fault to start; raises ChaosError when it is refused beside those `running`."""
        if not self.settings.chaos:
            raise ChaosError(
                403, "chaos_disabled", "chaos is switched off on this server; set QUAVER_CHAOS=1"
            )
        try:
            fault = parse_fault(request.kind, request.params)
            selector = parse_selector(request.selector)
        except ValueError as error:
            raise ChaosError(400, "invalid_fault", str(error)) from None
        if fault.scope == "process" and selector != Selector():
            raise ChaosError(
                400,
                "invalid_fault",
                f"{fault.kind} acts on the whole model process and takes no selector; leave it out",
            )
        tiers = self._tiers()
        if fault.tier is not None and tiers is not None and fault.tier not in tiers:
            raise ChaosError(
                409,
                "nothing_to_strike",
                f"{fault.kind} would strike nothing, as this server has {_LACKING[fault.tier]}",
            )
        self._within_caps(request, fault, selector)
        flaw = self._stops.flaw(request.stop)
        if flaw is not None:
            raise ChaosError(400, "invalid_stop", flaw)
        if len(running) >= self.settings.chaos_max_faults:
            raise ChaosError(409, "too_many_faults", f"{len(running)} faults are in force; end one first")
        for other in running:
            if other.fault.kind == request.kind and other.selector.overlaps(selector):
                instead = "" if fault.scope == "process" else ", or choose another tenant, route or header"
                raise ChaosError(
                    409,
                    "overlap",
                    f"{other.fault_id} already acts on some of these requests; end it first{instead}",
                )
        return Running(
            fault_id=f"{request.kind}-{secrets.token_hex(4)}",
            fault=fault,
            selector=selector,
            seed=request.seed,
            ttl_s=request.ttl_s,
            by=by,
            stop=request.stop,
            started=time.time(),
        )

    def _within_caps(self, request: StartFault, fault: Fault, selector: Selector) -> None:
        settings = self.settings
        limits = (
            (0 < request.ttl_s <= settings.chaos_max_ttl_s, f"ttl_s in (0, {settings.chaos_max_ttl_s:g}]"),
            (selector.share <= settings.chaos_max_share, f"share of at most {settings.chaos_max_share:g}"),
            (abs(request.seed) < 2**63, "a seed of 64 bits"),
        )
        wrong = [limit for holds, limit in limits if not holds]
        excess = self.caps.exceeded(fault)
        if wrong or excess is not None:
            raise ChaosError(400, "over_cap", f"this server allows {wrong[0] if wrong else excess}")

    def preview(self, selector: dict[str, float | str]) -> dict[str, Any]:
        """Return how many of the recent requests a selector would have reached.

        `admitted` satisfy tenant, route and header; `expected` is that times the share.
        """
        try:
            chosen = parse_selector(selector)
        except ValueError as error:
            raise ChaosError(400, "invalid_selector", str(error)) from None
        admitted = sum(chosen.admits(meta) for meta in self._recent)
        return {"recent": len(self._recent), "admitted": admitted, "expected": chosen.share * admitted}

    def limits(self) -> dict[str, float]:
        """Return the caps that hold for every kind."""
        return {
            "ttl_s": self.settings.chaos_max_ttl_s,
            "share": self.settings.chaos_max_share,
            "faults": self.settings.chaos_max_faults,
        }


def chain(fault: Running, running: Collection[Running]) -> list[str]:
    """Return the ids of the faults that may act on requests of `fault`, itself among them, as they act."""
    beside = [other for other in running if other is fault or other.selector.overlaps(fault.selector)]
    beside.sort(key=lambda other: (other.fault.order, other.fault.kind, other.fault_id))
    return [other.fault_id for other in beside]
