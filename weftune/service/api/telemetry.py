"""Metrics for Prometheus: counts and durations of this process's requests, and numbers of jobs from the
database."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from weftune.jobs.store.status import State
from weftune.service.store.database import StoreUnavailable
from weftune.service.store.records import TrainingStore
from weftune.service.store.requests import RequestStore

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
UNKNOWN = "unknown"
"""Label for requests that match no route. Their paths are not used as labels, since clients could send any
number of them."""


class Telemetry:
    def __init__(self, requests: RequestStore, training: TrainingStore) -> None:
        self._registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._count = Counter(
            "weftune_http_requests", "Requests that were answered.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "weftune_http_request_seconds",
            "Seconds until the answer was sent.",
            ("method", "route"),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Stores(requests, training))

    def record_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Add an answered request to the metrics."""
        route = getattr(scope.get("route"), "path", UNKNOWN)
        self._count.labels(scope["method"], route, status).inc()
        self._seconds.labels(scope["method"], route).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Stores(Collector):
    """A collector that reads numbers from the stores at every scrape. The collector yields nothing while the
    stores are locked."""

    def __init__(self, requests: RequestStore, training: TrainingStore) -> None:
        self._requests, self._training = requests, training

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        with suppress(StoreUnavailable):
            yield from self._collect_metrics()

    def _collect_metrics(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("weftune_jobs", "Jobs by state.", labels=["state"])
        counts = dict.fromkeys(State, 0)
        for row in self._training.unfinished_jobs():
            counts[row.state] += 1
        for state, count in counts.items():
            if not state.has_ended:
                jobs.add_metric([str(state)], count)
        jobs.add_metric(["validating_files"], len(self._requests.unprepared_submissions()))
        yield jobs
        lease = self._training.lease()
        seconds: Any = 0.0 if lease is None or not lease.holder else lease.expires_at - time.time()
        yield GaugeMetricFamily(
            "weftune_training_lease_seconds", "Seconds until the lease of training expires.", seconds
        )
        windows = self._training.last_windows(1)
        if windows and (memory := windows[0].values.get("memory")):
            yield _memory_metric(memory)
        if windows:
            age = time.time() - windows[0].at
            yield GaugeMetricFamily("weftune_last_window_age_seconds", "Seconds since the last window.", age)


def _memory_metric(memory: Mapping[str, Any]) -> Metric:
    """Return a Prometheus metric of device bytes, labelled by purpose, from the memory values that the
    training process has recorded with the last window (a few global batches of every job)."""
    metric = GaugeMetricFamily(
        "weftune_memory_bytes", "Device bytes in the last window by purpose.", labels=["part"]
    )
    metric.add_metric(["budget"], memory["budget_bytes"])
    metric.add_metric(["base"], memory["base_bytes"])
    metric.add_metric(["answers"], memory.get("answer_bytes", 0))
    metric.add_metric(["jobs"], sum(memory["jobs"].values()))
    return metric
