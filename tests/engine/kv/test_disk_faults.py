"""The disk tier on a failing disk: every fault is a miss and a counter, and concerns nothing else."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kv.disk import DiskStore
from engine.kv.disk_files import Files
from engine.kv.store import Found, Load
from tests.engine.kv.test_block_file import FIELDS
from tests.engine.kv.test_disk import (
    FILE,
    FIT,
    block_of,
    bytes_of,
    files_of,
    get,
    holds,
    name_of,
    open_store,
    put,
    tokens_of,
)

DEADLINE_S = 0.5


class FaultyFiles(Files):
    """A disk whose calls fail, hang or lie, as told. `hang` calls wait until `go` is set."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.hang: Counter[str] = Counter()
        self.go = threading.Event()
        self.calls: Counter[str] = Counter()
        self.torn = self.flipped = self.short = False
        self.stale: bytes | None = None
        self.slow_s = 0.0

    def _meet(self, call: str) -> None:
        self.calls[call] += 1
        if self.hang[call] > 0:
            self.hang[call] -= 1
            self.go.wait()
        if call in self.fail:
            raise OSError(self.fail[call], os.strerror(self.fail[call]))

    def open(self, path: Path, flags: int) -> int:
        self._meet("create" if flags & os.O_CREAT else "open")
        return super().open(path, flags)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        self._meet("read")
        time.sleep(self.slow_s)
        if self.stale is not None:
            data = self.stale[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        if self.short:
            return super().read(file, buffer[: max(4096, len(buffer) // 8192 * 4096)], offset)
        count = super().read(file, buffer, offset)
        if self.flipped:
            buffer[count // 2] ^= 1
        return count

    def write(self, file: int, buffer: memoryview, offset: int) -> int:
        self._meet("write")
        if self.torn:
            super().write(file, buffer[: len(buffer) // 8192 * 4096], offset)
            return len(buffer)
        if self.short:
            return super().write(file, buffer[: max(4096, len(buffer) // 8192 * 4096)], offset)
        return super().write(file, buffer, offset)

    def fsync(self, file: int) -> None:
        self._meet("fsync")
        super().fsync(file)

    def rename(self, path: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(path, target)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)

    def listdir(self, folder: Path) -> list[str]:
        self._meet("listdir")
        return super().listdir(folder)

    def stat(self, path: Path) -> os.stat_result:
        self._meet("stat")
        return super().stat(path)

    def touch(self, path: Path) -> None:
        self._meet("touch")
        super().touch(path)


@pytest.fixture
def files() -> Iterator[FaultyFiles]:
    """A disk that is sound until it is told otherwise."""
    files = FaultyFiles()
    yield files
    files.go.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is still to be made."""
    return tmp_path / "blocks"


@pytest.fixture
def store(folder: Path, files: FaultyFiles) -> Iterator[DiskStore]:
    """A store on that disk, with blocks 0 to 4 in it."""
    store = open_store(folder, files=files, deadline_s=DEADLINE_S, pause_s=0.05)
    for number in range(5):
        assert put(store, number)
    yield store
    files.go.set()
    files.fail.clear()
    store.close()


def _load(store: DiskStore, number: int) -> Load:
    load = store.prepare_load(name_of(number), tokens_of(number))
    assert load is not None
    return load


def _path(folder: Path, number: int) -> Path:
    return folder / f"{name_of(number).hex()}.kv"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
def test_a_write_that_fails(
    store: DiskStore, files: FaultyFiles, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves nothing; loads go on; stores pause, twice as long each time, and then go on."""
    folder = store.folder
    files.fail[call] = code
    assert put(store, 10)
    assert store.lookup(name_of(10), tokens_of(10)) is Found.MISS
    assert store.counters.errors == 1
    assert not put(store, 11), "no pause"
    assert all(holds(store, number) for number in range(5))
    calls = files.calls["create"]
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        put(store, 11)
        time.sleep(0.002)
    assert 1 <= files.calls["create"] - calls <= 4  # after 0.05, 0.15 and 0.35 s
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert bytes_of(folder) == 5 * FILE == store.counters.bytes_used
    files.fail.clear()
    ends = time.monotonic() + 5
    while not put(store, 12):
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert holds(store, 12)


def test_files_that_cannot_be_deleted_count(store: DiskStore, folder: Path, files: FaultyFiles) -> None:
    """The cap holds even then: nothing is stored in their place until they are gone."""
    for number in range(5, FIT):
        assert put(store, number)
    files.fail["unlink"] = errno.EIO
    put(store, 20)
    assert not holds(store, 20)
    assert store.counters.refused == 1
    assert bytes_of(folder) == store.counters.bytes_used == FIT * FILE
    store.discard(name_of(4))
    assert store.flush()
    assert bytes_of(folder) == store.counters.bytes_used == FIT * FILE
    files.fail.clear()
    put(store, 21)
    assert holds(store, 21)
    assert bytes_of(folder) == store.counters.bytes_used <= FIT * FILE


@pytest.mark.parametrize("call", ["open", "read"])
def test_a_bad_sector(store: DiskStore, folder: Path, files: FaultyFiles, call: str) -> None:
    """EIO is a miss, and the file goes."""
    files.fail[call] = errno.EIO
    assert get(store, 1) is None
    files.fail.clear()
    assert store.flush()
    assert not _path(folder, 1).exists()
    assert store.counters.errors == 1
    assert not holds(store, 1)
    assert holds(store, 2)
    assert put(store, 1)
    assert holds(store, 1)


def test_no_more_open_files(store: DiskStore, files: FaultyFiles) -> None:
    """What is wrong with the moment and not with the file is a miss, and the file stays."""
    files.fail["open"] = errno.EMFILE
    assert get(store, 1) is None
    files.fail.clear()
    assert store.counters.errors == 1
    assert holds(store, 1)


def test_a_touch_that_fails(store: DiskStore, files: FaultyFiles) -> None:
    """A folder that has become read-only still serves."""
    files.fail["touch"] = errno.EROFS
    assert holds(store, 1)
    assert holds(store, 1)


def test_a_file_that_somebody_deleted(store: DiskStore, folder: Path) -> None:
    """It is a miss, and may be stored again."""
    _path(folder, 1).unlink()
    assert not holds(store, 1)
    assert put(store, 1)
    assert holds(store, 1)


@pytest.mark.parametrize("lie", ["torn", "flipped", "stale", "other"])
def test_a_disk_that_lies(store: DiskStore, folder: Path, files: FaultyFiles, lie: str) -> None:
    """Torn writes, flipped bits, stale bytes and another file's bytes are all misses; the file goes."""
    number = 10
    if lie == "torn":
        files.torn = True
        assert put(store, number)
        files.torn = False
    else:
        assert put(store, number)
    if lie == "flipped":
        files.flipped = True
    elif lie == "stale":
        files.stale = _path(folder, number).read_bytes()
        store.discard(name_of(number))
        slot = store.prepare_store(name_of(number), tokens_of(number))
        assert slot is not None
        slot.buffer[:] = 7
        slot.complete(True)
        assert store.flush()
    elif lie == "other":
        files.stale = _path(folder, 1).read_bytes()
    assert get(store, number) is None
    files.flipped, files.stale = False, None
    assert store.flush()
    assert store.counters.corrupt == 1
    assert not _path(folder, number).exists()
    assert not holds(store, number)
    assert holds(store, 1)


def test_short_reads_and_writes(store: DiskStore, files: FaultyFiles) -> None:
    """A call that moves less than asked for is followed by another."""
    files.short = True
    assert put(store, 10)
    assert holds(store, 10)


@pytest.mark.parametrize("change", ["truncated", "lengthened", "a sector more", "another's", "empty"])
def test_a_file_that_somebody_changed(store: DiskStore, folder: Path, change: str) -> None:
    """It is a miss, and deleted."""
    path = _path(folder, 1)
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-1],
            "lengthened": data + b"x",
            "a sector more": data + bytes(4096),
            "another's": _path(folder, 2).read_bytes(),
            "empty": b"",
        }[change]
    )
    assert get(store, 1) is None
    assert store.flush()
    assert store.counters.corrupt == 1
    assert not path.exists()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_byte_in_the_header(
    store: DiskStore, folder: Path, files: FaultyFiles, field: str, restart: bool
) -> None:
    """In any field, its first byte and its last: a miss, counted; the file goes, the others serve."""
    start, size = FIELDS[field]
    for number, position in ((1, start), (2, start + size - 1)):
        data = bytearray(_path(folder, number).read_bytes())
        data[position] ^= 0xFF
        _path(folder, number).write_bytes(data)
    if restart:
        store.close()
        store = open_store(folder, files=files)
    assert [get(store, number) is None for number in range(5)] == [False, True, True, False, False]
    assert store.flush()
    # A version that is not this one's says that the file is another's, not that it is damaged.
    told = store.counters.foreign if field == "version" else store.counters.corrupt
    assert told == 2
    assert [_path(folder, number).exists() for number in range(5)] == [True, False, False, True, True]
    assert bytes_of(folder) == store.counters.bytes_used
    store.close()


def test_a_load_that_is_late(store: DiskStore, files: FaultyFiles) -> None:
    """At its deadline it is a miss; a result that comes later changes nothing; the block is not lost."""
    files.hang["read"] = 1
    load = _load(store, 1)
    began = time.monotonic()
    assert store.lookup(name_of(1), tokens_of(1)) is Found.PENDING
    while not load.ready():
        assert store.lookup(name_of(1), tokens_of(1)) is Found.PENDING or load.ready()
        time.sleep(0.001)
    assert DEADLINE_S <= time.monotonic() - began < 4 * DEADLINE_S
    assert load.result() is None
    assert (store.counters.late, store.counters.misses) == (1, 1)
    files.go.set()
    time.sleep(0.05)
    assert load.result() is None
    load.release()
    assert (store.counters.late, store.counters.hits) == (1, 0)
    assert holds(store, 1)


def test_stalled_reads_hold_no_other_up(store: DiskStore, files: FaultyFiles) -> None:
    """Both readers hang: the loads behind them are in time all the same."""
    files.hang["read"] = 2
    stuck = [_load(store, 0), _load(store, 1)]
    time.sleep(0.05)
    behind = [_load(store, 2), _load(store, 3), _load(store, 4)]
    waiting = [*stuck, *behind]
    while sum(load.ready() for load in waiting) < len(waiting):
        time.sleep(0.001)
    assert [load.result() is not None for load in waiting] == [False, False, True, True, True]
    assert store.counters.late == 2
    for load in waiting:
        load.release()


def test_threads_do_not_pile_up(store: DiskStore, files: FaultyFiles) -> None:
    """On a disk that hangs for good loads are refused at once, by few threads; later all is well."""
    files.hang["read"] = 1000
    before = threading.active_count()
    for _ in range(40):
        load = store.prepare_load(name_of(1), tokens_of(1))
        if load is None:
            break
        time.sleep(DEADLINE_S / 5)
        load.ready()
        load.release()
    assert store.counters.refused == 1
    assert threading.active_count() <= before + 4
    files.hang.clear()
    files.go.set()
    ends = time.monotonic() + 5
    while not holds(store, 1):
        assert time.monotonic() < ends
    assert threading.active_count() <= before


def test_a_stalled_write_holds_up_stores_alone(store: DiskStore, files: FaultyFiles) -> None:
    """The queue fills up and refuses; loads go on, callers never wait; then all is written."""
    files.hang["fsync"] = 1
    began = time.monotonic()
    taken = [number for number in range(10, 10 + 30) if put(store, number, wait=False)]
    assert len(taken) == 16
    assert all(holds(store, number) for number in range(5))
    assert time.monotonic() - began < 2
    files.go.set()
    assert store.flush()
    assert all(holds(store, number) for number in taken[-5:])


def test_a_load_nobody_waits_for(store: DiskStore, files: FaultyFiles) -> None:
    """Released before it is ready, it is neither a hit nor a miss, and pins nothing."""
    files.hang["read"] = 1
    load = _load(store, 1)
    load.release()
    assert load.ready()
    assert load.result() is None
    assert store.lookup(name_of(1), tokens_of(1)) is Found.HIT
    files.go.set()
    assert holds(store, 2)
    assert (store.counters.hits, store.counters.misses) == (1, 0)


def _until(files: FaultyFiles, call: str, count: int) -> None:
    ends = time.monotonic() + 5
    while files.calls[call] < count:
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_a_block_discarded_in_the_middle_of_its_write(
    store: DiskStore, folder: Path, files: FaultyFiles
) -> None:
    """It never appears, and its file goes."""
    files.hang["fsync"] = 1
    before = files.calls["fsync"]
    assert put(store, 10, wait=False)
    _until(files, "fsync", before + 1)
    store.discard(name_of(10))
    files.go.set()
    assert store.flush()
    assert store.lookup(name_of(10), tokens_of(10)) is Found.MISS
    assert not _path(folder, 10).exists()
    assert bytes_of(folder) == store.counters.bytes_used


def test_a_block_written_anew_in_the_middle_of_a_load(store: DiskStore, files: FaultyFiles) -> None:
    """A load of the old block is a miss, and does not delete the new one."""
    files.hang["open"] = 1
    before = files.calls["open"]
    load = _load(store, 1)
    _until(files, "open", before + 1)
    store.discard(name_of(1))
    slot = store.prepare_store(name_of(1), tokens_of(1))
    assert slot is not None
    slot.buffer[:] = 7
    slot.complete(True)
    assert store.flush()
    files.go.set()
    while not load.ready():
        time.sleep(0.001)
    assert load.result() is None
    load.release()
    block = get(store, 1)
    assert block is not None
    assert (block == 7).all()
    assert store.counters.corrupt == 0


def test_slow_reads_in_a_full_queue(store: DiskStore, files: FaultyFiles) -> None:
    """More loads than the disk reads in time: some are late, some refused, those that come are right."""
    files.slow_s = 0.05
    loads = [
        (number % 5, store.prepare_load(name_of(number % 5), tokens_of(number % 5))) for number in range(30)
    ]
    assert store.counters.refused >= 30 - 16 - 2
    pending = [(number, load) for number, load in loads if load is not None]
    while sum(load.ready() for _, load in pending) < len(pending):
        time.sleep(0.001)
    blocks = [(number, load.result()) for number, load in pending]
    assert all(block is None or np.array_equal(block, block_of(number)) for number, block in blocks)
    assert store.counters.late > 0
    assert store.counters.hits > 0
    assert store.counters.hits + store.counters.misses == 30
    for _, load in pending:
        load.release()


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_folder_that_cannot_be_scanned(folder: Path, files: FaultyFiles, call: str) -> None:
    """Nothing is stored before it is known what the folder holds; the scan is tried again."""
    store = open_store(folder)
    assert put(store, 1)
    store.close()
    files.fail[call] = errno.EIO
    store = open_store(folder, files=files, pause_s=0.01)
    assert not holds(store, 1)
    time.sleep(0.02)
    assert put(store, 2)
    assert not holds(store, 2)
    assert store.counters.errors == 2
    files.fail.clear()
    time.sleep(0.05)
    assert put(store, 2)
    assert holds(store, 1)
    assert holds(store, 2)
    store.close()


def test_a_full_disk_at_the_first_start(folder: Path, files: FaultyFiles) -> None:
    """Not even the key can be written: the server starts, and stores once there is room."""
    files.fail["create"] = errno.ENOSPC
    store = open_store(folder, files=files, pause_s=0.01)
    assert put(store, 1)
    files.fail.clear()
    time.sleep(0.02)
    assert put(store, 1)
    assert holds(store, 1)
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_without_o_direct(folder: Path, direct: bool) -> None:
    """A file system without O_DIRECT keeps the same files; one with it uses it."""
    seen: list[int] = []

    class Plain(Files):
        def open(self, path: Path, flags: int) -> int:
            seen.append(flags & os.O_DIRECT)
            if flags & os.O_DIRECT and not direct:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, flags)

    store = open_store(folder)
    assert put(store, 1)
    store.close()
    store = open_store(folder, files=Plain())
    seen.clear()
    assert put(store, 2)
    assert holds(store, 1)
    assert holds(store, 2)
    assert direct or not any(seen)
    assert len(files_of(folder)) == 2
    store.close()


def test_random_faults(folder: Path, files: FaultyFiles) -> None:
    """Whatever fails when: bytes are right or a miss, the cap holds, and in the end all is well."""
    source = np.random.default_rng(5)
    store = open_store(folder, files=files, pause_s=0.001)
    lies: dict[str, Any] = {"torn": True, "flipped": True, "short": True}
    for _ in range(300):
        files.fail.clear()
        files.torn = files.flipped = files.short = False
        if source.random() < 0.4:
            call = source.choice(["create", "write", "fsync", "rename", "unlink", "open", "read", "touch"])
            files.fail[str(call)] = int(source.choice([errno.EIO, errno.ENOSPC, errno.EMFILE]))
        elif source.random() < 0.3:
            setattr(files, str(source.choice(list(lies))), True)
        number = int(source.integers(0, 20))
        if source.random() < 0.5:
            put(store, number)
        elif source.random() < 0.9:
            holds(store, number)
        else:
            store.discard(name_of(number))
        assert store.flush()
        assert bytes_of(folder) <= 1 << 20
        assert store.counters.bytes_used <= 1 << 20
    files.fail.clear()
    files.torn = files.flipped = files.short = False
    time.sleep(0.1)
    held = [number for number in range(20) if holds(store, number)]
    put(store, 30)
    assert holds(store, 30)
    assert store.flush()
    assert bytes_of(folder) == store.counters.bytes_used
    store.close()
    store = open_store(folder)
    assert sum(holds(store, number) for number in held) >= len(held) - 1  # 30 may have taken one's place
    store.close()
