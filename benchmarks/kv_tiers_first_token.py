"""Seconds to the first token of a prompt that nobody, or some tier, has seen before.

Each round takes another prompt through all of it: cold, and then from every tier, down to a new engine
on the same folder. Ratios are to the fastest cold way of the same rounds.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import intervals, limits
from benchmarks.kv_tiers_drive import Answer, Driver, Engines, forget
from benchmarks.rows import console
from benchmarks.text import Text
from engine.kv.disk_files import Files, has_direct, read_whole

#: Tokens of a step in which a cold prompt is cut: the default, and larger ones that may be faster.
CHUNKS = (512, 1024, 2048)
WARM = ("device", "host", "disk", "restart")
_READERS = 2  # threads that read, as the disk tier has
_COPY_MB = 256


@dataclass(frozen=True)
class Plan:
    """Prompts of so many tokens, each so many rounds, after one that is not counted."""

    sizes: tuple[int, ...] = (1024, 2048, 4096, 7168)
    rounds: int = 7


QUICK = Plan(sizes=(1024, 4096), rounds=2)


@dataclass
class Size:
    """What the rounds with prompts of one size have shown, by way and tier: seconds to the first token, and
    of each tier the tokens found there and the least seconds that moving them takes on this machine."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    least_s: dict[str, float] = field(default_factory=dict)

    def note(self, way: str, answer: Answer) -> None:
        """Take in an answer."""
        self.seconds.setdefault(way, []).append(answer.first_s)
        self.tokens[way] = answer.tier_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return it for the JSON, raw rounds included."""
        medians = {way: intervals.of(values).median for way, values in self.seconds.items()}
        base = min((_cold(chunk) for chunk in CHUNKS), key=medians.__getitem__)
        return {
            "cold_way": base,
            "cold_ms": 1000 * medians[base],
            "hits": {
                tier: {
                    "ms": 1000 * medians[tier],
                    "ratio": asdict(intervals.ratio(self.seconds[tier], self.seconds[base])),
                    "tokens": self.tokens[tier],
                    "limit_ms": 1000 * self.least_s[tier] if tier in self.least_s else None,
                    "limit_share": self._share(medians, tier),
                }
                for tier in WARM
            },
            "ms": {way: [1000 * value for value in values] for way, values in self.seconds.items()},
        }

    def _share(self, medians: dict[str, float], tier: str) -> float | None:
        """The least time of moving ÷ what a tier takes beyond a device hit."""
        beyond = medians[tier] - medians["device"]
        return self.least_s[tier] / beyond if tier in self.least_s and beyond > 0 else None


class Measurement:
    """Engines without a cache, and one after another with all tiers, on a folder of their own."""

    def __init__(self, engines: Engines, text: Text, plan: Plan, folder: Path) -> None:
        self.engines, self.text, self.plan, self.folder = engines, text, plan, folder
        pool = {"kv_tokens": -(-max(plan.sizes) // 2048) * 2048 + 2048}
        self._cold = {
            _cold(chunk): engines.engine(prefix_cache=False, step_tokens=chunk, **pool) for chunk in CHUNKS
        }
        self._warm = {"kv_disk_dir": folder / "kv", "kv_deadline_s": 60.0, **pool}
        self.direct = has_direct(Files(), folder)
        self.copy_rate = _copy_rate()
        self.read_rate = 0.0

    def run(self) -> dict[str, Any]:
        """Return the figures of each size, and what the machine allows."""
        sizes = {str(size): self._size(size).as_dict() for size in self.plan.sizes}
        for driver in self._cold.values():
            driver.close()
        how = (
            "past the system's memory (O_DIRECT)"
            if self.direct
            else "after the system was told to forget them"
        )
        limits_found = {"memory_copy_bytes_per_s": self.copy_rate, "disk_read_bytes_per_s": self.read_rate}
        return {"files_are_read": how, "limits": limits_found, "sizes": sizes}

    def _size(self, size: int) -> Size:
        found = Size()
        for number in range(-1, self.plan.rounds):
            what = "warming up" if number < 0 else f"round {number + 1} of {self.plan.rounds}"
            console.print(f"[dim]first token of {size}: {what}")
            row = Size() if number < 0 else found
            self._round(row, self.text.prompt(size, number + 1))
            latest = {way: f"{1000 * values[-1]:.0f}" for way, values in row.seconds.items()}
            console.print(f"[dim]    {', '.join(f'{way} {value}' for way, value in latest.items())} ms")
        return found

    def _round(self, row: Size, prompt: list[int]) -> None:
        """Take a prompt through every way: cold, then its pages one tier further down each time."""
        for way, driver in self._cold.items():
            row.note(way, driver.ask(prompt))
        driver = self.engines.engine(**self._warm)
        row.note("cold, tiers on", driver.ask(prompt))
        row.note("device", driver.ask(prompt))
        driver.push_to_host()
        self._hit(row, driver, prompt, "host", "host")
        driver.push_to_disk()
        self._hit(row, driver, prompt, "disk", "disk")
        driver.push_to_disk()
        driver.close()
        driver = self.engines.engine(**self._warm)
        assert driver.disk is not None
        driver.disk.flush(60.0)  # the folder is scanned
        self._hit(row, driver, prompt, "restart", "disk")
        driver.close()

    def _hit(self, row: Size, driver: Driver, prompt: list[int], way: str, tier: str) -> None:
        files = sorted((self.folder / "kv").glob("*.kv"))
        if not self.direct:
            forget(files)
        self.read_rate = self.read_rate or _read_rate(files, self.direct)
        before = driver.stats()[tier]
        row.note(way, driver.ask(prompt))
        after = driver.stats()[tier]
        if tier == "host":
            written = row.tokens[way].get(tier, 0) * self.engines.token_bytes
            row.least_s[way] = (after.loaded_bytes - before.loaded_bytes + written) / self.copy_rate
        else:
            size = sum(file.stat().st_size for file in files) / max(len(files), 1)
            row.least_s[way] = (after.hits - before.hits) * size / self.read_rate


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The figures of the issue: hits of a 4k prompt ÷ cold."""
    hits = found["sizes"].get("4096", {}).get("hits", {})
    return {f"{tier}_hit_ratio_4k": hit["ratio"]["median"] for tier, hit in hits.items() if tier != "restart"}


def _cold(chunk: int) -> str:
    return f"cold, steps of {chunk}"


def _copy_rate() -> float:
    """Bytes a second that one thread reads and writes when it copies what no cache holds."""
    source = np.ones(_COPY_MB << 20, np.uint8)
    target = np.empty_like(source)
    return 2 * source.nbytes / limits.best(lambda: np.copyto(target, source), 0.5)


def _read_rate(files: Sequence[Path], direct: bool) -> float:
    """Bytes a second at which files are read, and no more done, by as many threads as the disk tier has."""
    if not files:
        return 0.0
    system, most = Files(), max(file.stat().st_size for file in files)
    buffers = [memoryview(mmap.mmap(-1, most)) for _ in range(_READERS)]

    def read(reader: int) -> int:
        return sum(read_whole(system, file, buffers[reader], direct) for file in files[reader::_READERS])

    def sweep() -> None:
        if not direct:
            forget(files)
        sum(pool.map(read, range(_READERS)))

    with ThreadPoolExecutor(_READERS) as pool:
        return sum(file.stat().st_size for file in files) / limits.best(sweep, 1.0)
