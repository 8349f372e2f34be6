"""Faults in the front process, on what the user wrote before the chat template."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chaos.faults.base import Pieces, PromptFault
from chaos.faults.registry import PROMPT_KINDS
from chaos.faults.text import pieces
from chaos.leases import Leases
from chaos.selector import draw
from engine.messages import RequestMeta


class PromptHook(Leases[PromptFault]):
    """Implements `engine.hooks.PromptHook`. Leases change on the event loop; `apply` runs on any thread.

    `cut` cuts text into the model's tokens (`token_pieces`); without it an estimate is used.
    `applied` hears (request id, fault id) whenever a fault changed a request.
    """

    def __init__(self, cut: Pieces = pieces, applied: Callable[[str, str], None] | None = None) -> None:
        super().__init__(PROMPT_KINDS)
        self.applied = applied
        self._pieces = cut

    def apply(
        self, meta: RequestMeta, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages to use and the ids of the faults that changed them, in their order."""
        touched: list[str] = []
        if not self.active:
            return messages, touched
        for lease in self.chain(time.monotonic()):
            if not lease.matches(meta):
                continue
            changed = lease.fault.rewrite(messages, draw(lease.seed, meta.request_id), self._pieces)
            if changed is not None:
                messages = changed
                touched.append(lease.fault_id)
        if self.applied is not None:
            for fault_id in touched:
                self.applied(meta.request_id, fault_id)
        return messages, touched
