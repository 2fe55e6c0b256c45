"""What a CUDA engine starts with: the base while it warms up, then what is really left."""

from concurrent.futures import Future

import pytest
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.elastic_kv import start_up, worker_side

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
        self.error = None

    def collective_rpc(self, function, args, timeout, non_block):
        future = Future()
        if function is worker_side.probe:
            probe = {"driver": "cuda", "node": None, "granule": GRANULE, "max_mappings": None, "total_bytes": 16 * GIB}
            future.set_result([probe | {"available_bytes": nbytes} for nbytes in self.available])
        else:
            assert function is worker_side.attach
            self.attached += args[0]
            future.set_result([{"rank": rank, "error": self.error} for rank in range(len(self.available))])
        return future


def start(executor, elastic, planned, taken=(0,), explicit=None):
    """Go through a start in which warming up takes so many bytes of each rank. Returns the scheduler's config."""
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
    start_up.commit_start(config, executor, made, scheduler)
    assert scheduler.num_blocks == scheduler.elastic_kv.start_blocks == config.cache_config.num_gpu_blocks
    chunks = range(scheduler.elastic_kv.base_blocks // CHUNK, scheduler.num_blocks // CHUNK)
    assert executor.attached == list(chunks)
    return scheduler


def test_what_warming_up_took_and_the_margin_are_left_free():
    scheduler = start(Executor([8 * GIB]), {"margin": "512MiB"}, planned=4 * GIB, taken=[GIB])
    assert scheduler.num_blocks * PER_BLOCK == 4 * GIB - GIB - 512 * MIB


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
    [({}, 256 * MIB), ({"margin": "1GiB"}, GIB), ({"run": "64MiB"}, 64 * MIB), ({"run": "1MiB"}, CHUNK_BYTES)],
    ids=str,
)
def test_the_length_of_a_run(elastic, run):
    """The cost model would have more than the margin; a chunk is the least."""
    scheduler = start(Executor([8 * GIB]), elastic, planned=2 * GIB)
    assert scheduler.elastic_kv.run_blocks * PER_BLOCK == run


def test_the_default_keeps_nothing():
    assert start(Executor([8 * GIB]), {}, planned=2 * GIB).elastic_kv.keep_bytes == 0
    assert start(Executor([8 * GIB]), {"keep": "1GiB"}, planned=2 * GIB).elastic_kv.keep_bytes == GIB
