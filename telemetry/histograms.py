"""Histograms that take a whole batch at once, with an exemplar per bucket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Exemplar, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.labels import Labels
from telemetry.names import Metric as Spec

_TOGETHER = 32  # batches
_Batch = tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.object_], float]


class BatchHistogram(Collector):
    """A Prometheus histogram by route, updated with arrays.

    `counts` is int64 [routes, buckets + 1] (the last one is +Inf). Batches wait until there are
    some, or somebody looks, and are counted together.
    """

    def __init__(self, spec: Spec, routes: Labels) -> None:
        self.spec = spec
        self.routes = routes
        self.bounds = np.array(spec.buckets, np.float64)
        rows, self.width = routes.limit + 1, len(spec.buckets) + 1
        self.counts = np.zeros((rows, self.width), np.int64)
        self.sums = np.zeros(rows)
        self.exemplar_values = np.zeros(rows * self.width)
        self.exemplar_times = np.zeros(rows * self.width)
        self.exemplar_traces = np.full(rows * self.width, None, object)
        self._waiting: deque[_Batch] = deque()
        self._counting = threading.Lock()  # the event loop and exporting threads may count at once

    def observe(
        self, route: NDArray[np.intp], values: NDArray[np.float64], traces: NDArray[np.object_], time: float
    ) -> None:
        """Count `values` [n] under their `route` indices [n]; NaN is absent and not counted.

        The last value that falls into a bucket becomes its exemplar, with its trace id. The arrays
        are kept and must not be written to.
        """
        self._waiting.append((route, values, traces, time))
        if len(self._waiting) >= _TOGETHER:
            self._count()

    def _count(self) -> None:
        with self._counting:
            batches = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not batches:
                return
            routes, parts, trace_ids, times = zip(*batches, strict=True)
            values = np.concatenate(parts)
            known = ~np.isnan(values)
            values, route = values[known], np.concatenate(routes)[known]
            cell = route * self.width + np.searchsorted(self.bounds, values)
            flat = self.counts.reshape(-1)
            flat += np.bincount(cell, minlength=flat.size)
            self.sums += np.bincount(route, values, minlength=self.sums.size)
            self.exemplar_values[cell] = values
            self.exemplar_times[cell] = np.repeat(times, [part.size for part in parts])[known]
            self.exemplar_traces[cell] = np.concatenate(trace_ids)[known]

    def describe(self) -> Iterable[Metric]:
        """Name the family without reading it."""
        return [HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)]

    def collect(self) -> Iterable[Metric]:
        """Yield the family, routes without observations left out."""
        self._count()
        family = HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        for row, name in enumerate(list(self.routes.names)):
            cumulative = np.cumsum(self.counts[row]).tolist()
            if cumulative[-1]:
                family.add_metric([name], self._buckets(row, cumulative), float(self.sums[row]))
        return [family]

    def _buckets(self, row: int, cumulative: Sequence[int]) -> list[Any]:
        bounds = [*(repr(bound) for bound in self.spec.buckets), "+Inf"]
        buckets: list[Any] = []
        for column, (bound, count) in enumerate(zip(bounds, cumulative, strict=True)):
            cell = row * self.width + column
            trace = self.exemplar_traces[cell]
            value, time = float(self.exemplar_values[cell]), float(self.exemplar_times[cell])
            buckets.append((bound, count, Exemplar({"trace_id": trace}, value, time) if trace else None))
        return buckets
