"""What a block pool that grows and shrinks owes its users."""

import random
from collections import Counter

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.elastic_kv.block_pool import ShrinkPlan

from .pools import cache, cached_then_freed, check, make_layout, make_pool, make_request, prompt


def chunk_of(pool, block_id: int) -> int:
    return block_id // pool.layout.chunk_blocks


def shrink(pool, num_chunks: int) -> ShrinkPlan:
    """A shrink from its plan to its end, with the moves it takes."""
    plan = pool.plan_shrink(num_chunks)
    before = pool.num_gpu_blocks
    evicted = pool.withdraw(plan.chunks)
    check(pool)
    moves = pool.next_moves(10_000)
    pool.move(moves)
    assert pool.emptied() == list(plan.chunks)
    pool.retire(plan.chunks)
    assert not pool.leaving
    check(pool)
    assert (evicted, len(moves)) == (plan.evicted, plan.moved)
    assert pool.num_gpu_blocks == before - len(plan.chunks) * pool.layout.chunk_blocks
    return plan


def planned(chunks: tuple[int, ...], evicted=0, moved=0, missing=0, shortfall=0) -> ShrinkPlan:
    return ShrinkPlan(chunks, evicted, moved, missing, shortfall)


def take(pool, *block_ids: int) -> list:
    """Allocate exactly these blocks."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    wanted = [block for block in blocks if block.block_id in block_ids]
    pool.free_blocks(reversed([block for block in blocks if block.block_id not in block_ids]))
    assert len(wanted) == len(block_ids)
    return wanted


def test_it_begins_like_upstream():
    pool = make_pool(make_layout(chunk_blocks=2, start=4))
    assert isinstance(pool, BlockPool)
    assert pool.num_gpu_blocks == 8
    assert pool.get_num_free_blocks() == 7
    assert pool.resident_chunks == {0, 1, 2, 3}
    assert pool.missing_chunks() == [4, 5, 6, 7]
    check(pool)


def test_counts():
    pool = make_pool(make_layout(chunk_blocks=2, start=4))
    cached_then_freed(pool, seed=1, count=2)
    pool.get_new_blocks(1)
    counts = pool.counts()
    assert (counts.used, counts.cached, counts.free) == (1, 2, 4)
    assert pool.get_usage() == pytest.approx(1 / 7)


def test_usage_follows_the_size():
    pool = make_pool(make_layout(chunk_blocks=2, start=2, capacity=8))
    pool.get_new_blocks(3)
    assert pool.get_usage() == 1.0
    pool.grow([2, 3])
    assert pool.get_usage() == pytest.approx(3 / 7)


class TestGrow:
    def test_new_blocks_come_before_cached_ones(self):
        """imp #1938: prefixes were evicted although there was memory to grow into."""
        pool = make_pool(make_layout(chunk_blocks=2, start=2, capacity=8))
        kept = cached_then_freed(pool, seed=1, count=3)
        pool.grow([2, 3])
        check(pool)
        assert [block.block_id for block in pool.get_new_blocks(4)] == [4, 5, 6, 7]
        assert pool.counts().cached == 3
        assert sorted(block.block_id for block in pool.get_new_blocks(3)) == sorted(kept)
        assert pool.counts().cached == 0

    def test_chunks_in_any_order_and_with_gaps(self):
        pool = make_pool(make_layout(chunk_blocks=3, start=2, capacity=9))
        pool.grow([7, 4])
        check(pool)
        assert pool.resident_chunks == {0, 1, 4, 7}
        assert pool.missing_chunks() == [2, 3, 5, 6, 8]
        assert {block.block_id for block in pool.get_new_blocks(11)} == {1, 2, 3, 4, 5, 12, 13, 14, 21, 22, 23}
        pool.grow([2])
        check(pool)
        assert {block.block_id for block in pool.get_new_blocks(3)} == {6, 7, 8}

    def test_nothing(self):
        pool = make_pool()
        pool.grow([])
        check(pool)

    def test_a_chunk_that_is_resident_is_refused(self):
        pool = make_pool(make_layout(start=3))
        before = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        for chunks, message in (([4, 2], "resident"), ([4, 4], "twice")):
            with pytest.raises(AssertionError, match=message):
                pool.grow(chunks)
        assert before == [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        check(pool)

    def test_a_full_pool_can_allocate_again(self):
        """imp #1453: a running sequence that needs a block can be given one by growth."""
        pool = make_pool(make_layout(chunk_blocks=1, start=2))
        pool.get_new_blocks(1)
        with pytest.raises(ValueError, match="Cannot get 1 free"):
            pool.get_new_blocks(1)
        pool.grow([2])
        assert pool.get_new_blocks(1)[0].block_id == 2


class TestOrderOfVictims:
    def test_free_chunks_go_before_cached_ones(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=6))
        (cached,) = {chunk_of(pool, block.block_id) for block in take(pool, 10, 11)}
        cache(pool, 1, [pool.blocks[10], pool.blocks[11]])
        pool.free_blocks([pool.blocks[11], pool.blocks[10]])
        plan = pool.plan_shrink(4)
        assert plan == planned((1, 2, 3, 4))
        plan = pool.plan_shrink(5)
        assert plan == planned((1, 2, 3, 4, cached), evicted=2)

    def test_free_chunks_go_from_the_top(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=6))
        assert pool.plan_shrink(2).chunks == (4, 5)

    def test_the_least_recently_used_prefix_goes_first(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=5))
        blocks = take(pool, *range(2, 10))
        for order, chunk in enumerate([3, 1, 4, 2]):
            pair = [block for block in blocks if chunk_of(pool, block.block_id) == chunk]
            cache(pool, order, pair)
            pool.free_blocks(reversed(pair))
        for count, expected in enumerate([(), (3,), (1, 3), (1, 3, 4), (1, 2, 3, 4)]):
            assert pool.plan_shrink(count) == planned(expected, evicted=2 * count)
        # A hit makes the oldest one the newest.
        pool.touch([pool.blocks[6]])
        pool.free_blocks([pool.blocks[6]])
        assert pool.plan_shrink(3).chunks == (1, 2, 4)

    def test_a_chunk_is_worth_its_most_useful_block(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=3))
        blocks = {block.block_id: block for block in take(pool, 2, 3, 4, 5)}
        for seed, block_id in enumerate([2, 4, 5, 3]):  # chunk 1 has the oldest and the newest
            cache(pool, seed, [blocks[block_id]])
            pool.free_blocks([blocks[block_id]])
        assert pool.plan_shrink(1).chunks == (2,)

    def test_a_chunk_with_one_cached_block_counts_one_eviction(self):
        pool = make_pool(make_layout(chunk_blocks=3, start=2))
        block = take(pool, 4)
        cache(pool, 1, block)
        pool.free_blocks(block)
        assert pool.plan_shrink(1) == planned((1,), evicted=1)

    def test_live_chunks_go_last_those_with_the_fewest_blocks_first(self):
        pool = make_pool(make_layout(chunk_blocks=3, start=5))
        take(pool, 4, 5, 6, 12)  # two in chunk 1, one in chunk 2, one in chunk 4
        cache(pool, 1, cached := take(pool, 9, 10, 11))
        pool.free_blocks(cached)
        assert [pool.plan_shrink(count).chunks for count in range(4)] == [(), (3,), (3, 4), (2, 3, 4)]
        assert pool.plan_shrink(2) == planned((3, 4), evicted=3, moved=1)

    def test_live_blocks_that_do_not_fit_stop_it(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=5))
        live = take(pool, 3, 4, 8)
        assert pool.plan_shrink(4) == planned((2, 3, 4), moved=2, missing=1, shortfall=2)
        assert pool.plan_shrink(9) == planned((2, 3, 4), moved=2, missing=6, shortfall=2)
        shrink(pool, 4)
        assert {block.block_id for block in live} == {1, 2, 3}
        assert pool.plan_shrink(1) == planned((), missing=1, shortfall=2)
        pool.free_blocks(live)
        assert shrink(pool, 1) == planned((1,))

    def test_the_base_stays(self):
        pool = make_pool(make_layout(chunk_blocks=2, base=2, start=4))
        assert shrink(pool, 99) == planned((2, 3), missing=97)
        assert pool.num_gpu_blocks == pool.layout.base_blocks

    def test_the_null_block_stays(self):
        pool = make_pool(make_layout(chunk_blocks=1, base=1, start=4))
        assert shrink(pool, 4) == planned((1, 2, 3), missing=1)
        assert pool.get_num_free_blocks() == 0
        assert pool.get_usage() == 0
        with pytest.raises(ValueError, match="Cannot get 1 free"):
            pool.get_new_blocks(1)

    def test_nothing(self):
        pool = make_pool()
        assert shrink(pool, 0) == planned(())


