"""What hears of alerts: one protocol for Alertmanager and the embedded sink."""

from __future__ import annotations

from typing import Any, Protocol

from alerting.alerts import Alert


class Notifier(Protocol):
    """Carries alerts to people. Called on the event loop; `notify` must return at once."""

    def notify(self, alert: Alert) -> None:
        """An alert fires, or ended."""
        ...

    async def start(self) -> None:
        """Begin delivering."""
        ...

    async def stop(self) -> None:
        """Deliver what is left, within a few seconds, and end."""
        ...

    def report(self) -> dict[str, Any]:
        """Return the state of delivery for people to read."""
        ...
