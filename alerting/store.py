"""Notifications received, as JSON lines that survive a restart.

One line per alert and state; a repeated delivery is stored once. At its cap the file loses its
older half.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

_REMEMBERED = 10_000
_SHOWN = 500
_MUST_HAVE = ("status", "labels", "startsAt", "fingerprint")


class NotificationStore:
    """Appends notifications to `path`; raises OSError when the disk refuses."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._seen: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._recent: list[dict[str, Any]] = []
        self.duplicates = 0
        for entry in _read(path):
            self._remember(entry)

    def add(self, entry: dict[str, Any]) -> bool:
        """Store one alert's notification; False when it is known already."""
        if _key(entry) in self._seen:
            self.duplicates += 1
            return False
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._make_room(len(line))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _append(self._path, line)
        self._remember(entry)
        return True

    def recent(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return the newest notifications, the newest first."""
        return self._recent[: -limit - 1 : -1]

    def _remember(self, entry: dict[str, Any]) -> None:
        self._seen[_key(entry)] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        self._recent.append(entry)
        del self._recent[:-_SHOWN]

    def _make_room(self, more: int) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + more <= self._max_bytes:
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept: list[bytes] = []
        room = self._max_bytes // 2
        for line in reversed(lines):
            room -= len(line)
            if room < 0:
                break
            kept.append(line)
        part = self._path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(b"".join(reversed(kept)))
        part.replace(self._path)


def _append(path: Path, line: bytes) -> None:
    """Write a whole line, or nothing: what a full disk took of it is cut off again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # a device cannot be cut
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["fingerprint"], entry["startsAt"], entry["status"]


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the readable lines; one cut off by a crash is mended by a line break and skipped."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    if raw and not raw.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    entries = []
    for line in raw.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and all(name in entry for name in _MUST_HAVE):
            entries.append(entry)
    return entries
