"""Segments and chunks agree with the views that vLLM's attention backends get."""

from collections import defaultdict
from math import prod
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.elastic_kv.layout import Segment, chunk_blocks_of, segments_of
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 6
HEADS, HEAD_SIZE, BLOCK_SIZE = 3, 8, 4


def full(head_size=HEAD_SIZE, **changes):
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=head_size, dtype=torch.float16, **changes
    )


def window(**changes):
    return SlidingWindowSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.float16,
        sliding_window=16,
        **changes,
    )


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


def mixed():
    """One group whose layers have pages of two sizes."""
    specs = {**dict.fromkeys(names("small", 2), full()), **dict.fromkeys(names("large", 3), full(head_size=24))}
    return [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs))]


MODELS = {
    "one layer": lambda: [KVCacheGroupSpec(names("full", 1), full())],
    "five layers": lambda: [KVCacheGroupSpec(names("full", 5), full())],
    "two groups": lambda: [KVCacheGroupSpec(names("full", 3), full()), KVCacheGroupSpec(names("window", 3), window())],
    "uneven groups": lambda: [
        KVCacheGroupSpec(names("full", 2), full()),
        KVCacheGroupSpec(names("window", 3), window()),
        KVCacheGroupSpec(names("more", 1), window()),
    ],
    "mixed pages": mixed,
    "padded pages": lambda: [KVCacheGroupSpec(names("full", 3), full(page_size_padded=full().page_size_bytes + 64))],
}


def config_of(groups, layout: str, blocks: int = BLOCKS):
    """What vLLM lays out for `blocks` blocks."""
    vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    one = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 20)
    block_bytes = one.kv_cache_tensors[0].size // one.num_blocks
    config = get_kv_cache_config_from_groups(vllm_config, groups, block_bytes * blocks)
    assert config.num_blocks == blocks
    return config


def spec_of(config, layer: str):
    (group,) = [group for group in config.kv_cache_groups if layer in group.layer_names]
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def bytes_of_blocks(config, layout: str) -> dict[int, set[int]]:
    """The bytes of the buffer that each block's views reach, over all layers."""
    size = config.kv_cache_tensors[0].size
    raw = torch.zeros(size, dtype=torch.int8)
    found: dict[int, set[int]] = defaultdict(set)
    for tensor in config.kv_cache_tensors:
        spec = spec_of(config, tensor.layers[0])
        for view in create_kv_cache_views(raw, spec, config.num_blocks, KVCacheLayout[layout], tensor):
            for block in range(config.num_blocks):
                raw.zero_()
                view[block].view(torch.int8).fill_(1)
                reached = raw.nonzero().flatten().tolist()
                assert len(reached) == prod(view[block].shape) * view.element_size()
                found[block].update(reached)
    return found


CASES = [
    (model, layout)
    for model in MODELS
    for layout in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    # vLLM has no such caches: pages of several sizes, or with padding, have to be whole.
    if not (model in ("mixed pages", "padded pages") and layout in ("LHBNC", "BHLNC"))
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_segments_agree_with_the_views(model, layout):
    config = config_of(MODELS[model](), layout)
    segments = segments_of(config.kv_cache_tensors, BLOCKS)
    owned = {
        block: {
            byte
            for segment in segments
            for byte in range(segment.offset + block * segment.stride, segment.offset + (block + 1) * segment.stride)
        }
        for block in range(BLOCKS)
    }
    # Segments tile the buffer: every byte belongs to exactly one block.
    assert sum(map(len, owned.values())) == config.kv_cache_tensors[0].size
    assert set().union(*owned.values()) == set(range(config.kv_cache_tensors[0].size))
    for block, reached in bytes_of_blocks(config, layout).items():
        assert reached <= owned[block]


@pytest.mark.parametrize(
    ("model", "layout", "count"),
    [
        ("five layers", "LBHNC", 5),
        ("five layers", "LHBNC", 5 * HEADS),
        ("five layers", "BLHNC", 1),
        ("two groups", "LBNHC", 3),
        ("uneven groups", "LBHNC", 3),
        ("uneven groups", "BLNHC", 1),
        ("mixed pages", "LBHNC", 5),
        ("one layer", "LBHNC", 1),
        ("one layer", "LHBNC", HEADS),
    ],
)
def test_number_of_segments(model, layout, count):
    config = config_of(MODELS[model](), layout)
    assert len(segments_of(config.kv_cache_tensors, BLOCKS)) == count


@pytest.mark.parametrize("model", MODELS)
def test_segments_scale_with_the_capacity(model):
    """A block keeps its stride; only where the segments begin depends on the capacity."""
    small, large = (
        segments_of(config_of(MODELS[model](), "LBHNC", blocks).kv_cache_tensors, blocks) for blocks in (4, 40)
    )
    assert [segment.stride for segment in small] == [segment.stride for segment in large]
    assert [10 * segment.offset for segment in small] == [segment.offset for segment in large]


def placement(size, layers, layer_stride, block_stride, offset=0):
    return SimpleNamespace(
        size=size, layers=names("x", layers), layer_stride=layer_stride, block_stride=block_stride, offset=offset
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([placement(1000, 2, 450, 100)], "no multiple"),
        ([placement(1000, 2, 400, 100)], "end at byte 800"),
        ([placement(1200, 2, 400, 100, offset=400)], "should begin at byte 0"),
        ([placement(1200, 1, 400, 100), placement(1200, 1, 400, 100, offset=800)], "should begin at byte 400"),
    ],
)
def test_layouts_that_cannot_be_mapped_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        segments_of(tensors, 4)


@pytest.mark.parametrize(
    ("strides", "granule", "blocks"),
    [
        ([4096], 4096, 1),
        ([8192], 4096, 1),
        ([1024], 4096, 4),
        ([1536], 4096, 8),
        ([3 << 20], 2 << 20, 2),
        ([48 << 10] * 30, 2 << 20, 128),
        ([1024, 1536], 4096, 8),
        ([4096, 1], 4096, 4096),
        ([2 << 20, 3 << 20, 5 << 19], 2 << 20, 4),
    ],
)
def test_a_chunk_is_the_smallest_run_that_fills_granules(strides, granule, blocks):
    assert chunk_blocks_of(strides, granule, 10**6, None) == blocks
    assert all(stride * blocks % granule == 0 for stride in strides)
    assert all(any(stride * fewer % granule for stride in strides) for fewer in range(1, blocks))


@pytest.mark.parametrize(("capacity", "limit"), [(1, 10), (100, 30), (100, 3), (101, 299), (1000, 1), (7, 50)])
def test_chunks_stay_within_the_pieces_that_a_driver_allows(capacity, limit):
    strides = [4096] * 3
    blocks = chunk_blocks_of(strides, 4096, capacity, limit)
    chunks = -(-capacity // blocks)
    assert chunks * len(strides) <= limit or chunks == 1
    assert blocks == 1 or -(-capacity // (blocks - 1)) * len(strides) > limit


def test_segments_are_values():
    assert Segment(0, 4) == Segment(0, 4)
    assert len({Segment(0, 4), Segment(0, 4)}) == 1
