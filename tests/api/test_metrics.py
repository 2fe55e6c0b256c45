"""What Prometheus is shown, from what the engine cores tell."""

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.elastic_kv.metrics import ElasticKVProm
from vllm.v1.elastic_kv.stats import ElasticKVStats


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prom(registry: CollectorRegistry, policy: str) -> ElasticKVProm:
    config = SimpleNamespace(elastic_kv_config=ElasticKVConfig(policy=policy))
    kinds = [partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)]
    return ElasticKVProm(config, ["engine"], {0: ["0"], 1: ["1"]}, *kinds)


def stats(**reserve: int) -> ElasticKVStats:
    return ElasticKVStats(
        resident_blocks=6,
        capacity_blocks=16,
        base_blocks=2,
        block_bytes=100,
        reported_bytes=600,
        size_tokens=None,
        max_concurrency=None,
        reserve=reserve or None,
    )


@pytest.mark.parametrize("name", ["reserve_returns", "smaller_steps"])
def test_what_happened_to_the_reserve_is_counted_for_each_engine(registry, name):
    metrics = prom(registry, "adaptive")
    for engine, since_the_last_time in [(0, 1), (0, 2), (1, 2), (0, 0)]:
        metrics.observe(stats(**{name: since_the_last_time}), engine)
    values = [registry.get_sample_value(f"vllm:elastic_kv_{name}_total", {"engine": engine}) for engine in "01"]
    assert values == [3, 2]


def test_sizes_are_those_of_the_last_report(registry):
    metrics = prom(registry, "reclaim")
    metrics.observe(stats(borrowed_blocks=8, token_budget=100, reserve_bytes=5000), 0)
    metrics.observe(stats(borrowed_blocks=4, token_budget=200, reserve_bytes=5000), 0)
    for name, value in {
        "borrowed_blocks": 4,
        "token_budget": 200,
        "reserve_bytes": 5000,
        "resident_bytes": 600,
    }.items():
        assert registry.get_sample_value(f"vllm:elastic_kv_{name}", {"engine": "0"}) == value


@pytest.mark.parametrize("policy", ["static", "on-demand"])
def test_without_a_reserve_nothing_is_told_of_one(registry, policy):
    prom(registry, policy).observe(stats(), 0)
    names = {metric.name for metric in registry.collect()}
    assert "vllm:elastic_kv_resident_blocks" in names
    assert not {name for name in names if "reserve" in name or "smaller_steps" in name}
