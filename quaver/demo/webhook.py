"""Did an alert make the whole way: engine, Alertmanager, webhook?"""

from __future__ import annotations

import asyncio
import time

from quaver.demo.control import Control

WAIT_S = 60.0


async def arrived(control: Control, limit_s: float = WAIT_S) -> str:
    """Wait until a notification of a joint alert came back; return what happened, in words.

    Alertmanager groups before it notifies, so this may take its `group_wait`.
    """
    end = time.monotonic() + limit_s
    while True:
        state = await control.alert_state()
        ours = {entry["name"] for entry in [*state.get("history", ()), *state.get("active", ())]}
        names = [name for notification in state.get("webhook", ()) for name in _names(notification)]
        back = sorted(ours & set(names))
        if back:
            return f"Webhook: {', '.join(back)} went engine → Alertmanager → webhook."
        if not ours:
            return "Webhook: no alert fired, so none could come back."
        if time.monotonic() > end:
            return (
                f"Webhook: {', '.join(sorted(ours))} fired but did not come back within {limit_s:.0f} s; "
                "is QUAVER_ALERTMANAGER_URL set, and does Alertmanager know the webhook's key?"
            )
        await asyncio.sleep(1.0)


def _names(notification: dict[str, object]) -> list[str]:
    """Return the alert names in a stored notification."""
    alerts = notification.get("alerts")
    if isinstance(alerts, list):
        labels = [alert.get("labels", {}) for alert in alerts if isinstance(alert, dict)]
        return [str(label.get("alertname")) for label in labels]
    labels_of_one = notification.get("labels")
    if isinstance(labels_of_one, dict):
        return [str(labels_of_one.get("alertname"))]
    return [str(notification.get("name"))]
