"""Did an alert make the whole way: engine, Alertmanager, webhook?"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from quaver.demo.control import Control, unix

WAIT_S = 60.0


async def arrived(control: Control, since: float, limit_s: float = WAIT_S) -> str:
    """Wait until a notification of an alert of this run (from unix time `since`) came back; tell of it.

    Alertmanager groups before it notifies, so this may take its `group_wait`.
    """
    end = time.monotonic() + limit_s
    while True:
        state = await control.alert_state()
        ours = {alert["name"] for alert in (*state["history"], *state["active"]) if _begun(alert, since)}
        back = {
            entry["labels"]["alertname"]
            for entry in state["webhook"]
            if entry["source"] == "alertmanager" and _begun(entry, since)
        }
        if ours & back:
            return f"Webhook: {', '.join(sorted(ours & back))} went engine → Alertmanager → webhook."
        if not ours:
            return "Webhook: no alert fired, so none could come back."
        if time.monotonic() > end:
            return (
                f"Webhook: {', '.join(sorted(ours))} fired but did not come back within {limit_s:.0f} s; "
                "is QUAVER_ALERTMANAGER_URL set, and does Alertmanager know the webhook's key?"
            )
        await asyncio.sleep(1.0)


def _begun(alert: dict[str, Any], since: float) -> bool:
    starts = unix(alert["startsAt"])
    return starts is not None and starts >= since
