"""The KV cache by tier: its metrics, and what `GET /quaver/tiers` tells of it.

The engine counts since the model process began; here counts go on when another one starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import AGE_EDGES_S, TIER_EDGES_S, EngineStats, Ready, StepOutput, TierStats
from telemetry import names

WINDOW_S = 60.0
_KEEP_EVERY_S = 0.5

#: By the key of a total; those of the device are counted in pages, those of the tiers below in blocks.
_COUNTERS = {
    "served_tokens": names.KV_SERVED,
    "saved_s": names.KV_SAVED,
    "lost_s": names.KV_LOST,
    "hits": names.TIER_HITS,
    "misses": names.TIER_MISSES,
    "stores": names.TIER_STORES,
    "promotions": names.TIER_PROMOTIONS,
    "evictions": names.TIER_EVICTIONS,
    "loaded_bytes": names.TIER_LOADED,
    "stored_bytes": names.TIER_STORED,
    "promoted_bytes": names.TIER_PROMOTED,
    "dropped_tokens": names.TIER_DROPPED,
    "kept_tokens": names.TIER_KEPT,
    "corrupt": names.TIER_CORRUPT,
    "late": names.TIER_LATE,
    "errors": names.TIER_ERRORS,
    "collisions": names.TIER_COLLISIONS,
    "foreign": names.TIER_FOREIGN,
    "refused": names.TIER_REFUSED,
    "skipped": names.TIER_SKIPPED,
}
_SERVED_AND_SAVED = ("served_tokens", "saved_s", "lost_s")
_DEVICE = {"hits", "misses", "evictions", "collisions", "saved_s"}  # as `prefix_…` in EngineStats
_GAUGES = {
    "bytes_used": names.TIER_BYTES,
    "bytes_total": names.TIER_CAPACITY,
    "tokens": names.TIER_TOKENS,
    "blocks": names.TIER_BLOCKS,
    "compression_ratio": names.TIER_RATIO,
}
_PROMPTS = "prompts"  # in place of a tier, of totals that are no tier's
_TIMES = {"load": names.TIER_LOAD_TIME, "store": names.TIER_STORE_TIME}


class Growth:
    """By how much counts of a process have grown."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, float] = {}

    def of(self, key: Hashable, count: float) -> float:
        """Return the growth of a count since it was last seen."""
        grown = count - self._seen.get(key, 0.0)
        self._seen[key] = count
        return max(grown, 0.0)

    def restart(self) -> None:
        """Note that a new process counts from 0."""
        self._seen.clear()


