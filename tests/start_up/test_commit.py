"""What a CUDA engine starts with: the base while it warms up, then what is really left."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.elastic_kv import start_up, worker_side
from vllm.v1.elastic_kv.call_costs import PUBLISHED, best_run_bytes
from vllm.v1.elastic_kv.torch_memory import spare_bytes, spare_of

from .test_sizes import GIB, LAYERS, PER_BLOCK, layers, make_config

MIB = 1 << 20
GRANULE = 2 * MIB
CHUNK = GRANULE // (PER_BLOCK // LAYERS)  # blocks
CHUNK_BYTES = GRANULE * LAYERS


class Executor:
    """Ranks with a GPU each. `available` can be changed between calls."""

    def __init__(self, available):
        self.available = available
        self.attached = []
        self.attaches = 0
        self.error = None
        self.costs = None
        self.spare = 0

    def collective_rpc(self, function, args, timeout, non_block):
        future = Future()
        if function is worker_side.probe:
            probe = {"driver": "cuda", "node": None, "granule": GRANULE, "max_mappings": None, "total_bytes": 16 * GIB}
            probe |= {"costs": self.costs, "spare_bytes": self.spare}
            future.set_result([probe | {"available_bytes": nbytes} for nbytes in self.available])
        else:
            assert function is worker_side.attach
            self.attached += args[0]
            self.attaches += 1
            future.set_result([{"rank": rank, "error": self.error} for rank in range(len(self.available))])
        return future


def start(executor, elastic, planned, taken=(0,), explicit=None, spare=0):
    """Go through a start in which warming up takes so many bytes of each rank, of which torch has some to spare.

    Returns the scheduler's config.
    """
    config = make_config(ElasticKVConfig(**elastic))
    config.cache_config.kv_cache_memory_bytes = explicit
    ranks = len(executor.available)
    made = start_up.make_elastic(config, executor, [layers() for _ in range(ranks)], [planned] * ranks)
    scheduler = generate_scheduler_kv_cache_config(made)
    assert made[0].elastic_kv.first_blocks == made[0].elastic_kv.base_blocks
    first = made[0].elastic_kv.first_blocks * PER_BLOCK
    executor.available = [
        nbytes - first - used for nbytes, used in zip(executor.available, list(taken) * ranks, strict=False)
    ]
    executor.spare = spare
    start_up.commit_start(config, executor, made, scheduler)
    assert scheduler.num_blocks == scheduler.elastic_kv.start_blocks == config.cache_config.num_gpu_blocks
    chunks = range(scheduler.elastic_kv.base_blocks // CHUNK, scheduler.num_blocks // CHUNK)
    assert executor.attached == list(chunks)
    return scheduler


def test_what_warming_up_took_and_the_margin_are_left_free():
    scheduler = start(Executor([8 * GIB]), {"margin": "512MiB"}, planned=4 * GIB, taken=[GIB])
    assert scheduler.num_blocks * PER_BLOCK == 4 * GIB - GIB - 512 * MIB


def test_what_torch_keeps_for_the_next_step_is_not_taken():
    """Upstream has left room for it before: the sampler's buffers are in its measured peak of a step."""
    scheduler = start(Executor([8 * GIB]), {"margin": "512MiB"}, planned=4 * GIB, taken=[GIB], spare=GIB // 4)
    assert scheduler.num_blocks * PER_BLOCK == 4 * GIB - GIB * 3 // 4 - 512 * MIB


def test_but_it_is_not_there_for_the_cache_either():
    scheduler = start(Executor([4 * GIB]), {"margin": "512MiB"}, planned=4 * GIB, taken=[GIB], spare=GIB)
    assert scheduler.num_blocks * PER_BLOCK == 3 * GIB - 512 * MIB


def test_spare_memory_is_what_no_graph_needs():
    def segment(device, total, active, pool=(0, 0)):
        return {"device": device, "total_size": total, "active_size": active, "segment_pool_id": pool}

    assert spare_of([segment(0, 8, 3), segment(0, 4, 0), segment(1, 16, 0), segment(0, 32, 0, (0, 1))], 0) == 9
    assert spare_bytes(torch.device("cpu")) == 0


def test_the_rank_with_least_decides():
    scheduler = start(Executor([8 * GIB, 8 * GIB]), {"margin": "512MiB"}, planned=4 * GIB, taken=[0, GIB])
    assert scheduler.num_blocks * PER_BLOCK == 4 * GIB - GIB - 512 * MIB


def test_no_more_than_the_device_has_left():
    scheduler = start(Executor([4 * GIB]), {"margin": "512MiB"}, planned=4 * GIB)
    assert scheduler.num_blocks * PER_BLOCK == 4 * GIB - 512 * MIB


def test_a_start_that_was_asked_for_stays():
    scheduler = start(Executor([8 * GIB]), {"start": "2GiB"}, planned=2 * GIB, taken=[GIB], explicit=2 * GIB)
    assert scheduler.num_blocks * PER_BLOCK == 2 * GIB


def test_too_little_is_left_for_the_base():
    with pytest.raises(ValueError, match=r"Too little memory is left .* base \(512 blocks\) and margin"):
        start(Executor([2 * GIB]), {"base": "64MiB"}, planned=GIB, taken=[GIB])


def test_a_rank_that_cannot_attach_is_named():
    executor = Executor([8 * GIB])
    executor.error = "cuMemCreate of 4 bytes on cuda:0 failed: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(ValueError, match=r"cannot begin with .* blocks: rank 0: cuMemCreate"):
        start(executor, {}, planned=GIB)


@pytest.mark.parametrize(
    ("elastic", "run"),
    [
        ({}, LAYERS * 256 * MIB),
        ({"margin": "128MiB"}, LAYERS * 128 * MIB),
        ({"run": "64MiB"}, 64 * MIB),
        ({"run": "1MiB"}, CHUNK_BYTES),
    ],
    ids=str,
)
def test_the_length_of_a_run(elastic, run):
    """The cost model would have more than what the margin can cut, handle by handle; a chunk is the least."""
    scheduler = start(Executor([8 * GIB]), elastic, planned=2 * GIB)
    assert scheduler.elastic_kv.run_blocks * PER_BLOCK == run


def test_the_card_s_own_costs_decide():
    executor = Executor([8 * GIB])
    executor.costs = replace(PUBLISHED, create=1.0, map=1.0, unmap=1.0, source="measured")
    best = best_run_bytes(executor.costs, LAYERS, 4 * GIB, 8 * GIB)
    assert best < LAYERS * 256 * MIB
    scheduler = start(executor, {}, planned=2 * GIB)
    assert 0 <= best - scheduler.elastic_kv.run_blocks * PER_BLOCK < CHUNK_BYTES


def test_each_attach_is_of_one_run():
    """So it is three calls of the driver for each segment, however much is attached at the start."""
    executor = Executor([8 * GIB])
    scheduler = start(executor, {"run": "128MiB"}, planned=2 * GIB)
    assert executor.attaches == -(-len(executor.attached) * CHUNK_BYTES // (128 * MIB)) > 1
    assert scheduler.num_blocks * PER_BLOCK > GIB


def test_the_default_keeps_nothing():
    assert start(Executor([8 * GIB]), {}, planned=2 * GIB).elastic_kv.keep_bytes == 0
    assert start(Executor([8 * GIB]), {"keep": "1GiB"}, planned=2 * GIB).elastic_kv.keep_bytes == GIB
