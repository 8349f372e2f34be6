"""Faults in the front process, on what the user wrote before the chat template."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chaos.faults.base import EncodingFault, Pieces, PromptFault
from chaos.faults.registry import PROMPT_KINDS
from chaos.faults.text import pieces
from chaos.leases import Leases
from chaos.selector import draw
from engine.hooks import Encoding
from engine.messages import RequestMeta


class PromptHook(Leases[PromptFault | EncodingFault]):
    """Implements `engine.hooks.PromptHook`. Leases change on the event loop; the rest runs on any thread.

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
            if not isinstance(lease.fault, PromptFault) or not lease.matches(meta):
                continue
            changed = lease.fault.rewrite(messages, draw(lease.seed, meta.request_id), self._pieces)
            if changed is not None:
                messages = changed
                touched.append(lease.fault_id)
        self._tell(meta, touched)
        return messages, touched

    def encoding(self, meta: RequestMeta, *, chat: bool, bos: bool) -> tuple[Encoding, list[str]]:
        """Return how the prompt is encoded and the ids of the faults that have a say in it."""
        encoding, touched = Encoding(), list[str]()
        if not self.active:
            return encoding, touched
        for lease in self.chain(time.monotonic()):
            if not isinstance(lease.fault, EncodingFault) or not lease.matches(meta):
                continue
            changed = lease.fault.encode(encoding, chat=chat, bos=bos)
            if changed is not None:
                encoding = changed
                touched.append(lease.fault_id)
        self._tell(meta, touched)
        return encoding, touched

    def _tell(self, meta: RequestMeta, touched: list[str]) -> None:
        if self.applied is not None:
            for fault_id in touched:
                self.applied(meta.request_id, fault_id)
