"""The disk tier on a sound disk: what is stored comes back, under a cap, across restarts and kill -9."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from engine.kv.block_file import file_bytes
from engine.kv.disk import DiskStore
from engine.kv.disk_files import DiskFolderError, Files
from engine.kv.store import Found, Store

ROOT = Path(__file__).parents[3]
BYTES = 100_000  # of a block; random ones, so that its file takes FILE
FILE = file_bytes(BYTES)
FIT = (1 << 20) // FILE  # blocks in a cap of 1 MB


def name_of(number: int) -> bytes:
    """Name of a block."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def tokens_of(number: int) -> bytes:
    """Tokens of a block, int32 as bytes."""
    return np.arange(number, number + 64, dtype="<i4").tobytes()


def block_of(number: int) -> NDArray[np.uint8]:
    """Bytes of a block, known by its number."""
    return np.random.default_rng(number).integers(0, 256, BYTES, np.uint8)


def open_store(folder: Path, **changes: Any) -> DiskStore:
    """Return a store of small blocks that has scanned its folder."""
    sizes: dict[str, Any] = {
        "layout_bytes": BYTES,
        "fingerprint": b"model",
        "capacity_mb": 1,
        "deadline_s": 5.0,
    }
    store = DiskStore(folder, **sizes | changes)
    assert store.flush()
    return store


def put(store: DiskStore, number: int, salt: bytes = b"", wait: bool = True) -> bool:
    """Store a block; say whether there was room."""
    slot = store.prepare_store(name_of(number), tokens_of(number), salt)
    if slot is None:
        return False
    slot.buffer[:] = block_of(number)
    slot.complete(True)
    if wait:
        assert store.flush()
    return True


def get(store: DiskStore, number: int, salt: bytes = b"") -> NDArray[np.uint8] | None:
    """Load a block; None is a miss."""
    load = store.prepare_load(name_of(number), tokens_of(number), salt)
    if load is None:
        return None
    while not load.ready():
        time.sleep(0.0005)
    block = load.result()
    load.release()
    return block


def holds(store: DiskStore, number: int, salt: bytes = b"") -> bool:
    """Say whether the block comes back; the bytes must be right."""
    block = get(store, number, salt)
    if block is not None:
        assert np.array_equal(block, block_of(number))
    return block is not None


def files_of(folder: Path) -> list[Path]:
    """Files of blocks, whole or not."""
    return sorted([*folder.glob("*.kv"), *folder.glob("*.part")])


