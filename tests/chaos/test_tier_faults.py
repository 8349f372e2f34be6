"""Faults of the host and disk tiers as leases on a real engine: right answers, and counters that tell."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.faults.registry import MODEL_KINDS, parse_fault
from chaos.faults.tier_disk import DiskFault, TierFault
from chaos.faults.tier_torn import DiskTorn
from chaos.model_hook import ModelFaults
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from engine.core import Engine
from engine.kv.tier_policy import TierPolicy
from engine.messages import AttachFault, Finish, TierStats
from engine.settings import EngineSettings
from tests.chaos.lab import Process, refused, start
from tests.engine.kv.test_block_file import FIELDS
from tests.engine.kv.test_prefix import MODEL, ONE, PAGE, computed, prompt_of, run, submit
from tests.engine.kv.test_prefix import engine as plain
from tests.engine.kv.test_tiers_machine import TOLERANCE, Loaded

KINDS = [name for name, kind in MODEL_KINDS.items() if issubclass(kind, TierFault)]
PROMPT = prompt_of(100)
HELD = 96  # tokens of it in whole blocks
DEADLINE_S = 0.4
FAILURES = ("corrupt", "late", "errors", "collisions", "foreign", "refused")

#: What strikes a block on its way from the disk: parameters, and the counter that tells.
READS: list[tuple[str, dict[str, Any], str]] = [
    ("disk_slow", {"seconds": 30.0, "on": "reads"}, "late"),
    ("disk_io", {"on": "reads"}, "errors"),
    ("disk_io", {}, "errors"),
    ("disk_stale", {}, "corrupt"),
    ("disk_flip", {}, "corrupt"),
    ("disk_flip", {"burst": 16}, "corrupt"),
]
#: What keeps it from the disk.
WRITES: list[tuple[str, dict[str, Any], str]] = [
    ("disk_io", {"on": "writes"}, "errors"),
    ("disk_full", {}, "errors"),
    ("disk_staging", {}, "refused"),
]


class Bench:
    """An engine with all tiers and the chaos hook, and where the blocks of `PROMPT` are."""

    def __init__(self, folder: Path, hook: ModelFaults | None = None) -> None:
        self.hook = hook or ModelFaults()
        settings = EngineSettings(
            kv_tokens=256,
            page_size=PAGE,
            max_running=4,
            signal_budget=0.0,
            kv_host_mb=1,
            kv_disk_dir=folder,
            kv_disk_mb=1,
            kv_deadline_s=DEADLINE_S,
        )
        self.engine = Engine(MODEL, settings, self.hook, b"weights")
        assert self.engine.tiers is not None
        self.tiers = self.engine.tiers
        self.tiers.storing.policy = TierPolicy(disk_age_s=0.0, copy_all=True)
        self.disk._writer._first_pause_s = self.disk._writer._pause_s = 0.01
        self.loaded = Loaded(self.engine, self.tiers)
        self.count = 0
        assert self.disk.flush()

    @property
    def host(self) -> Any:
        return self.tiers.host

    @property
    def disk(self) -> Any:
        return self.tiers.disk

    def ask(self) -> tuple[list[int], Finish]:
        """Ask the prompt; every page that came back must hold what its tokens compute to."""
        for tier in self.tiers.tiers:
            tier.pace.seconds = 1e-9  # it is never too slow to be tried
        self.count += 1
        name = f"q{self.count}"
        tokens, ends = run(self.engine, submit(name, PROMPT))
        for read, values in self.loaded.take():
            if read:
                error = values - computed(tuple(read))
                assert error.square().mean((1, 3, 4, 5)).sqrt().max() < TOLERANCE
        return tokens[name], ends[name]

    def names(self) -> list[bytes]:
        """Names of the prompt's blocks, in order."""
        return self.engine.roster.cache.chain(ONE, PROMPT).names[3 : HELD // PAGE : 4]

    def to_host(self) -> None:
        """Have the pool give up what it keeps."""
        cache = self.engine.roster.cache
        self.tiers.begin_step(decoding=False)
        self.tiers.step.limit = 60.0
        cache.release(cache.take(self.engine.pool.free + cache.idle))

    def to_disk(self) -> None:
        """Have the pool and the host give up what they keep, and wait for the disk."""
        self.to_host()
        while self.host.evict():
            pass
        assert self.disk.flush()

    def forget(self) -> None:
        """Have the pool and the host lose what they keep."""
        cache = self.engine.roster.cache
        cache.leaving, leaving = None, cache.leaving
        cache.release(cache.take(self.engine.pool.free + cache.idle))
        cache.leaving = leaving
        for name, _ in list(self.host.contents()):
            self.host.discard(name)

    def attach(self, kind: str, ttl_s: float = 60.0, seed: int = 3, **params: Any) -> None:
        self.hook.attach(AttachFault(fault_id="f", kind=kind, params=params, seed=seed, ttl_s=ttl_s))

    def failures(self) -> dict[str, int]:
        """What is amiss so far, by counter, of both tiers."""
        stats: list[TierStats] = self.tiers.stats()
        found = {name: sum(getattr(tier, name) for tier in stats) for name in FAILURES}
        return {name: count for name, count in found.items() if count}

    def sound(self) -> None:
        """See that the tiers work as if there had never been a fault, and that nothing is left of it."""
        assert not self.hook.active
        assert not self.hook.on_tiers
        time.sleep(0.1)  # after a failed write the disk rests for a while
        self.ask()
        self.to_disk()
        before = self.failures()
        assert self.ask()[1].tier_tokens == {"disk": HELD}
        self.to_host()
        assert self.ask()[1].tier_tokens == {"host": HELD}
        assert self.failures() == before
        assert self.disk.free_buffers == self.disk.buffers
        files: Any = self.disk._folder.files
        assert (files._blocks, files._deleted) == ({}, {})
        self.engine.check()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    bench = Bench(tmp_path / "kv")
    yield bench
    bench.hook.detach(None)
    bench.engine.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture(scope="module")
def cold() -> list[int]:
    """The answer of an engine that computes everything."""
    return run(plain(prefix_cache=False), submit("a", PROMPT))[0]["a"]


@pytest.mark.parametrize(("kind", "params", "counter"), READS)
def test_what_cannot_be_read_is_computed(
    bench: Bench, cold: list[int], kind: str, params: dict[str, Any], counter: str
) -> None:
    bench.ask()
    bench.to_disk()
    bench.attach(kind, **params)
    tokens, end = bench.ask()
    assert tokens == cold
    assert end.reason == "length"
    assert end.tier_tokens == {}
    # A stale read may find that the other reader has just deleted the file it takes for the old one.
    assert counter in set(bench.failures()) <= {counter, "errors"}
    assert bench.tiers.stats()[1].misses > 0
    bench.hook.detach("f")
    bench.sound()


@pytest.mark.parametrize(("kind", "params", "counter"), WRITES)
def test_what_cannot_be_written_is_computed(
    bench: Bench, cold: list[int], kind: str, params: dict[str, Any], counter: str
) -> None:
    bench.ask()
    bench.attach(kind, **params)
    bench.engine.step()
    bench.to_disk()
    assert bench.disk.blocks == 0
    tokens, end = bench.ask()
    assert (tokens, end.tier_tokens) == (cold, {})
    assert counter in bench.failures()
    bench.hook.detach("f")
    bench.sound()


@pytest.mark.parametrize("how", ["cut", "zeros"])
def test_torn_writes_show_when_they_are_read_even_after_the_lease(
    bench: Bench, cold: list[int], how: str
) -> None:
    bench.ask()
    bench.attach("disk_torn", how=how)
    bench.to_disk()
    torn = bench.disk.blocks
    assert torn == HELD // (4 * PAGE)
    assert bench.failures() == {}
    bench.hook.detach("f")
    tokens, end = bench.ask()
    assert (tokens, end.tier_tokens) == (cold, {})
    assert set(bench.failures()) == {"corrupt"}
    assert bench.disk.flush()
    assert bench.disk.blocks < torn
    for _ in range(torn):  # each is noticed when those before it are sound, and then all is well
        bench.to_disk()
        bench.ask()
    assert bench.failures() == {"corrupt": torn}
    bench.sound()


@pytest.mark.parametrize("burst", [1, 3, 400])
def test_bits_flipped_in_the_hosts_memory(bench: Bench, cold: list[int], burst: int) -> None:
    bench.ask()
    bench.to_host()
    bench.attach("host_flip", burst=burst)
    tokens, end = bench.ask()
    assert (tokens, end.tier_tokens) == (cold, {})
    assert set(bench.failures()) == {"corrupt"}
    assert bench.host.counters.corrupt > 0
    bench.to_disk()  # what was struck and never read is not handed on
    assert bench.host.counters.corrupt + bench.disk.blocks == bench.host.counters.stores
    bench.hook.detach("f")
    bench.sound()


def test_a_stall_of_five_seconds(bench: Bench, cold: list[int]) -> None:
    """The request does not wait for it, and what comes so late changes nothing."""
    bench.ask()
    bench.to_disk()
    bench.attach("disk_slow", seconds=5.0, on="reads")
    began = time.monotonic()
    tokens, end = bench.ask()
    assert (tokens, end.tier_tokens) == (cold, {})
    assert time.monotonic() - began < 4.0
    assert set(bench.failures()) == {"late"}
    time.sleep(max(0.0, began + 5.5 - time.monotonic()))
    bench.hook.detach("f")
    bench.forget()
    assert bench.ask()[1].tier_tokens == {"disk": HELD}
    assert set(bench.failures()) == {"late"}
    bench.sound()


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_byte_in_any_field_of_a_header(bench: Bench, cold: list[int], field: str) -> None:
    bench.ask()
    bench.to_disk()
    path = bench.disk.folder / f"{bench.names()[0].hex()}.kv"
    data = bytearray(path.read_bytes())
    data[FIELDS[field][0]] ^= 1
    path.write_bytes(data)
    tokens, end = bench.ask()
    assert (tokens, end.tier_tokens) == (cold, {})
    assert bench.failures() == {"foreign" if field == "version" else "corrupt": 1}
    assert bench.disk.flush()
    assert not path.exists()
    bench.sound()


def test_slow_writes_hold_up_stores_until_the_lease_ends(bench: Bench) -> None:
    bench.ask()
    bench.attach("disk_slow", seconds=30.0, on="writes")
    bench.to_host()
    while bench.host.evict():
        pass
    assert not bench.disk.flush(0.3)
    assert bench.disk.blocks == 0
    bench.hook.detach("f")
    assert bench.disk.flush()
    assert bench.disk.blocks == HELD // (4 * PAGE)
    assert bench.failures() == {}
    bench.sound()


@pytest.mark.parametrize("kind", KINDS)
def test_the_control_takes_the_same_path_and_changes_nothing(bench: Bench, kind: str) -> None:
    bench.attach(kind, **MODEL_KINDS[kind].control)
    bench.ask()
    bench.to_disk()
    assert bench.ask()[1].tier_tokens == {"disk": HELD}
    bench.to_host()
    assert bench.ask()[1].tier_tokens == {"host": HELD}
    assert bench.failures() == {}
    assert bench.hook.active


@pytest.mark.parametrize(("kind", "params"), [("disk_io", {}), ("disk_flip", {}), ("disk_slow", {})])
def test_a_lease_ends_by_its_own_clock(bench: Bench, kind: str, params: dict[str, Any]) -> None:
    """Nobody tells the threads of the disk that it is over."""
    bench.ask()
    bench.to_disk()
    bench.attach(kind, ttl_s=0.2, **params)
    time.sleep(0.25)
    assert bench.ask()[1].tier_tokens == {"disk": HELD}
    assert bench.failures() == {}
    assert bench.hook.expire(time.monotonic())
    bench.sound()


@pytest.mark.parametrize("kind", ["disk_io", "disk_flip", "host_flip"])
def test_a_share_of_the_blocks_is_struck_the_same_for_the_same_seed(bench: Bench, kind: str) -> None:
    bench.ask()
    (bench.to_host if kind == "host_flip" else bench.to_disk)()
    fault = parse_fault(kind, {"share": 0.5})
    assert isinstance(fault, TierFault)
    names = bench.names()
    seeds = [seed for seed in range(200) if not fault.strikes(seed, names[0].hex())]
    seed = next(seed for seed in seeds if fault.strikes(seed, names[3].hex()))
    first = next(i for i, name in enumerate(names) if fault.strikes(seed, name.hex()))
    bench.attach(kind, seed=seed, share=0.5)
    _, end = bench.ask()
    assert end.cached_tokens == first * 4 * PAGE
    assert set(bench.failures()) == {"errors" if kind == "disk_io" else "corrupt"}
    assert max(bench.failures().values()) <= sum(fault.strikes(seed, name.hex()) for name in names)


def test_stale_reads_return_deleted_blocks(bench: Bench) -> None:
    """The same block before it was written anew, and else another's: both are noticed."""
    bench.ask()
    bench.to_disk()
    bench.attach("disk_stale")
    names = list(bench.disk._index.entries)
    bench.disk.discard(names[0])
    assert bench.disk.flush()
    files: Any = bench.disk._folder.files
    assert set(files._deleted) == {names[0].hex()}
    assert bench.ask()[1].tier_tokens == {}
    bench.hook.detach("f")
    assert files._deleted == {}


def test_no_selector_is_taken() -> None:
    hook = ModelFaults()
    for kind in KINDS:
        assert MODEL_KINDS[kind].scope == "process"
        message = AttachFault(fault_id="f", kind=kind, selector={"tenant": "a"}, ttl_s=1.0)
        with pytest.raises(ValueError, match="takes no selector"):
            hook.attach(message)
    assert not hook.active


async def test_the_controller_starts_and_ends_them(tmp_path: Path, cold: list[int]) -> None:
    process = Process()
    chaos = Chaos(ChaosSettings(chaos=True), process, tmp_path / "state" / "journal.jsonl")
    await chaos.start()
    bench = Bench(tmp_path / "kv", process.hook)
    bench.ask()
    bench.to_disk()
    flips = {"kind": "disk_flip", "ttl_s": 30.0, "params": {"burst": 2}}
    assert "takes no selector" in await refused(chaos, flips, "invalid_fault", selector={"tenant": "a"})
    assert "seconds of at most 10" in await refused(
        chaos, {"kind": "disk_slow", "ttl_s": 30.0}, "over_cap", params={"seconds": 11.0}
    )
    listing = await start(chaos, flips, seed=4)
    assert (listing["scope"], listing["state"]) == ("process", "active")
    await refused(chaos, flips, "overlap")
    assert bench.ask()[0] == cold
    assert set(bench.failures()) == {"corrupt"}
    assert (await chaos.controller.end(listing["fault_id"]))["ended"]
    bench.sound()
    await chaos.stop()
    bench.engine.close()


def test_without_a_fault_nothing_is_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores are left alone, and no call to the disk is remembered."""
    monkeypatch.setattr(bench.hook, "tiers", None)
    bench.ask()
    bench.to_disk()
    assert bench.ask()[1].tier_tokens == {"disk": HELD}
    files: Any = bench.disk._folder.files
    assert files._blocks == {}


@pytest.mark.parametrize("how", ["cut", "zeros"])
@pytest.mark.parametrize("size", [4096, 8192, 753_664])
def test_what_a_torn_write_loses(how: str, size: int) -> None:
    """A range of whole sectors, never nothing, the end where it is cut."""
    fault = DiskTorn(how=how)
    for seed in range(50):
        gap = fault.lost(size, random.Random(seed))
        assert gap
        assert gap.start % 4096 == gap.stop % 4096 == 0
        assert 0 <= gap.start < gap.stop <= size
        assert how == "zeros" or gap.stop == size


def test_every_kind_says_what_it_moves() -> None:
    for kind in KINDS:
        fault = MODEL_KINDS[kind]
        assert fault.moves
        parse_fault(kind, dict(fault.control))
    assert sum(issubclass(MODEL_KINDS[kind], DiskFault) for kind in KINDS) == 6
