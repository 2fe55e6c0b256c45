"""A block pool with an arena behind it, as an engine has, and no engine."""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.layout import ElasticKVLayout, Segment
from vllm.v1.elastic_kv.moves import copy_blocks
from vllm.v1.request import Request

PAGE = 4096
TOKENS = 4  # in a block


def make_layout(chunk_blocks=2, base=1, start=3, capacity=8) -> ElasticKVLayout:
    """Sizes in chunks."""
    return ElasticKVLayout(
        base_blocks=base * chunk_blocks,
        start_blocks=start * chunk_blocks,
        capacity_blocks=capacity * chunk_blocks,
        chunk_blocks=chunk_blocks,
        driver="host",
    )


def make_pool(layout: ElasticKVLayout | None = None, **options) -> ElasticBlockPool:
    layout = layout or make_layout()
    options = {"enable_caching": True, "hash_block_size": TOKENS} | options
    return ElasticBlockPool(layout, layout.start_blocks, **options)


def make_arena(
    layout: ElasticKVLayout, driver=None, stride: int = PAGE, segments: int = 3, run_chunks: int = 1
) -> KVArena:
    """An arena with the chunks attached that the pool begins with. Where handles cannot be cut, each chunk has its own
    unless `run_chunks` says otherwise, so that a test can say which call fails."""
    size = stride * layout.capacity_blocks
    driver = driver or HostPageDriver()
    arena = KVArena(
        driver,
        [Segment(number * size, stride) for number in range(segments)],
        layout.chunk_blocks,
        layout.capacity_chunks,
        run_chunks=sys.maxsize if driver.divisible else run_chunks,
    )
    arena.attach(range(layout.start_blocks // layout.chunk_blocks))
    return arena


def make_request(name: str, tokens: list[int]) -> Request:
    """A request whose block hashes are computed as the engine does."""
    if not make_request.__dict__.get("ready"):
        init_none_hash(sha256)
        make_request.ready = True
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(TOKENS, sha256),
    )


def prompt(seed: int, blocks: int) -> list[int]:
    """Tokens of `blocks` full blocks, the same for the same seed."""
    return [seed * 1000 + place for place in range(blocks * TOKENS)]


def cache(pool: ElasticBlockPool, seed: int, blocks: list) -> Request:
    """Make `blocks` a cached prefix."""
    request = make_request(f"request {seed}", prompt(seed, len(blocks)))
    pool.cache_full_blocks(request, blocks, 0, len(blocks), TOKENS, 0)
    return request


def cached_then_freed(pool: ElasticBlockPool, seed: int, count: int) -> list[int]:
    """Use `count` blocks for a prefix and free them, as a finished request does. Returns their ids."""
    blocks = pool.get_new_blocks(count)
    cache(pool, seed, blocks)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]


def check(pool: ElasticBlockPool, arena: KVArena | None = None) -> None:
    """The invariants of an elastic cache."""
    pool.check()
    counts = pool.counts()
    layout = pool.layout
    resident = {block for chunk in pool.resident_chunks for block in pool._ids(chunk)}
    withdrawn = {block for chunk in pool._leaving for block in pool._ids(chunk) if not pool.blocks[block].ref_cnt}
    assert counts.used + counts.cached + counts.free == pool.num_gpu_blocks - 1
    assert min(counts.used, counts.cached, counts.free) >= 0
    assert len(resident - withdrawn) == pool.num_gpu_blocks <= layout.capacity_blocks
    assert layout.base_blocks <= pool.num_gpu_blocks
    assert sorted(pool.missing_chunks() + list(pool.resident_chunks)) == list(range(layout.capacity_chunks))
    assert 0.0 <= pool.get_usage() <= 1.0
    assert 0 in resident
    assert pool.null_block.block_id == 0
    queued = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(set(queued)) == len(queued)
    assert 0 not in queued
    if arena is not None:
        assert arena.attached == pool.resident_chunks
        assert arena.reported_bytes() == arena.resident_bytes
        assert arena.settle(60.0)
        assert arena.num_handles <= len(arena.attached) * len(arena.segments)


def grow(pool: ElasticBlockPool, arena: KVArena, chunks: list[int]) -> None:
    arena.attach(chunks)
    pool.grow(chunks)


def shrink(pool: ElasticBlockPool, arena: KVArena, num_chunks: int):
    """A shrink with its moves, in one go. Returns the plan."""
    plan = pool.plan_shrink(num_chunks)
    evicted = pool.withdraw(plan.chunks)
    assert evicted == plan.evicted
    move(pool, arena, plan.moved)
    arena.detach(plan.chunks)
    pool.retire(plan.chunks)
    return plan


def move(pool: ElasticBlockPool, arena: KVArena, at_most: int) -> None:
    """Move live blocks out of leaving chunks, with what is in them."""
    moves = pool.next_moves(at_most)
    if moves:
        copy_blocks(arena, *zip(*moves, strict=True))
        pool.move(moves)


def write(arena: KVArena, block: int, value: int) -> None:
    """Fill a block in every segment, as a kernel would."""
    whole = arena.tensor()
    for segment in arena.segments:
        begin = segment.offset + block * segment.stride
        whole[begin : begin + segment.stride] = value


def reads(arena: KVArena, block: int, value: int) -> bool:
    whole = arena.tensor()
    return all(
        bool(torch.all(whole[begin : begin + segment.stride] == value))
        for segment in arena.segments
        for begin in (segment.offset + block * segment.stride,)
    )
