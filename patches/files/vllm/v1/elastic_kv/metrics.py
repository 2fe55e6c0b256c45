# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of an elastic cache; all names start with `vllm:elastic_kv_`."""

import os
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.elastic_kv.stats import ElasticKVStats

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

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
        self._info: tuple[Gauge, CacheConfig] | None = None
        if vllm_config.elastic_kv_config is None:
            return
        keeps_reserve = vllm_config.elastic_kv_config.keeps_reserve
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
        self._costs = {
            "evicted": counter_cls(
                "vllm:elastic_kv_evicted_blocks", "Cached KV cache blocks that a shrink evicted.", labelnames=labelnames
            ),
            "moved": counter_cls(
                "vllm:elastic_kv_moved_blocks", "KV cache blocks in use that a shrink moved.", labelnames=labelnames
            ),
            "preempted": counter_cls(
                "vllm:elastic_kv_preempted_requests", "Requests that a shrink preempted.", labelnames=labelnames
            ),
        }
        self._reserve = (
            {
                name: gauge_cls(
                    f"vllm:elastic_kv_{name}", documentation, labelnames=labelnames, multiprocess_mode="mostrecent"
                )
                for name, documentation in {
                    "reserve_bytes": "Bytes that are kept for the activations of the largest step, on each rank.",
                    "borrowed_blocks": "KV cache blocks that the cache holds of the prefill reserve.",
                    "token_budget": "Tokens that a step may have now.",
                }.items()
            }
            if keeps_reserve
            else {}
        )
        self._reserve_counts = (
            {
                name: counter_cls(f"vllm:elastic_kv_{name}", documentation, labelnames=labelnames)
                for name, documentation in {
                    "reserve_returns": "How often the prefill reserve was taken back.",
                    "smaller_steps": "Steps that were smaller because the reserve was lent.",
                }.items()
            }
            if keeps_reserve
            else {}
        )
        self._faults = counter_cls(
            "vllm:elastic_kv_soft_page_faults",
            "Block ids without memory that requests named; these requests failed.",
            labelnames=labelnames,
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

    def follow(self, info: Gauge, cache_config: "CacheConfig") -> None:
        """Keep upstream's `vllm:cache_config_info` true after a resize.

        Args:
            info: The gauge, which has the fields of `cache_config` as labels.
            cache_config: The front end's copy, which is updated as well.

        """
        self._info = info, cache_config

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
        for name, gauge in self._reserve.items():
            gauge.labels(*labels).set((stats.reserve or {}).get(name, 0))
        for name, counter in self._reserve_counts.items():
            counter.labels(*labels).inc((stats.reserve or {}).get(name, 0))
        self._faults.labels(*labels).inc(stats.soft_page_faults)
        for resize in stats.resizes:
            self._resizes.labels(*labels, resize["direction"], resize["outcome"]).inc()
            for field, counter in self._costs.items():
                counter.labels(*labels).inc(resize[field])
            self._duration.labels(*labels).observe(resize["duration_ms"] / 1000)
            self._pause.labels(*labels).observe(resize["pause_ms"] / 1000)
        self._update_info(stats, engine_idx)

    def _update_info(self, stats: ElasticKVStats, engine_idx: int) -> None:
        if self._info is None:
            return
        info, cache_config = self._info
        sizes = {
            "num_gpu_blocks": stats.resident_blocks,
            "kv_cache_size_tokens": stats.size_tokens,
            "kv_cache_max_concurrency": stats.max_concurrency,
        }
        if all(getattr(cache_config, name) == value for name, value in sizes.items()):
            return
        old = cache_config.metrics_info() | {"engine": str(engine_idx)}
        for name, value in sizes.items():
            setattr(cache_config, name, value)
        info.labels(**old).set(0)
        # prometheus_client cannot take labels away where several processes share a metric, nor can Ray.
        if type(info) is Gauge and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            info.remove(*old.values())
        info.labels(**cache_config.metrics_info(), engine=str(engine_idx)).set(1)
