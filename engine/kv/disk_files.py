"""The folder of the disk tier: every call to the file system, who owns the folder, and its key."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import stat
import time
from pathlib import Path

from engine.kv.block_file import SECTOR

log = logging.getLogger(__name__)

KEY_BYTES = 32
PART = ".part"  # of a file that is still being written
_DIRECT = getattr(os, "O_DIRECT", 0)


class DiskFolderError(OSError):
    """The folder cannot be used; the message says what to do."""


class Files:
    """The file system, as far as the disk tier uses it. Tests and chaos put faults in its place.

    Every method may raise OSError; `read` and `write` may move fewer bytes than asked for.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open for this user alone, never through a symbolic link."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def close(self, file: int) -> None:
        os.close(file)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(file, [buffer], offset)

    def write(self, file: int, buffer: memoryview, offset: int) -> int:
        return os.pwrite(file, buffer, offset)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def listdir(self, folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir()]

    def stat(self, path: Path) -> os.stat_result:
        return path.lstat()

    def touch(self, path: Path) -> None:
        """Set the time of last use to now."""
        now = time.time_ns()  # the system's own "now" is some milliseconds coarse
        os.utime(path, ns=(now, now))


def claim(folder: Path) -> int:
    """Make the folder and lock it for this process. Returns the lock, a file to close at the end.

    Raises DiskFolderError when another server has it, or when others may look into it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise DiskFolderError(
            f"others may look into {folder}, and blocks of prompts are private: "
            f"name a folder that does not exist yet, or run chmod 700 {folder}"
        )
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise DiskFolderError(
            f"{folder} is in use by another server: stop it, or give this one a folder of its own"
        ) from None
    return lock


def folder_key(files: Files, folder: Path) -> bytes:
    """Return the folder's key, made at the first start.

    A key that cannot be kept serves this process; what is stored under it is then lost at the next start.
    """
    path = folder / "key"
    buffer = memoryview(bytearray(KEY_BYTES + 1))
    try:
        if read_whole(files, path, buffer) == KEY_BYTES:
            return bytes(buffer[:KEY_BYTES])
        log.warning(
            "kv disk: %s is damaged; a new key is made, and what is stored under the old is lost", path
        )
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("kv disk: cannot read %s: %s", path, error)
    key = secrets.token_bytes(KEY_BYTES)
    try:
        write_whole(files, path, memoryview(key))
    except OSError as error:
        log.warning("kv disk: cannot write %s: %s; blocks last until this server ends", path, error)
    return key


def has_direct(files: Files, folder: Path) -> bool:
    """Say whether files of this folder can be read and written past the page cache (O_DIRECT)."""
    path = folder / f"probe{PART}"
    buffer = memoryview(mmap.mmap(-1, SECTOR))
    try:
        file = files.open(path, os.O_CREAT | os.O_RDWR | _DIRECT)
        try:
            moved = files.write(file, buffer, 0) + files.read(file, buffer, 0)
        finally:
            files.close(file)
    except OSError:
        moved = 0
    with contextlib.suppress(OSError):
        files.unlink(path)
    return bool(_DIRECT) and moved == 2 * SECTOR


def read_whole(files: Files, path: Path, buffer: memoryview, direct: bool = False) -> int:
    """Read a file into `buffer`, up to its end or the buffer's. Returns the bytes read."""
    file = files.open(path, os.O_RDONLY | (_DIRECT if direct else 0))
    try:
        size = 0
        while size < len(buffer):
            count = files.read(file, buffer[size:], size)
            size += count
            if count == 0 or size % SECTOR:  # a broken sector is the end; O_DIRECT could not read on from it
                break
        return size
    finally:
        files.close(file)


def write_whole(files: Files, path: Path, data: memoryview, direct: bool = False) -> None:
    """Write a file under a temporary name, then rename it: under its own name it is whole or not there.

    The folder is not synced: after a power cut a file may be missing, which is a miss, and no more.
    On OSError the temporary file may be left behind.
    """
    part = path.with_suffix(PART)
    file = files.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (_DIRECT if direct else 0))
    try:
        done = 0
        while done < len(data):
            done += files.write(file, data[done:], done)
        files.fsync(file)
    finally:
        files.close(file)
    files.rename(part, path)
