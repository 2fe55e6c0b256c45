# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of an elastic cache; all names start with `vllm:elastic_kv_`."""

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.elastic_kv.stats import ElasticKVStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class ElasticKVProm:
    """Shows `ElasticKVStats` in Prometheus. Registers nothing where elastic is off."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        gauge_cls: type[Gauge],
        counter_cls: type[Counter],
        histogram_cls: type[Histogram],
    ) -> None:
        self._labelvalues = per_engine_labelvalues
        if vllm_config.elastic_kv_config is None:
            return
        self._gauges = {
            name: gauge_cls(
                f"vllm:elastic_kv_{name}", documentation, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, documentation in {
                "resident_blocks": "KV cache blocks that have memory behind them.",
                "capacity_blocks": "KV cache blocks that the cache can grow to.",
                "base_blocks": "KV cache blocks that always stay resident.",
                "resident_bytes": "Bytes of the resident KV cache blocks, on each rank.",
                "reported_bytes": "Bytes of the KV cache on a rank, as the system or the driver reports them.",
            }.items()
        }
        self._resizes = counter_cls(
            "vllm:elastic_kv_resizes",
            "Resizes of the KV cache that ended, by direction and outcome.",
            labelnames=[*labelnames, "direction", "outcome"],
        )
        self._evicted = counter_cls(
            "vllm:elastic_kv_evicted_blocks", "Cached KV cache blocks that a shrink evicted.", labelnames=labelnames
        )
        self._duration = histogram_cls(
            "vllm:elastic_kv_resize_seconds",
            "Time from the request for a resize to its end.",
            labelnames=labelnames,
            buckets=_SECONDS,
        )
        self._pause = histogram_cls(
            "vllm:elastic_kv_resize_pause_seconds",
            "Time that a resize kept the engine from computing.",
            labelnames=labelnames,
            buckets=_SECONDS,
        )

    def observe(self, stats: ElasticKVStats, engine_idx: int = 0) -> None:
        labels = self._labelvalues[engine_idx]
        values = {
            "resident_blocks": stats.resident_blocks,
            "capacity_blocks": stats.capacity_blocks,
            "base_blocks": stats.base_blocks,
            "resident_bytes": stats.resident_blocks * stats.block_bytes,
            "reported_bytes": stats.reported_bytes,
        }
        for name, value in values.items():
            self._gauges[name].labels(*labels).set(value)
        for resize in stats.resizes:
            self._resizes.labels(*labels, resize["direction"], resize["outcome"]).inc()
            self._evicted.labels(*labels).inc(resize["evicted"])
            self._duration.labels(*labels).observe(resize["duration_ms"] / 1000)
            self._pause.labels(*labels).observe(resize["pause_ms"] / 1000)
