"""Sizes at start-up: what `make_elastic` makes of a config, a model and what the devices offer."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.elastic_kv import start_up, worker_side
from vllm.v1.elastic_kv.start_up import make_elastic
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

GIB = 1 << 30
LAYERS = 4
BLOCK = 16 * 2 * 4 * 64 * 4  # bytes a layer: tokens, K and V, heads, head size, float32
PER_BLOCK = LAYERS * BLOCK


def make_config(elastic, max_model_len=16 * 10):
    """A configuration for sizing: that of a small model, which has no part in it."""
    config = VllmConfig(device_config=DeviceConfig("cpu"), cache_config=CacheConfig(block_size=16))
    config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
    config.model_config = SimpleNamespace(max_model_len=max_model_len, original_max_model_len=max_model_len)
    config.elastic_kv_config = elastic
    return config


class Executor:
    """Workers whose devices offer what the test says."""

    def __init__(self, **probes):
        ranks = probes.pop("ranks", 1)
        probe = {
            "driver": "host",
            "node": "here",
            "granule": 4096,
            "max_mappings": None,
            "available_bytes": 8 * GIB,
            "costs": None,
            "spare_bytes": 0,
            "total_bytes": 16 * GIB,
        }
        self.probes = [probe | probes for _ in range(ranks)]

    def collective_rpc(self, function, args, timeout, non_block):
        assert function is worker_side.probe
        assert timeout > 0
        assert non_block
        future = Future()
        future.set_result(self.probes)
        return future


def layers(spec=None):
    """Four layers of one kind, as a worker reports them."""
    spec = spec or FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
    return {f"layer.{number}": spec for number in range(LAYERS)}


def sizes(elastic, blocks=100, executor=None, ranks=1, **options):
    executor = executor or Executor(ranks=ranks)
    specs = [layers() for _ in executor.probes]
    config = make_config(ElasticKVConfig(**elastic), **options)
    made = make_elastic(config, executor, specs, [blocks * PER_BLOCK] * len(specs))
    assert len(made) == len(specs)
    layout = made[0].elastic_kv
    assert all(config.elastic_kv == layout for config in made)
    for config in made:
        assert config.num_blocks == layout.start_blocks
        assert config.num_blocks_of(config.kv_cache_tensors[0]) == layout.capacity_blocks
        assert config.kv_cache_tensors[0].size == layout.capacity_blocks * PER_BLOCK
        assert [group.layer_names for group in config.kv_cache_groups] == [list(specs[0])]
    return layout


def test_defaults():
    """Start is upstream's size, base one chunk, capacity what the device could hold."""
    layout = sizes({})
    assert (layout.base_blocks, layout.start_blocks, layout.chunk_blocks) == (1, 100, 1)
    assert layout.capacity_blocks == 8 * GIB // PER_BLOCK
    assert layout.driver == "host"


def test_ranks_on_one_host_share_its_memory():
    layout = sizes({}, ranks=2)
    assert layout.capacity_blocks == 4 * GIB // PER_BLOCK
    assert layout.ranks_sharing == 2
    own = Executor(ranks=2, node=None, driver="cuda", granule=2 << 20)
    layout = sizes({}, executor=own)
    assert layout.capacity_blocks == 8 * GIB // PER_BLOCK
    assert layout.ranks_sharing == 1


def test_given_sizes_are_kept_in_whole_chunks():
    """2 MiB granules and 32 KiB a layer make chunks of 64 blocks: base and start round up, capacity down."""
    executor = Executor(granule=2 << 20)
    layout = sizes({"base": 17 * PER_BLOCK, "capacity": 1000 * PER_BLOCK + 5}, blocks=100, executor=executor)
    assert layout.chunk_blocks == 64
    assert (layout.base_blocks, layout.start_blocks, layout.capacity_blocks) == (64, 128, 960)


