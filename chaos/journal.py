"""The chaos journal: JSON lines, written and synced before a fault takes effect."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

_END_OF_TIME = 2.0**37  # seconds; later ones are no date


class JournalError(Exception):
    """The journal cannot be used; the message says what to do."""


class Journal:
    """An append-only file held by one process at a time.

    `append` returns after fsync. A failed or torn write leaves no half line behind: what was written
    is cut off again, and a torn tail of a killed process is closed on opening. `started` are the ids of
    all faults that it tells of. Thread-safe.
    """

    def __init__(self, path: Path, keep: int = 200) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise JournalError(
                f"cannot open the chaos journal {path}: {error}; set QUAVER_STATE_DIR"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise JournalError(
                f"another server holds the chaos journal {path}; give each its own QUAVER_STATE_DIR"
            ) from None
        entries, self._unreadable, self._torn = _read(path)
        self._separator = b"\n" if self._torn else b""
        self.recent: deque[Entry] = deque(entries[-keep:], maxlen=keep)
        self.lost_leases, self.halted = _story(entries)
        self.started = {str(entry.get("fault_id")) for entry in entries if entry["event"] == "start"}

    def recover(self) -> None:
        """Close the books of the process before: its leases ended with it, and damage is told of.

        `halted` stays what it was then: the reason, or None.
        """
        for fault_id, entry in self.lost_leases.items():
            self.remember("end", fault_id=fault_id, kind=entry.get("kind"), reason="process lost")
        if self.lost_leases or self._unreadable:
            lost, unreadable = list(self.lost_leases), self._unreadable
            self.remember("recovery", lost=lost, unreadable_lines=unreadable, torn_line=self._torn)
        self.lost_leases, self._unreadable, self._torn = {}, 0, False

    def append(self, event: str, **facts: Any) -> Entry:
        """Write one entry and sync it; raises JournalError when the disk does not take it."""
        entry = {"time": round(time.time(), 3), "event": event, **facts}
        with self._lock:
            line = self._separator + json.dumps(entry, allow_nan=False).encode() + b"\n"
            there = os.fstat(self._file)
            if not there.st_nlink:
                raise JournalError(f"the chaos journal {self.path} was deleted; restart the server")
            size = there.st_size
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError("no space left for a whole entry")
                os.fsync(self._file)
            except OSError as error:
                self._cut(size)
                raise JournalError(f"the chaos journal {self.path} cannot be written: {error}") from error
            self._separator = b""
            self.recent.append(entry)
            if event == "start":
                self.started.add(str(facts.get("fault_id")))
        return entry

    def remember(self, event: str, **facts: Any) -> Entry:
        """Write an entry if the disk takes it; else keep it in memory, marked as not on disk."""
        try:
            return self.append(event, **facts)
        except JournalError as error:
            entry = {"time": round(time.time(), 3), "event": event, **facts, "unwritten": str(error)}
            self.recent.append(entry)
            return entry

    def close(self) -> None:
        """Release the file to the next process. Closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut(self, size: int) -> None:
        try:
            os.ftruncate(self._file, size)
        except OSError:
            self._separator = b"\n"


def _read(path: Path) -> tuple[list[Entry], int, bool]:
    """Return the readable entries, how many lines are none, and whether the last line has no end."""
    raw = path.read_bytes()
    lines = [line for line in raw.splitlines() if line]
    entries = [entry for entry in map(_entry, lines) if entry is not None]
    return entries, len(lines) - len(entries), bool(raw) and not raw.endswith(b"\n")


def _entry(line: bytes) -> Entry | None:
    """Return an entry that can be told and whose story can be followed; None for anything else."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(event := entry.get("event"), str):
        return None
    when = entry.get("time")
    named = isinstance(entry.get("fault_id"), str) or event not in ("start", "end", "revert")
    dated = isinstance(when, int | float) and 0 <= when < _END_OF_TIME
    return entry if named and dated else None


def _story(entries: list[Entry]) -> tuple[dict[str, Entry], str | None]:
    """Return the starts without an end, by fault id, and why new starts are blocked, if they are."""
    leases: dict[str, Entry] = {}
    halted: str | None = None
    for entry in entries:
        fault_id = str(entry.get("fault_id"))
        match entry["event"]:
            case "start":
                leases[fault_id] = entry
            case "end":
                leases.pop(fault_id, None)
            case "halt":
                halted = str(entry.get("reason") or f"by {entry.get('by', 'operator')}")
            case "unblock":
                halted = None
    return leases, halted