class TestMoves:
    def test_whoever_holds_a_block_follows_it(self):
        """Blocks trade ids: requests that share one, and the prefix that names it, need no change."""
        pool = make_pool(make_layout(chunk_blocks=2, start=4))
        shared, own = take(pool, 6, 7)
        cache(pool, 1, [shared])
        pool.touch([shared])  # a second request has it
        first, second = [shared, own], [shared]
        pool.withdraw((3,))
        pool.move(pool.next_moves(2))
        pool.retire((3,))
        check(pool)
        assert {block.block_id for block in first} <= {1, 2, 3, 4, 5}
        assert second[0] is first[0]
        block_hash = make_request("hit", prompt(1, 1)).block_hashes[0]
        assert pool.get_cached_block(block_hash, [0]) == [shared]
        pool.free_blocks(first)
        pool.free_blocks(second)
        check(pool)
        assert pool.counts().used == 0

    def test_however_scattered_it_shrinks_to_the_live_blocks(self):
        """kvcached #359: 0 of 89 pages could be reclaimed, because live blocks were scattered."""
        choose = random.Random(4)
        for chunk_blocks in (1, 2, 3, 5, 8):
            pool = make_pool(make_layout(chunk_blocks=chunk_blocks, base=1, start=30, capacity=30))
            blocks = pool.get_new_blocks(pool.get_num_free_blocks())
            choose.shuffle(blocks)
            live = blocks[: len(blocks) // 4]
            pool.free_blocks(blocks[len(live) :])
            least = -(-(len(live) + 1) // chunk_blocks)
            plan = shrink(pool, 30 - least)
            assert (plan.missing, plan.shortfall) == (0, 0)
            assert pool.num_gpu_blocks == least * chunk_blocks
            assert sorted({block.block_id for block in live}) == sorted(block.block_id for block in live)

    def test_some_at_a_time(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=6))
        take(pool, 4, 5, 6, 8)
        pool.withdraw((2, 3, 4))
        assert pool.emptied() == []
        for moves in (1, 1, 1, 1):
            check(pool)
            some = pool.next_moves(moves)
            assert len(some) == 1
            pool.move(some)
            pool.retire(pool.emptied())
        assert not pool.leaving
        check(pool)

    def test_a_block_that_is_freed_meanwhile_does_not_come_back(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=4), enable_kv_cache_events=True)
        live = take(pool, 4, 6)
        cache(pool, 1, live)
        pool.take_events()
        pool.withdraw((2, 3))
        free = pool.get_num_free_blocks()
        pool.free_blocks([live[0]])
        check(pool)
        assert pool.get_num_free_blocks() == free + 1  # its destination, not the block
        assert pool.emptied() == [2]
        assert [type(event) for event in pool.take_events()] == [BlockRemoved]
        assert {block.block_id for block in pool.get_new_blocks(free + 1)} <= {1, 2, 3}

    def test_what_is_left_can_be_published_again(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=4))
        live = take(pool, 3, 5, 6, 7)
        pool.withdraw((2, 3)[:1])
        pool.restore()
        check(pool)
        assert pool.num_gpu_blocks == 8
        pool.free_blocks(live)
        live = take(pool, 5, 6)
        pool.withdraw((2, 3))
        pool.move(pool.next_moves(1))
        pool.retire(pool.emptied())
        pool.restore()
        check(pool)
        assert pool.num_gpu_blocks == 6
        assert len(pool.get_new_blocks(pool.get_num_free_blocks())) == 5 - len(live)

    def test_the_metrics_of_a_block_go_with_it(self):
        collector = KVCacheMetricsCollector(sample_rate=1.0)
        pool = make_pool(make_layout(chunk_blocks=2, start=3), metrics_collector=collector)
        (block,) = take(pool, 4)
        metrics = collector.block_metrics[4]
        pool.withdraw((2,))
        pool.move(pool.next_moves(1))
        assert collector.block_metrics[block.block_id] is metrics
        assert 4 not in collector.block_metrics

    def test_events_tell_of_no_move(self):
        pool = make_pool(make_layout(chunk_blocks=2, start=3), enable_kv_cache_events=True)
        cache(pool, 1, take(pool, 4))
        pool.take_events()
        shrink(pool, 1)
        shrink(pool, 1)
        assert pool.take_events() == []


