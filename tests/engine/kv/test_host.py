"""The host tier under random use, with blocks whose bytes tell what they should be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.kv.host import HostStore, Victim
from engine.kv.store import Counters, Found, Load, Slot, Store

BLOCK, SLOTS = 24, 3
names = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


def tokens_of(name: bytes) -> bytes:
    return name * 8


def store_of(capacity: int = BLOCK * SLOTS, **how: object) -> HostStore:
    return HostStore(capacity_bytes=capacity, block_bytes=BLOCK, **how)


def put(store: Store, name: bytes, value: int) -> None:
    slot = store.prepare_store(name, tokens_of(name))
    assert slot is not None
    slot.buffer[:] = value
    slot.complete(True)


@dataclass(eq=False)
class Held:
    """A load or a slot that is out, and what the model expects of it."""

    name: bytes
    handle: Load | Slot
    value: int


class HostMachine(RuleBasedStateMachine):
    """`visible` is what must be found, the least recently used first."""

    loads, slots = Bundle("loads"), Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.store: Store = HostStore(
            capacity_bytes=BLOCK * SLOTS + BLOCK - 1, block_bytes=BLOCK, evicted=self.evicted
        )
        self.visible: dict[bytes, int] = {}
        self.storing: dict[bytes, Held] = {}
        self.reading: list[Held] = []
        self.writing: list[Held] = []
        self.handed_on: list[tuple[bytes, bytes, bytes]] = []
        self.seen = Counters()
        self.next_value = 0

    def evicted(self, victim: Victim) -> None:
        assert not victim.block.flags.writeable
        self.handed_on.append((victim.name, victim.tokens, victim.block.tobytes()))

    def pinned(self, name: bytes) -> bool:
        return any(held.name == name and held.value == self.visible[name] for held in self.reading)

    def taken(self) -> int:
        """Slots in use: visible blocks, those being stored, and forgotten ones that somebody still reads."""
        forgotten = {held.value for held in self.reading} - set(self.visible.values())
        return len(self.visible) + len(self.writing) + len(forgotten)

    @rule(target=slots, name=names)
    def begin(self, name: bytes) -> Held | None:
        victim = None
        if self.taken() == SLOTS:
            victim = next((name for name in self.visible if not self.pinned(name)), None)
        slot = self.store.prepare_store(name, tokens_of(name))
        if name in self.visible or name in self.storing:
            assert slot is None
            if name in self.visible:
                self.visible[name] = self.visible.pop(name)
            return None
        if self.taken() == SLOTS and victim is None:
            assert slot is None
            return None
        if victim is not None:
            value = self.visible.pop(victim)
            assert self.handed_on.pop() == (victim, tokens_of(victim), bytes([value]) * BLOCK)
            self.seen.evictions += 1
        assert not self.handed_on
        assert slot is not None
        self.next_value = self.next_value % 255 + 1
        held = Held(name, slot, self.next_value)
        self.storing[name] = held
        self.writing.append(held)
        slot.buffer[:] = held.value
        return held

    @rule(held=consumes(slots), success=st.booleans())
    def end(self, held: Held | None, success: bool) -> None:
        if held is None:
            return
        held.handle.complete(success)
        held.handle.complete(True)  # does nothing
        self.writing.remove(held)
        if self.storing.get(held.name) is not held:
            return  # discarded meanwhile
        del self.storing[held.name]
        if success:
            self.visible[held.name] = held.value
            self.seen.stores += 1
        else:
            self.seen.errors += 1

    @rule(target=loads, name=names)
    def load(self, name: bytes) -> Held | None:
        load = self.store.prepare_load(name, tokens_of(name))
        if name not in self.visible:
            assert load is None
            self.seen.misses += 1
            return None
        assert load is not None
        assert load.ready()
        self.visible[name] = self.visible.pop(name)
        self.seen.hits += 1
        held = Held(name, load, self.visible[name])
        self.reading.append(held)
        return held

    @rule(held=consumes(loads))
    def release(self, held: Held | None) -> None:
        if held is None:
            return
        held.handle.release()
        held.handle.release()
        assert held.handle.result() is None
        self.reading.remove(held)

    @rule(name=names)
    def discard(self, name: bytes) -> None:
        self.store.discard(name)
        self.visible.pop(name, None)
        self.storing.pop(name, None)

    @rule(name=names)
    def collide(self, name: bytes) -> None:
        """The right name with other tokens is a miss."""
        known = name in self.visible or name in self.storing
        assert self.store.lookup(name, b"other") is Found.MISS
        assert self.store.prepare_load(name, b"other") is None
        self.seen.misses += 1
        self.seen.collisions += 2 * known

    @invariant()
    def everything_is_as_stored(self) -> None:
        for name in (b"a", b"b", b"c", b"d", b"e"):
            expected = Found.HIT if name in self.visible else Found.MISS
            expected = Found.PENDING if name in self.storing else expected
            assert self.store.lookup(name, tokens_of(name)) is expected
        for held in self.reading:
            block = held.handle.result()
            assert block is not None
            assert not block.flags.writeable
            assert block.tobytes() == bytes([held.value]) * BLOCK
        self.seen.bytes_used = self.taken() * BLOCK
        assert self.seen.bytes_used <= BLOCK * SLOTS
        self.seen.store_times = self.store.counters.store_times  # of them only how many are known
        assert self.store.counters == self.seen
        assert sum(self.seen.store_times.counts) == self.seen.stores
        assert len(self.store.ages()) == self.store.blocks


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_every_visible_block_reads_back() -> None:
    store = store_of()
    for value, name in enumerate((b"a", b"b", b"c", b"d")):
        put(store, name, value)
    for value, name in ((1, b"b"), (2, b"c"), (3, b"d")):
        load = store.prepare_load(name, tokens_of(name))
        assert load is not None
        assert (load.result() == value).all()
        load.release()
    assert store.lookup(b"a", tokens_of(b"a")) is Found.MISS


def test_a_failing_hand_over_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise OSError("disk full")

    store = store_of(BLOCK, evicted=broken)
    put(store, b"a", 1)
    put(store, b"b", 2)
    assert store.lookup(b"b", tokens_of(b"b")) is Found.HIT
    assert (store.counters.evictions, store.counters.errors) == (1, 1)
    assert "disk full" in caplog.text


def test_memory_for_less_than_a_block_takes_none() -> None:
    store = store_of(BLOCK - 1)
    assert store.prepare_store(b"a", b"") is None
    assert store.counters == Counters()


def test_after_close_all_are_misses_and_readers_finish() -> None:
    store = store_of()
    put(store, b"a", 7)
    load, slot = store.prepare_load(b"a", tokens_of(b"a")), store.prepare_store(b"b", b"")
    assert load is not None
    assert slot is not None
    store.close()
    assert (load.result() == 7).all()
    slot.buffer[:] = 1
    slot.complete(True)
    load.release()
    assert store.lookup(b"a", tokens_of(b"a")) is store.lookup(b"b", b"") is Found.MISS
    assert store.prepare_store(b"c", b"") is None
    assert store.counters.bytes_used == 0


def damaged(store: HostStore, name: bytes, bit: int = 0) -> None:
    block = dict(store.contents())[name]
    block[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("bit", [0, 8 * BLOCK - 1])
def test_a_flipped_bit_is_a_miss_and_the_block_goes(bit: int) -> None:
    store = store_of()
    put(store, b"a", 1)
    put(store, b"b", 2)
    load = store.prepare_load(b"a", tokens_of(b"a"))
    assert load is not None
    damaged(store, b"a", bit)  # even while it is pinned
    assert load.result() is None
    assert load.result() is None
    counters = store.counters
    assert (counters.corrupt, counters.misses, counters.hits) == (1, 1, 0)
    assert store.lookup(b"a", tokens_of(b"a")) is Found.MISS
    assert counters.bytes_used == 2 * BLOCK
    load.release()
    assert counters.bytes_used == BLOCK
    put(store, b"a", 3)
    load = store.prepare_load(b"a", tokens_of(b"a"))
    assert load is not None
    assert (load.result() == 3).all()
    assert (counters.corrupt, counters.hits) == (1, 1)


def test_a_damaged_block_is_not_handed_on() -> None:
    handed: list[Victim] = []
    store = store_of(evicted=handed.append)
    for value, name in enumerate((b"a", b"b")):
        put(store, name, value)
    damaged(store, b"a", 77)
    assert store.evict()
    assert store.evict()
    assert [victim.name for victim in handed] == [b"b"]
    assert (store.counters.corrupt, store.counters.evictions, store.counters.bytes_used) == (1, 2, 0)


def test_a_load_that_nobody_reads_is_neither_hit_nor_miss() -> None:
    store = store_of()
    put(store, b"a", 1)
    load = store.prepare_load(b"a", tokens_of(b"a"))
    assert load is not None
    load.release()
    assert (store.counters.hits, store.counters.misses) == (0, 0)
