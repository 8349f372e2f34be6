"""Histograms that take a whole batch at once, with an exemplar per bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Exemplar, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from telemetry.labels import Labels
from telemetry.names import Metric as Spec


class BatchHistogram(Collector):
    """A Prometheus histogram by route, updated with arrays.

    `counts` is int64 [routes, buckets + 1] (the last one is +Inf). Written by the event loop,
    read by a scrape: a scrape may see half of a batch, never a wrong total at rest.
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

    def observe(
        self, route: NDArray[np.intp], values: NDArray[np.float64], traces: NDArray[np.object_], time: float
    ) -> None:
        """Count `values` [n] under their `route` indices [n]; NaN is absent and not counted.

        The last value that falls into a bucket becomes its exemplar, with its trace id.
        """
        known = ~np.isnan(values)
        if not known.all():
            route, values, traces = route[known], values[known], traces[known]
        cell = route * self.width + np.searchsorted(self.bounds, values)
        flat = self.counts.reshape(-1)
        flat += np.bincount(cell, minlength=flat.size)
        self.sums += np.bincount(route, values, minlength=self.sums.size)
        self.exemplar_values[cell] = values
        self.exemplar_times[cell] = time
        self.exemplar_traces[cell] = traces

    def describe(self) -> Iterable[Metric]:
        """Name the family without reading it."""
        return [HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)]

    def collect(self) -> Iterable[Metric]:
        """Yield the family, routes without observations left out."""
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
