"""The prefill reserve at start-up: measured on every rank, and room is made for it."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.elastic_kv import activation_probe, reserve_start, start_up, worker_side

from .test_commit import CHUNK, CHUNK_BYTES, GRANULE
from .test_sizes import GIB, PER_BLOCK, layers, make_config

MIB = 1 << 20
A_TOKEN = 64 << 10  # bytes of activations
MOST, DECODES = 2048, 16


class Executor:
    """Ranks whose steps take so many bytes a token, and whose processes have so many bytes."""

    def __init__(self, ranks=((A_TOKEN, GIB),), driver="host", available=16 * GIB):
        self.ranks, self.driver, self.available = ranks, driver, available
        self.limit: int | None = None
        self.attached: list[int] = []

    def collective_rpc(self, function, args, timeout, non_block):
        future = Future()
        future.set_result([self.answer(function, args, *rank) for rank in self.ranks])
        return future

    def answer(self, function, args, per_token, taken):
        if function is worker_side.probe:
            probe = {"driver": self.driver, "node": None, "granule": GRANULE, "max_mappings": None}
            return probe | {
                "available_bytes": self.available,
                "spare_bytes": 0,
                "total_bytes": 32 * GIB,
                "costs": None,
            }
        if function is activation_probe.measure_activations:
            plain, scored = args
            return {tokens: tokens * per_token for tokens in plain}, {tokens: tokens * per_token for tokens in scored}
        if function is activation_probe.data_bytes:
            return taken
        if function is activation_probe.limit_data:
            self.limit = args[0]
        if function is worker_side.attach:
            self.attached = list(args[0])
            return {"rank": 0, "error": None}
        return None


def start(executor, elastic, planned=8 * GIB, max_model_len=160):
    config = make_config(ElasticKVConfig(**elastic), max_model_len)
    config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs = MOST, DECODES
    config.cache_config.kv_cache_memory_bytes = None
    ranks = len(executor.ranks)
    made = start_up.make_elastic(config, executor, [layers() for _ in range(ranks)], [planned] * ranks)
    scheduler = generate_scheduler_kv_cache_config(made)
    start_up.commit_start(config, executor, made, scheduler)
    return scheduler


def test_the_cache_has_what_the_rest_leaves_of_a_budget():
    executor = Executor()
    scheduler = start(executor, {"memory_budget": "4GiB", "margin": "512MiB", "policy": "reclaim"})
    # The base is resident when the process is looked at.
    left = 4 * GIB - (GIB - CHUNK_BYTES) - MOST * A_TOKEN - 512 * MIB
    assert scheduler.num_blocks == scheduler.elastic_kv.start_blocks == left // CHUNK_BYTES * CHUNK
    assert executor.limit == 4 * GIB
    assert executor.attached == list(range(1, scheduler.num_blocks // CHUNK))
    assert scheduler.elastic_kv.reserve.nbytes == MOST * A_TOKEN


def test_without_a_capacity_the_cache_may_grow_to_its_budget():
    executor = Executor()
    scheduler = start(executor, {"memory_budget": "2GiB"}, planned=2 * GIB)
    assert scheduler.elastic_kv.capacity_blocks == 2 * GIB // CHUNK_BYTES * CHUNK


def test_the_rank_with_most_decides():
    executor = Executor(((A_TOKEN, GIB), (2 * A_TOKEN, GIB + 256 * MIB)))
    scheduler = start(executor, {"memory_budget": "4GiB", "margin": "512MiB"})
    left = 4 * GIB - (GIB + 256 * MIB - CHUNK_BYTES) - 2 * MOST * A_TOKEN - 512 * MIB
    assert scheduler.num_blocks == left // CHUNK_BYTES * CHUNK


def test_a_start_that_was_asked_for_is_taken_if_it_is_there():
    elastic = {"memory_budget": "4GiB", "start": "1GiB"}
    assert start(Executor(), elastic, planned=GIB).num_blocks * PER_BLOCK == GIB
    with pytest.raises(ValueError, match=r"memory_budget \(\d+ bytes\) is too small: the process has"):
        start(Executor(((A_TOKEN, 3 * GIB),)), elastic, planned=GIB)


def test_a_budget_that_leaves_nothing():
    executor = Executor(((A_TOKEN, 4 * GIB),))
    with pytest.raises(ValueError, match="which leaves room for 0 blocks"):
        start(executor, {"memory_budget": "4GiB"})
    assert executor.limit is None


def test_on_a_gpu_the_reserve_is_left_free_beside_the_start():
    """Upstream's own profile knows neither log probabilities of prompts nor what steps keep."""
    executor = Executor(driver="cuda", available=8 * GIB)
    scheduler = start(executor, {"policy": "reclaim", "margin": "512MiB"}, planned=8 * GIB)
    # The base was attached since, and the device offers as much as before.
    free = 8 * GIB + CHUNK_BYTES - 512 * MIB - MOST * A_TOKEN
    assert scheduler.num_blocks <= free // CHUNK_BYTES * CHUNK


def test_without_a_policy_that_lends_nothing_is_measured():
    executor = Executor()
    assert start(executor, {"start": "1GiB"}, planned=GIB).elastic_kv.reserve is None


def test_a_cache_too_small_for_the_longest_request_beside_the_reserve():
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_max_concurrency=0.5), model_config=SimpleNamespace(max_model_len=4096)
    )
    with pytest.raises(ValueError, match=r"Beside its prefill reserve .* has room for 0\.50 requests of"):
        reserve_start.check_own(vllm_config)
    vllm_config.cache_config.kv_cache_max_concurrency = 1.0
    reserve_start.check_own(vllm_config)


def test_drafts_count_with_the_tokens_that_decode():
    """With speculative decoding each request has its drafts in a step."""
    asked = []

    class Asked(Executor):
        def answer(self, function, args, *rank):
            if function is activation_probe.measure_activations:
                asked.append(args[0][0])
            return super().answer(function, args, *rank)

    vllm_config = SimpleNamespace(
        elastic_kv_config=ElasticKVConfig(policy="reclaim"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST, max_num_seqs=DECODES),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        cache_config=SimpleNamespace(block_size=16),
    )
    reserve = reserve_start.measure_reserve(vllm_config, Asked(), PER_BLOCK)
    assert asked == [4 * DECODES]
    assert reserve.kept == 4 * DECODES + 64