def test_a_plan_that_is_out_of_date_is_refused():
    pool = make_pool(make_layout(chunk_blocks=2, start=4))
    plan = pool.plan_shrink(3)
    shrink(pool, 1)
    with pytest.raises(AssertionError, match="not resident"):
        pool.withdraw(plan.chunks)
    with pytest.raises(AssertionError, match="of the base"):
        pool.withdraw((0,))
    pool.withdraw((1,))
    for call in (lambda: pool.withdraw((2,)), lambda: pool.plan_shrink(1)):
        with pytest.raises(AssertionError, match="another shrink"):
            call()


def test_withdrawn_blocks_are_not_handed_out():
    pool = make_pool(make_layout(chunk_blocks=2, start=5))
    shrink(pool, 2)
    assert {block.block_id for block in pool.get_new_blocks(5)} == {1, 2, 3, 4, 5}
    with pytest.raises(ValueError, match="Cannot get"):
        pool.get_new_blocks(1)


def test_a_withdrawn_prefix_is_not_found_and_its_place_serves_another():
    """kvcached #401, #362: stale hashes after an eviction."""
    pool = make_pool(make_layout(chunk_blocks=2, start=2))
    cached_then_freed(pool, seed=1, count=3)
    hashes = make_request("same", prompt(1, 3)).block_hashes
    shrink(pool, 1)
    found = [pool.get_cached_block(block_hash, [0]) is not None for block_hash in hashes]
    assert sum(found) == pool.counts().cached == 1
    pool.grow([1])
    blocks = pool.get_new_blocks(3)
    cache(pool, 2, blocks)
    check(pool)
    assert all(pool.get_cached_block(block_hash, [0]) is None for block_hash in hashes)