def test_start_at_capacity():
    layout = sizes({"capacity": 100 * PER_BLOCK})
    assert layout.start_blocks == layout.capacity_blocks == 100


@pytest.mark.parametrize("blocks", range(100, 110))
def test_start_at_a_capacity_that_is_no_multiple_of_a_chunk(blocks):
    """Chunks of 8 blocks: what both have room for is rounded down."""
    executor = Executor(granule=8 * BLOCK)
    layout = sizes({"capacity": blocks * PER_BLOCK}, blocks=blocks, executor=executor)
    assert layout.chunk_blocks == 8
    assert layout.start_blocks == layout.capacity_blocks == blocks // 8 * 8


def test_chunks_are_larger_where_mappings_are_few():
    """Four segments of 1,000 chunks do not go into 1,000 pieces; 250 chunks of 4 blocks do."""
    layout = sizes({"capacity": 1000 * PER_BLOCK}, executor=Executor(max_mappings=1000))
    assert layout.chunk_blocks == 4


@pytest.mark.parametrize(
    ("elastic", "says"),
    [
        ({"capacity": "17GiB"}, f"capacity ({17 * GIB} bytes on each of 1 ranks"),
        ({"capacity": "100TiB"}, f"the device of rank 0 has ({16 * GIB} bytes)"),
        ({"capacity": 99 * PER_BLOCK}, f"is less than the cache starts with ({100 * PER_BLOCK} bytes)"),
        ({"capacity": 1}, f"is less than the cache starts with ({100 * PER_BLOCK} bytes)"),
        ({"base": 101 * PER_BLOCK}, "base"),
    ],
)
def test_sizes_that_cannot_be(elastic, says):
    with pytest.raises(ValueError, match="elastic_kv_config") as raised:
        sizes(elastic)
    assert says in str(raised.value)


def test_two_ranks_cannot_both_have_most_of_a_host():
    with pytest.raises(ValueError, match="on each of 2 ranks"):
        sizes({"capacity": "9GiB"}, ranks=2)


def test_a_start_that_is_smaller_than_the_longest_request():
    """vLLM #20256: what is idle needs no cache. The capacity has to have room, or upstream refuses."""
    layout = sizes({"capacity": 20 * PER_BLOCK}, blocks=1)
    assert (layout.base_blocks, layout.start_blocks, layout.capacity_blocks) == (1, 1, 20)
    with pytest.raises(ValueError, match="max seq len"):
        sizes({"capacity": 5 * PER_BLOCK}, blocks=1)


def test_a_capacity_without_one_chunk():
    with pytest.raises(ValueError, match="less than one chunk of 64 blocks"):
        sizes({"capacity": 50 * PER_BLOCK}, blocks=20, executor=Executor(granule=2 << 20))


def test_state_space_layers_are_refused_by_name():
    spec = MambaSpec(block_size=16, shapes=((4, 64),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match=r"state-space \(Mamba\) layers"):
        make_elastic(make_config(ElasticKVConfig()), Executor(), [layers(spec)], [1 << 20])


def test_cross_attention_is_refused_by_name():
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"encoder-decoder models \(cross-attention layers\)"):
        make_elastic(make_config(ElasticKVConfig()), Executor(), [layers(spec)], [64 << 20])


def test_a_cache_on_the_host_is_refused_by_name(monkeypatch):
    def on_the_host(*arguments):
        configs = get_kv_cache_configs(*arguments)
        configs[0].kv_cache_groups[0].host_resident = True
        return configs

    monkeypatch.setattr(start_up, "get_kv_cache_configs", on_the_host)
    with pytest.raises(ValueError, match="does not support a KV cache that is kept on the host"):
        sizes({})


def test_a_model_without_a_cache_is_refused_by_name():
    """Such as one that only encodes."""
    with pytest.raises(ValueError, match="needs a model that has a KV cache; this one has none"):
        make_elastic(make_config(ElasticKVConfig()), Executor(), [{}], [0])
