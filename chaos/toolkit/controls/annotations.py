"""Control: a run's beginning and end stand in the server's chaos journal, beside its faults and alerts."""

from __future__ import annotations

import logging
from typing import Any

from chaoslib.exceptions import ActivityFailed

from chaos.toolkit.connection import Configuration, ask

log = logging.getLogger("chaostoolkit")


def before_experiment_control(context: Any, configuration: Configuration = None) -> None:
    """Note the beginning."""
    _note(f"experiment begins: {context['title']}", configuration)


def after_experiment_control(context: Any, state: Any = None, configuration: Configuration = None) -> None:
    """Note the end, and how it went."""
    state = state or {}
    status = "deviated" if state.get("deviated") else state.get("status", "unknown")
    _note(f"experiment ends ({status}): {context['title']}", configuration)


def _note(text: str, configuration: Configuration) -> None:
    try:
        ask(configuration, lambda client: client.note(text[:500]))
    except ActivityFailed as error:
        log.warning("the server's journal does not take %r: %s", text, error)
