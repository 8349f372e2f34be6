"""Writes the journal off the event loop: one thread, in order, so that a slow disk delays nobody."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from chaos.journal import Entry, Journal, JournalError

PATIENCE_S = 5.0


class Scribe:
    """The only writer of a `Journal`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chaos-journal")
        self._closed = False

    async def write_ahead(self, event: str, **facts: Any) -> str | None:
        """Return None once the entry is on disk, else why it is not."""
        written = self._submit(self.journal.append, event, facts)
        try:
            await asyncio.wait_for(asyncio.shield(written), PATIENCE_S)
        except JournalError as error:
            return str(error)
        except TimeoutError:
            return f"the disk of the chaos journal {self.journal.path} does not answer"
        return None

    def note(self, event: str, **facts: Any) -> asyncio.Future[Entry]:
        """Queue an entry about something that has already happened; never fails, never waits."""
        return self._submit(self.journal.remember, event, facts)

    async def settle(self, note: asyncio.Future[Entry] | None) -> None:
        """Wait for a note to reach the disk, but not for ever."""
        if note is not None:
            await asyncio.wait({note}, timeout=PATIENCE_S)

    async def close(self) -> None:
        """Write what is queued and release the file. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        last = asyncio.get_running_loop().run_in_executor(self._thread, int)
        await asyncio.wait({last}, timeout=PATIENCE_S)
        self._thread.shutdown(wait=False)
        self.journal.close()

    def _submit(self, write: Any, event: str, facts: dict[str, Any]) -> asyncio.Future[Entry]:
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(write, event, **facts))