class KvTiers(Collector):
    """What is known of each tier. `totals` are counts since the server began, by tier and key."""

    def __init__(self, began: float) -> None:
        self.totals: dict[tuple[str, str], float] = defaultdict(float)
        self.levels: dict[str, dict[str, float | None]] = {}  # by tier; none while no model process runs
        self.ages: dict[str, list[int]] = {}
        self._times: dict[tuple[str, str], list[float]] = {}  # counts by TIER_EDGES_S, by tier and what
        self._growth = Growth()
        self._ready: Ready | None = None
        self._told: float | None = None
        self._history: deque[tuple[float, dict[tuple[str, str], float]]] = deque([(began, {})])

    def begin(self, ready: Ready) -> None:
        """Let a new model process be told of."""
        self.end()
        self._ready = ready
        self._growth.restart()

    def end(self) -> None:
        """Forget what a model process held that is gone."""
        self.levels, self.ages, self._told = {}, {}, None

    def observe(self, outputs: Sequence[StepOutput]) -> None:
        """Take in steps, and the reports between them."""
        last = outputs[-1]
        self._see_device(last.stats)
        for output in outputs:
            for tier in output.tiers:
                self._see_tier(tier)
            self.ages = output.kv_ages or self.ages
            for finish in output.finished:
                for name, tokens in finish.tier_tokens.items():
                    self.totals[name, "served_tokens"] += tokens
                if finish.loading_s:
                    self.totals[_PROMPTS, "waited"] += 1
                    self.totals[_PROMPTS, "waited_s"] += finish.loading_s
        self._told = last.time
        if last.time - self._history[-1][0] >= _KEEP_EVERY_S:
            self._history.append((last.time, dict(self.totals)))
            while len(self._history) > 1 and self._history[1][0] <= last.time - WINDOW_S:
                self._history.popleft()

    def report(self, now: float) -> dict[str, Any]:
        """Return what each tier holds and has done, rates over the last minute, and the policy in force.

        Times are unix seconds, rates per second. `waited` is the rate of prompts that waited for a tier
        below the pool; `wait_s` of them, `load_s` and `store_s` of blocks are means of the last minute.
        """
        since, before = self._history[0]
        for moment, totals in self._history:
            if moment <= now - WINDOW_S:
                since, before = moment, totals
        seconds = min(max(now - since, _KEEP_EVERY_S), WINDOW_S)
        ready, grown = self._ready, self._grown(_PROMPTS, before)
        waited = grown.get("waited", 0.0)
        return {
            "time": self._told,
            "window_s": seconds,
            "waited": waited / seconds,
            "wait_s": grown["waited_s"] / waited if waited else None,
            "page_tokens": ready.page_size if ready else 0,
            "block_tokens": ready.kv_block_tokens if ready else 0,
            "age_edges_s": AGE_EDGES_S,
            "policy": ready.kv_policy if ready else {},
            "tiers": [self._tier(tier, before, seconds) for tier in names.TIERS if tier in self.levels],
        }

    def describe(self) -> Iterable[Metric]:
        """Name the families without samples."""
        return [_family(spec) for spec in (*_COUNTERS.values(), *_GAUGES.values(), *_TIMES.values())]

    def collect(self) -> Iterable[Metric]:
        """Yield what each tier has done, and what those that there are hold."""
        families: dict[str, Any] = {family.name: family for family in self.describe()}
        for (tier, key), total in list(self.totals.items()):
            if key in _COUNTERS and (tier != "device" or key in _SERVED_AND_SAVED):
                families[_COUNTERS[key].name].add_metric([tier], total)
        for tier, levels in list(self.levels.items()):
            for key, level in levels.items():
                if level is not None:
                    families[_GAUGES[key].name].add_metric([tier], level)
        for (tier, what), counts in list(self._times.items()):
            family, running = families[_TIMES[what].name], 0.0
            buckets = []
            for edge, count in zip((*map(str, TIER_EDGES_S), "+Inf"), counts, strict=True):
                running += count
                buckets.append((edge, running))
            family.add_metric([tier], buckets, self.totals[tier, f"{what}_s"])
        return families.values()

    def _see_device(self, stats: EngineStats) -> None:
        for key in _DEVICE:
            self._grow("device", key, getattr(stats, f"prefix_{key}"))
        if self._ready is not None:
            page = self._ready.page_size
            tokens = page * (stats.pages_used + stats.pages_cached)
            self.levels["device"] = {
                "bytes_used": tokens * self._ready.kv_token_bytes,
                "bytes_total": page * stats.pages_total * self._ready.kv_token_bytes,
                "tokens": tokens,
            }

    def _see_tier(self, stats: TierStats) -> None:
        tier = stats.tier
        for key in _COUNTERS:
            if key != "served_tokens":
                self._grow(tier, key, getattr(stats, key))
        for what, counts in (("load", stats.load_counts), ("store", stats.store_counts)):
            self._grow(tier, f"{what}_s", getattr(stats, f"{what}_s"))
            self._grow(tier, f"{what}s_timed", sum(counts))
            grown = [self._growth.of((tier, what, place), count) for place, count in enumerate(counts)]
            known = self._times.setdefault((tier, what), [0.0] * (len(TIER_EDGES_S) + 1))
            self._times[tier, what] = [a + b for a, b in zip(known, grown, strict=True)]
        in_pool = stats.tokens * (self._ready.kv_token_bytes if self._ready else 0)
        self.levels[tier] = {
            "bytes_used": stats.bytes_used,
            "bytes_total": stats.bytes_total,
            "tokens": stats.tokens,
            "blocks": stats.blocks,
            "compression_ratio": stats.bytes_used / in_pool if in_pool else None,
        }

    def _grow(self, tier: str, key: str, count: float) -> None:
        self.totals[tier, key] += self._growth.of((tier, key), count)

    def _grown(self, tier: str, before: dict[tuple[str, str], float]) -> dict[str, float]:
        """Return by how much each total of a tier has grown."""
        return {
            key: total - before.get((name, key), 0.0)
            for (name, key), total in self.totals.items()
            if name == tier
        }

    def _tier(self, tier: str, before: dict[tuple[str, str], float], seconds: float) -> dict[str, Any]:
        counts = {key: self.totals[tier, key] for key in _COUNTERS if (tier, key) in self.totals}
        grown = self._grown(tier, before)
        times = {}
        for what in _TIMES:
            timed = grown.get(f"{what}s_timed", 0.0)
            times[f"{what}_s"] = grown[f"{what}_s"] / timed if timed else None
        return {
            "tier": tier,
            **self.levels[tier],
            **times,
            "ages": self.ages.get(tier, []),
            "counts": counts,
            "rates": {key: grown[key] / seconds for key in counts},
        }


def _family(spec: names.Metric) -> Any:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    return kinds[spec.kind](spec.name, spec.help, labels=spec.labels)
