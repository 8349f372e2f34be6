"""Background tasks of the front's event loop."""

from __future__ import annotations

import asyncio
import contextlib


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and return once it is over; raises what it failed with."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