def test_identical_prefixes_in_many_blocks():
    """kvcached #401: 32 copies of one prefix; each block that leaves takes only its own entry."""
    pool = make_pool(make_layout(chunk_blocks=2, start=20, capacity=20))
    blocks = pool.get_new_blocks(32)
    for block in blocks:
        cache(pool, 1, [block])
    pool.free_blocks(blocks)
    block_hash = make_request("same", prompt(1, 1)).block_hashes[0]
    for num_chunks in range(1, 6):
        shrink(pool, num_chunks)
        found = pool.get_cached_block(block_hash, [0])
        assert (found is not None) == (pool.counts().cached > 0)
    shrink(pool, 99)
    assert pool.counts().cached == 1  # in the base, beside the null block


@pytest.mark.parametrize("enabled", [True, False])
def test_events_tell_what_was_evicted(enabled):
    pool = make_pool(make_layout(chunk_blocks=2, start=3), enable_kv_cache_events=enabled)
    cached_then_freed(pool, seed=1, count=5)
    stored = pool.take_events()
    shrink(pool, 1)
    removed = pool.take_events()
    if not enabled:
        assert stored == removed == []
        return
    assert [type(event) for event in stored] == [BlockStored]
    assert [type(event) for event in removed] == [BlockRemoved] * 2
    gone = {block_hash for event in removed for block_hash in event.block_hashes}
    assert len(gone) == 2
    assert gone < set(stored[0].block_hashes)
    pool.grow([2])
    assert pool.take_events() == []  # growth adds no prefix
    pool.reset_prefix_cache()
    assert [type(event) for event in pool.take_events()] == [AllBlocksCleared]


