"""Verified reverts: the answer to a known question before faults and after them."""

from __future__ import annotations

import asyncio

from chaos.canary import Answer, Canary, Verdict
from chaos.contract import Ended

_NEVER_ASKED = Answer([], "the canary was never asked")


class Reverts:
    """Owes each fault that ended a verdict. `turn` is held while the canary may be asked.

    The answer before is taken while nothing is in force; every fault until all have ended is
    measured by it. Without a canary (None) nothing is checked, and the verdicts say so.
    """

    def __init__(self, canary: Canary | None) -> None:
        self.turn = asyncio.Lock()
        self._canary = canary
        self._why_not = "QUAVER_CHAOS_VERIFY is off on this server"
        self._before = _NEVER_ASKED
        self._owed: list[Ended] = []

    async def remember(self) -> None:
        """Ask before a fault. The caller holds the turn and knows that nothing is in force."""
        if self._canary is not None:
            self._before = await self._canary.answer()

    def owe(self, ended: Ended) -> None:
        """Have a fault verified as soon as nothing is in force."""
        self._owed.append(ended)

    async def verify(self) -> list[Ended]:
        """Ask after faults; return those whose verdict is known now. Called as `remember` is."""
        if not self._owed:
            return []
        verdict = await self.look()
        owed, self._owed = self._owed, []
        for ended in owed:
            ended.reverted = verdict
        return owed

    async def look(self) -> Verdict:
        """Ask now, whatever is in force, and compare with the answer before."""
        if self._canary is None:
            return Verdict(state="not checked", why=self._why_not)
        return self._canary.compare(self._before, await self._canary.answer())

    def give_up(self, why: str) -> None:
        """Ask no more, and say why."""
        self._canary, self._why_not = None, why