def bytes_of(folder: Path) -> int:
    """What these files take."""
    return sum(path.stat().st_size for path in files_of(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is still to be made."""
    return tmp_path / "blocks"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    """An empty store."""
    store = open_store(folder)
    yield store
    store.close()


def test_round_trip(store: DiskStore) -> None:
    """A block is a miss, then being written, then a hit with its bytes, read-only."""
    as_protocol: Store = store
    assert as_protocol.lookup(name_of(1), tokens_of(1)) is Found.MISS
    slot = as_protocol.prepare_store(name_of(1), tokens_of(1))
    assert slot is not None
    assert as_protocol.lookup(name_of(1), tokens_of(1)) is Found.PENDING
    assert as_protocol.prepare_store(name_of(1), tokens_of(1)) is None
    assert as_protocol.prepare_load(name_of(1), tokens_of(1)) is None
    slot.buffer[:] = block_of(1)
    slot.complete(True)
    slot.complete(True)
    assert store.flush()
    assert as_protocol.lookup(name_of(1), tokens_of(1)) is Found.HIT
    load = as_protocol.prepare_load(name_of(1), tokens_of(1))
    assert load is not None
    while not load.ready():
        assert as_protocol.lookup(name_of(1), tokens_of(1)) is Found.PENDING or load.ready()
    block = load.result()
    assert block is not None
    assert np.array_equal(block, block_of(1))
    assert not block.flags.writeable
    load.release()
    load.release()
    assert load.result() is None
    assert np.array_equal(block, block_of(1))
    counters = store.counters
    assert (counters.stores, counters.hits, counters.misses) == (1, 1, 1)
    assert counters.bytes_used == FILE


def test_a_slot_that_fails_leaves_nothing(store: DiskStore, folder: Path) -> None:
    """Without success the block is not there, and its place is free."""
    for number in range(100):
        slot = store.prepare_store(name_of(number), tokens_of(number))
        assert slot is not None
        slot.complete(False)
        assert store.lookup(name_of(number), tokens_of(number)) is Found.MISS
    assert store.flush()
    assert files_of(folder) == []


def test_other_tokens_are_a_collision(store: DiskStore) -> None:
    """A name whose tokens are others is a miss, and the block stays."""
    assert put(store, 1)
    assert store.lookup(name_of(1), tokens_of(2)) is Found.MISS
    assert store.prepare_load(name_of(1), tokens_of(2)) is None
    assert store.counters.collisions == 2
    assert holds(store, 1)


def test_tenants_never_meet(store: DiskStore, folder: Path) -> None:
    """A block is found under its own salt alone, after a restart too, and no file tells the salt."""
    mine, other = os.urandom(16), os.urandom(16)
    assert put(store, 1, mine)
    for salt in (other, b""):
        assert store.lookup(name_of(1), tokens_of(1), salt) is Found.MISS
        assert not holds(store, 1, salt)
    assert store.counters.foreign == 4
    store.close()
    store = open_store(folder)
    assert not holds(store, 1, other)
    assert holds(store, 1, mine)
    store.close()
    assert not any(mine in path.read_bytes() for path in folder.iterdir())


def test_only_this_user_may_look(store: DiskStore, folder: Path) -> None:
    """Folder 0700; blocks, key and lock 0600."""
    assert put(store, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.suffix or path.name for path in folder.iterdir()} == {".kv", "key", ".lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    """The error says what to do."""
    tmp_path.chmod(0o755)
    with pytest.raises(DiskFolderError, match="chmod 700"):
        open_store(tmp_path)


def test_a_cap_below_one_block_is_refused(folder: Path) -> None:
    """Nothing could ever be kept."""
    with pytest.raises(ValueError, match="must be 2 MB or more"):
        open_store(folder, layout_bytes=1 << 20)


def test_the_least_recently_used_goes(store: DiskStore, folder: Path) -> None:
    """At the cap the block goes that nobody has used the longest; a pinned one stays."""
    for number in range(FIT):
        assert put(store, number)
    pin = store.prepare_load(name_of(1), tokens_of(1))
    assert holds(store, 0)
    assert not put(store, 2)  # it is here, which counts as a use
    assert put(store, 100)
    assert put(store, 101)
    assert [holds(store, number) for number in (0, 1, 2, 3, 4, 5)] == [True, True, True, False, False, True]
    assert store.counters.evictions == 2
    assert bytes_of(folder) == store.counters.bytes_used <= 1 << 20
    assert pin is not None
    pin.release()


def test_all_pinned_is_no_room(store: DiskStore) -> None:
    """Nothing that is pinned makes room."""
    pins = []
    for number in range(FIT):
        assert put(store, number)
        pins.append(store.prepare_load(name_of(number), tokens_of(number)))
    put(store, 100)
    assert not holds(store, 100)
    assert store.counters.refused == 1
    for pin in pins:
        assert pin is not None
        pin.release()
    put(store, 100)
    assert holds(store, 100)


def test_discard(store: DiskStore, folder: Path) -> None:
    """A discarded block is gone at once, its file soon; one that is being stored never appears."""
    assert put(store, 1)
    load = store.prepare_load(name_of(1), tokens_of(1))
    store.discard(name_of(1))
    store.discard(name_of(7))
    assert store.lookup(name_of(1), tokens_of(1)) is Found.MISS
    assert load is not None
    while not load.ready():
        time.sleep(0.001)
    block = load.result()
    assert block is None or np.array_equal(block, block_of(1))
    load.release()
    slot = store.prepare_store(name_of(2), tokens_of(2))
    assert slot is not None
    store.discard(name_of(2))
    slot.complete(True)
    assert store.flush()
    assert files_of(folder) == []
    assert store.counters.bytes_used == 0
    assert put(store, 1)
    assert holds(store, 1)


def test_what_is_stored_survives_a_restart(store: DiskStore, folder: Path) -> None:
    """A close writes out what is queued; order of use is kept; the cap may have shrunk."""
    for number in range(5):
        assert put(store, number, wait=number < 3)
    store.close()
    store.close()
    assert store.lookup(name_of(0), tokens_of(0)) is Found.MISS
    assert not put(store, 9)
    store = open_store(folder)
    assert all(holds(store, number) for number in (1, 2, 3, 4, 0))
    store.close()
    larger = open_store(folder, capacity_mb=2)
    for number in range(5, 2 * FIT):
        assert put(larger, number)
        time.sleep(0.01)  # file systems tell times of last use apart by some milliseconds
    assert holds(larger, 0)
    larger.close()
    smaller = open_store(folder)
    assert bytes_of(folder) == smaller.counters.bytes_used <= 1 << 20
    kept = [number for number in range(2 * FIT) if holds(smaller, number)]
    assert kept == [0, *range(FIT + 1, 2 * FIT)]
    smaller.close()


def test_what_a_scan_finds(store: DiskStore, folder: Path) -> None:
    """Temporary files, foreign and damaged ones are deleted; files that are not ours are left alone."""
    for number in range(4):
        assert put(store, number)
    store.close()
    paths = {number: folder / f"{name_of(number).hex()}.kv" for number in range(4)}
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].rename(folder / f"{name_of(9).hex()}.kv")
    (folder / "half.part").write_bytes(bytes(5000))
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'0' * 64}.kv").symlink_to(folder / "notes.txt")
    store = open_store(folder)
    assert [holds(store, number) for number in (0, 1, 2, 3, 9)] == [True, False, False, True, False]
    assert store.counters.corrupt == 2
    assert store.counters.errors == 1  # a link is not opened
    assert files_of(folder) == sorted([paths[0], paths[3]])
    assert (folder / "notes.txt").read_text() == "mine"
    store.close()
    store = open_store(folder, fingerprint=b"another model")
    assert store.counters.foreign == 2
    assert files_of(folder) == []
    store.close()


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), bytes(32)])
def test_a_lost_key_loses_the_blocks(store: DiskStore, folder: Path, key: bytes) -> None:
    """Under another key nothing is served; the folder goes on with the new one."""
    assert put(store, 1)
    store.close()
    (folder / "key").write_bytes(key)
    store = open_store(folder)
    assert not holds(store, 1)
    assert put(store, 2)
    store.close()
    store = open_store(folder)
    assert holds(store, 2)
    store.close()


def test_a_full_queue_refuses(folder: Path) -> None:
    """No more than `queue` blocks are on their way."""
    store = open_store(folder, queue=3)
    slots = [store.prepare_store(name_of(number), tokens_of(number)) for number in range(4)]
    assert [slot is not None for slot in slots] == [True, True, True, False]
    assert store.counters.refused == 1
    for slot in slots[:3]:
        assert slot is not None
        slot.complete(False)
    assert put(store, 3)
    store.close()


CHILD = textwrap.dedent("""
    import itertools, sys
    from pathlib import Path
    from tests.engine.kv.test_disk import name_of, open_store, put, tokens_of
    store = open_store(Path(sys.argv[1]))
    print("ready", flush=True)
    for number in itertools.count():
        put(store, number, wait=False)
        if number % 5 == 0:
            store.discard(name_of(number - 3))
            store.flush()
""")


def _child(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
def test_the_writer_leaves_the_processor_to_others(folder: Path) -> None:
    seen = []

    class Watching(Files):
        def fsync(self, file: int) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().fsync(file)

    with_files = open_store(folder, files=Watching())
    put(with_files, 1)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen[-1] > own
    with_files.close()


def test_two_servers_never_share_a_folder(folder: Path) -> None:
    """The second is told so; once the first is gone, even by kill -9, it may start."""
    child = _child(folder)
    try:
        with pytest.raises(DiskFolderError, match="in use by another server"):
            open_store(folder)
    finally:
        _kill(child)
    open_store(folder).close()


PARENT = textwrap.dedent("""
    import itertools, os, sys
    from pathlib import Path
    from tests.engine.kv.test_disk import BYTES, DiskStore, put
    for start in sys.stdin:
        pid = os.fork()
        if not pid:
            store = DiskStore(
                Path(sys.argv[1]), layout_bytes=BYTES, fingerprint=b"model", capacity_mb=1, deadline_s=5
            )
            print(os.getpid(), flush=True)
            for number in itertools.count(int(start)):
                while not put(store, number, wait=False):
                    pass
        os.waitpid(pid, 0)
        print("dead", flush=True)
""")


def test_kill_9_at_any_moment(folder: Path) -> None:
    """After each of 100 kills a store scans: no damaged block is served, and the cap holds."""
    source = random.Random(3)
    command = [sys.executable, "-c", PARENT, str(folder)]
    served = parts = 0
    numbers: dict[bytes, int] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for turn in range(100):
            parent.stdin.write(f"{turn * 1000}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(source.uniform(0, 0.08))
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            parts += len(list(folder.glob("*.part")))
            assert bytes_of(folder) <= 1 << 20
            store = open_store(folder)
            assert store.counters.corrupt == store.counters.foreign == store.counters.errors == 0
            held = len(files_of(folder))
            numbers |= {name_of(number): number for number in range(turn * 1000, turn * 1000 + 1000)}
            kept = [numbers[name] for name in store._index.entries]
            assert all(holds(store, number) for number in kept)
            served += len(kept)
            assert store.counters.corrupt == 0
            assert held == len(kept) == len(list(folder.glob("*.kv"))) <= FIT
            assert bytes_of(folder) == store.counters.bytes_used <= 1 << 20
            store.close()
    assert served > 100
    assert parts > 3, "no kill came during a write"


class Restarts(RuleBasedStateMachine):
    """Against a model: a block that is served is the last that was stored under its name.

    Blocks are small and compress, so that the cap is never reached and every store must be kept.
    """

    numbers = st.integers(0, 5)

    @initialize()
    def begin(self) -> None:
        """Start with an empty folder."""
        self.place = tempfile.TemporaryDirectory()
        self.contents: dict[int, int] = {}
        self.loads: list[tuple[Any, int | None]] = []
        self.open()

    def open(self) -> None:
        """Open the store."""
        self.store = open_store(Path(self.place.name) / "blocks", layout_bytes=3000)

    @rule(number=numbers, value=st.integers(0, 255))
    def put(self, number: int, value: int) -> None:
        """Store a block, if none is there."""
        slot = self.store.prepare_store(name_of(number), tokens_of(number))
        assert (slot is None) == (number in self.contents)
        if slot is not None:
            slot.buffer[:] = value
            slot.complete(True)
            assert self.store.flush()
            self.contents[number] = value

    @rule(number=numbers)
    def get(self, number: int) -> None:
        """Load a block and keep it pinned."""
        load = self.store.prepare_load(name_of(number), tokens_of(number))
        assert (load is None) == (number not in self.contents)
        if load is not None:
            while not load.ready():
                time.sleep(0.0005)
            block = load.result()
            assert block is not None
            assert (block == self.contents[number]).all()
            self.loads.append((load, number))

    @rule()
    def release(self) -> None:
        """Release what is pinned."""
        for load, _ in self.loads:
            load.release()
        self.loads.clear()

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        """Discard a block."""
        self.store.discard(name_of(number))
        self.contents.pop(number, None)

    @rule(number=numbers, position=st.integers(0, 4095))
    def damage(self, number: int, position: int) -> None:
        """Flip a bit of a file; the next load is a miss."""
        path = Path(self.place.name) / "blocks" / f"{name_of(number).hex()}.kv"
        if number in self.contents:
            data = bytearray(path.read_bytes())
            data[position] ^= 4
            path.write_bytes(data)
            before = self.store.counters.corrupt + self.store.counters.foreign
            assert get(self.store, number) is None
            assert self.store.counters.corrupt + self.store.counters.foreign == before + 1
            del self.contents[number]

    @rule()
    def restart(self) -> None:
        """Close and open again."""
        self.loads.clear()
        self.store.close()
        self.open()

    @invariant()
    def agrees(self) -> None:
        """Found is what the model holds, and its files are counted."""
        for number in range(6):
            found = self.store.lookup(name_of(number), tokens_of(number))
            assert (found is Found.HIT) == (number in self.contents)
        assert self.store.flush()
        assert self.store.counters.bytes_used == bytes_of(Path(self.place.name) / "blocks")
        assert self.store.counters.bytes_used == 4096 * len(self.contents)

    def teardown(self) -> None:
        """Leave nothing."""
        self.store.close()
        self.place.cleanup()


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