def test_free_chunks_leave_without_events():
    pool = make_pool(make_layout(chunk_blocks=2, start=3), enable_kv_cache_events=True)
    shrink(pool, 2)
    assert pool.take_events() == []


def test_the_metrics_collector_forgets_withdrawn_blocks():
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = make_pool(make_layout(chunk_blocks=2, start=4), metrics_collector=collector)
    cached_then_freed(pool, seed=1, count=7)
    assert set(collector.block_metrics) == set(range(1, 8))
    shrink(pool, 2)
    assert set(collector.block_metrics) <= {block for chunk in pool.resident_chunks for block in pool._ids(chunk)}
    assert len(collector.drain_events()) == 4


def test_without_prefix_caching():
    pool = make_pool(make_layout(chunk_blocks=2, start=4), enable_caching=False)
    blocks = pool.get_new_blocks(7)
    pool.free_blocks(reversed(blocks))
    assert shrink(pool, 3) == planned((1, 2, 3))
    pool.grow([1, 2, 3])
    check(pool)
    assert len(pool.get_new_blocks(7)) == 7


def test_reset_with_withdrawn_chunks():
    pool = make_pool(make_layout(chunk_blocks=2, start=4))
    cached_then_freed(pool, seed=1, count=7)
    shrink(pool, 2)
    assert pool.reset_prefix_cache()
    check(pool)
    assert pool.counts().cached == 0
    assert len(pool.cached_block_hash_to_block) == 0


def test_a_fifth_and_back():
    """kvcached #498: restoring the size did not bring the blocks back."""
    pool = make_pool(make_layout(chunk_blocks=1, base=1, start=100, capacity=100))
    for _ in range(5):
        assert len(shrink(pool, 80).chunks) == 80
        pool.grow(pool.missing_chunks())
        check(pool)
        assert pool.num_gpu_blocks == 100
        blocks = pool.get_new_blocks(99)
        assert Counter(block.block_id for block in blocks) == Counter(range(1, 100))
        pool.free_blocks(reversed(blocks))


def test_ids_are_unique_after_any_resizes():
    """An allocator that was shrunk from 100 to 50 and grown to 120 handed 20 ids out twice."""
    pool = make_pool(make_layout(chunk_blocks=1, base=1, start=100, capacity=120))
    held = pool.get_new_blocks(30)
    shrink(pool, 50)
    held += pool.get_new_blocks(10)
    pool.grow(pool.missing_chunks())
    check(pool)
    assert pool.num_gpu_blocks == 120
    held += pool.get_new_blocks(pool.get_num_free_blocks())
    assert Counter(block.block_id for block in held) == Counter(range(1, 120))


def test_check_finds_what_is_broken():
    def broken(change) -> None:
        pool = make_pool(make_layout(chunk_blocks=2, start=3))
        cached_then_freed(pool, seed=1, count=5)
        change(pool)
        with pytest.raises(AssertionError):
            pool.check()

    broken(lambda pool: pool._resident.discard(2))
    broken(lambda pool: setattr(pool, "num_gpu_blocks", 5))
    broken(lambda pool: setattr(pool.blocks[3], "ref_cnt", 1))
    broken(lambda pool: pool.free_block_queue.remove(pool.blocks[3]))
    broken(lambda pool: pool.free_block_queue.append(pool.get_new_blocks(1)[0]))
    broken(lambda pool: pool.blocks.reverse())

    def stale_prefix(pool) -> None:
        block = pool.blocks[5]
        entry = block.block_hash
        pool.withdraw((2,))
        pool.cached_block_hash_to_block.insert(entry, block)

    broken(stale_prefix)
