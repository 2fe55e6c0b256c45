"""The arena: chunks come and go all together or not at all, with handles that can be cut and with others."""

import gc

import pytest
import torch
from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.layout import Segment, chunk_blocks_of
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError
from vllm.v1.elastic_kv.runs import runs_of
from vllm.v1.elastic_kv.undo import ArenaBrokenError

from .arenas import (
    CAPACITY,
    CHUNK_BLOCKS,
    PAGE,
    SEGMENTS,
    SETTLE_S,
    check,
    detach,
    fill,
    holds,
    holds_or_zero,
    make_arena,
    open_files,
    picture,
    strides_of,
)
from .drivers import LargeGranule, in_host_memory, mappings, resident_bytes


def calls_for(arena: KVArena, chunks) -> int:
    """Handles behind `chunks` if they are attached together."""
    return len(runs_of(chunks)) * SEGMENTS


def test_sizes(arena):
    block_bytes = sum(strides_of(arena.driver))
    assert arena.nbytes == block_bytes * CHUNK_BLOCKS * CAPACITY
    assert arena.chunk_bytes == block_bytes * CHUNK_BLOCKS
    assert arena.attached == frozenset()
    check(arena)


def test_attach_and_detach(arena):
    arena.attach([0, 1, 5])
    assert arena.attached == {0, 1, 5}
    check(arena)
    for chunk in (0, 1, 5):
        fill(arena, chunk, chunk + 1)
    arena.detach([1])
    check(arena)
    assert holds(arena, 0, 1)
    assert holds(arena, 5, 6)
    arena.attach(iter([2, 1]))
    check(arena)
    assert holds(arena, 1, 0)
    assert holds(arena, 2, 0)


def test_nothing_to_do_is_nothing(arena):
    arena.attach([])
    arena.detach([])
    assert arena.attached == frozenset()


def test_a_poisoned_chunk_comes_back_as_zero(arena):
    for _ in range(10):
        arena.attach([3, 4])
        assert holds(arena, 3, 0)
        assert holds(arena, 4, 0)
        fill(arena, 3, -1)  # 0xff bytes: NaN in every float format
        fill(arena, 4, -1)
        arena.detach([3, 4])


@pytest.mark.parametrize(
    ("operation", "chunks", "message"),
    [
        ("attach", [2, 2], "twice"),
        ("attach", [0], "already attached"),
        ("attach", [2, 1], "already attached"),
        ("attach", [-1], "capacity"),
        ("attach", [2, CAPACITY], "capacity"),
        ("detach", [0, 0], "twice"),
        ("detach", [0, 2], "not attached"),
        ("detach", [CAPACITY], "capacity"),
    ],
)
def test_misuse_changes_nothing(arena, operation, chunks, message):
    arena.attach([0, 1])
    before, calls = picture(arena), dict(arena.driver.calls)
    with pytest.raises(ValueError, match=message):
        getattr(arena, operation)(chunks)
    assert picture(arena) == before
    assert dict(arena.driver.calls) == calls


def test_chunks_have_to_fill_granules(faulty):
    with pytest.raises(ValueError, match="granules"):
        KVArena(faulty, [Segment(0, faulty.granule // 2)], 1, 4)
    with pytest.raises(ValueError, match="granules"):
        KVArena(faulty, [Segment(faulty.granule // 2, faulty.granule)], 1, 4)
    assert not faulty.calls["reserve"]


@pytest.mark.parametrize("out_of_memory", [False, True])
@pytest.mark.parametrize("prepared", [[], [1, 2], [5], [1, 2, 5]], ids=str)
@pytest.mark.parametrize("call", ["create", "map"])
def test_attach_is_all_or_nothing(arena, call, prepared, out_of_memory):
    """Each call fails in turn, also those that the background makes."""
    arena.attach([0, 6])
    fill(arena, 0, 1)
    fill(arena, 6, 6)
    before = picture(arena)
    chunks = [1, 5, 2]
    arena.driver.out_of_memory = out_of_memory
    for number in range(1, calls_for(arena, chunks) + 1):
        arena.driver.fail(call, number)
        arena.prepare(prepared)
        with pytest.raises(OutOfMemoryError if out_of_memory else PageDriverError, match=f"{call} .*made to fail"):
            arena.attach(chunks)
        assert arena.attached == {0, 6}
        arena.driver.mend()
        arena.discard_prepared()
        assert picture(arena) == before
        assert holds(arena, 0, 1)
        assert holds(arena, 6, 6)
    arena.prepare(prepared)
    arena.attach(chunks)
    check(arena)
    assert all(holds(arena, chunk, 0) for chunk in chunks)


@pytest.mark.parametrize("aside", [False, True])
def test_detach_is_all_or_nothing(arena, aside):
    arena.attach(range(4))
    for chunk in range(4):
        fill(arena, chunk, chunk + 1)
    before = picture(arena)
    chunks = [2, 0, 3]
    for number in range(1, calls_for(arena, chunks) + 1):
        arena.driver.fail("unmap", number)
        with pytest.raises(PageDriverError, match="unmap"):
            detach(arena, chunks, aside)
        assert picture(arena) == before
        assert holds(arena, 1, 2)
        # What was cut by copying is zero where it was to leave.
        assert all(holds_or_zero(arena, chunk, chunk + 1) for chunk in chunks)
    detach(arena, chunks, aside)
    check(arena)
    assert holds(arena, 1, 2)


@pytest.mark.parametrize("aside", [False, True])
def test_detach_in_batches_is_all_or_nothing(faulty, aside):
    """Scattered chunks, more than can wait for their release at a time."""
    faulty.max_mappings = 8 * 2 * SEGMENTS  # two runs
    arena = make_arena(faulty)
    for chunk in range(CAPACITY):
        arena.attach([chunk])
        fill(arena, chunk, chunk + 1)
    before = picture(arena)
    chunks = [1, 3, 5, 7]
    for number in range(1, 4 * SEGMENTS + 1):
        faulty.fail("unmap", number)
        with pytest.raises(PageDriverError, match="unmap"):
            detach(arena, chunks, aside)
        assert picture(arena) == before
        assert all(holds(arena, chunk, chunk + 1) for chunk in range(0, CAPACITY, 2))
    faulty.fail("unmap", 4 * SEGMENTS)
    faulty.fail("create", 1)
    with pytest.raises(ArenaBrokenError, match="could not be undone: create"):
        detach(arena, chunks, aside)
    faulty.mend()
    arena.attach(set(range(CAPACITY)) - arena.attached)
    detach(arena, chunks, aside)
    check(arena)
    assert all(holds(arena, chunk, chunk + 1) for chunk in range(0, CAPACITY, 2))
    arena.close()
    assert not faulty.live


def test_detach_waits_for_running_work_first(arena):
    arena.attach([0])
    arena.driver.fail("synchronize")
    before = picture(arena)
    with pytest.raises(PageDriverError, match="synchronize"):
        arena.detach([0])
    assert picture(arena) == before


@pytest.mark.parametrize("number", range(1, SEGMENTS + 1))
def test_a_handle_that_cannot_be_released_is_released_later(arena, caplog, number):
    """Whether the chunk has pages must not depend on it: a rank that kept them would differ from the others."""
    arena.attach([0, 1])
    arena.attach([2])
    arena.driver.fail("release", number)
    arena.detach([0, 1])
    assert arena.attached == {2}
    assert arena.settle(SETTLE_S)
    assert not arena.busy
    assert arena.unreleased_bytes > 0
    assert arena.reported_bytes() == arena.resident_bytes
    assert len(arena.driver.live) == arena.num_handles == SEGMENTS + 1  # the leak is seen while it lasts
    assert "could not be given back" in caplog.text
    arena.attach([0])
    check(arena)
    arena.detach([0, 2])
    check(arena)


@pytest.mark.parametrize("again", ["attach", "detach", "prepare", "discard_prepared"])
def test_every_call_tries_again_to_release(arena, again):
    arena.attach([0])
    arena.driver.fail("release")
    arena.detach([0])
    assert arena.settle(SETTLE_S)
    assert arena.num_handles == 1
    getattr(arena, again)(*([] if again == "discard_prepared" else [[]]))
    check(arena)


def test_a_handle_that_cannot_be_released_while_undoing(arena):
    arena.driver.fail("map", number=SEGMENTS)
    arena.driver.fail("release", SEGMENTS)
    with pytest.raises(PageDriverError, match="map"):
        arena.attach([0])
    assert arena.attached == frozenset()
    assert arena.settle(SETTLE_S)
    assert arena.num_handles == len(arena.driver.live) == 1
    arena.attach([0, 1])
    check(arena)


@pytest.mark.parametrize(("operation", "call", "undo"), [("attach", "map", "unmap"), ("detach", "unmap", "map")])
def test_what_cannot_be_undone_is_no_ordinary_failure(faulty, operation, call, undo):
    arena = make_arena(faulty)
    arena.attach([0, 1])
    faulty.fail(call, SEGMENTS)
    faulty.fail(undo, 1)
    with pytest.raises(ArenaBrokenError, match=f"{call} .*could not be undone: {undo} ") as failure:
        getattr(arena, operation)([2, 3] if operation == "attach" else [0, 1])
    assert not isinstance(failure.value, PageDriverError)
    assert isinstance(failure.value.__cause__, PageDriverError)


def test_interruption_is_undone_too(arena):
    before = picture(arena)
    arena.driver.inner.map, real, calls = None, arena.driver.inner.map, []

    def interrupted(address: int, handle: int, usable: bool = True) -> None:
        calls.append(handle)
        if len(calls) == SEGMENTS:
            raise KeyboardInterrupt
        real(address, handle, usable)

    arena.driver.inner.map = interrupted
    with pytest.raises(KeyboardInterrupt):
        arena.attach([0, 1])
    arena.driver.inner.map = real
    assert picture(arena) == before


def test_more_than_the_device_has_is_refused_before_anything_is_taken(arena, monkeypatch):
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: 2 * arena.chunk_bytes - 1)
    calls = dict(arena.driver.calls)
    with pytest.raises(OutOfMemoryError, match=f"{2 * arena.chunk_bytes} bytes.*{2 * arena.chunk_bytes - 1} bytes"):
        arena.attach([0, 1])
    assert dict(arena.driver.calls) == calls
    arena.attach([0])


def test_a_failed_reservation_leaves_nothing(faulty):
    faulty.fail("reserve")
    with pytest.raises(PageDriverError, match="reserve"):
        make_arena(faulty)
    assert not faulty.live


@pytest.mark.parametrize("call", ["synchronize", "unmap", "unreserve"])
def test_close_can_be_tried_again(faulty, call):
    arena = make_arena(faulty)
    arena.attach(range(CAPACITY))
    faulty.fail(call)
    with pytest.raises(PageDriverError, match=call):
        arena.close()
    arena.close()
    arena.close()  # closing what is closed does nothing
    assert not faulty.live
    assert faulty.calls["unreserve"] == (2 if call == "unreserve" else 1)


def test_close_with_a_handle_that_cannot_be_released(faulty):
    arena = make_arena(faulty)
    arena.attach(range(2))
    faulty.fail("release", always=True)
    arena.close()
    assert faulty.calls["unreserve"] == 1
    assert len(faulty.live) == arena.num_handles == calls_for(arena, range(2))
    faulty.mend()
    arena.close()
    assert not faulty.live


def test_close_gives_the_range_back(faulty):
    arena = make_arena(faulty, strides=[1 << 20] * 3)
    address, nbytes = arena.address, arena.nbytes
    arena.attach(range(CAPACITY))
    before = resident_bytes()
    arena.close()
    if faulty.device != "host":
        assert faulty.reported_bytes(address, nbytes) == 0
    if not in_host_memory(faulty):
        return
    assert before - resident_bytes() > nbytes * 0.9
    assert not [span for span in mappings(address, nbytes) if span[2] == "---p"]


def test_500_cycles_return_to_where_they_began(arena):
    """vLLM #36651: handles, mapped bytes, mappings, files and memory come back exactly."""

    def cycle(number: int) -> None:
        chunks = [1 + (number + step) % (CAPACITY - 1) for step in range(1 + number % 5)]
        if number % 3 == 0:
            arena.prepare(chunks[::2])
        arena.attach(chunks)
        for chunk in chunks:
            fill(arena, chunk, -1)
        arena.detach(chunks[::2])
        arena.detach(chunks[1::2])

    arena.attach([0])
    for number in range(20):
        cycle(number)
    before, handles, resident, files = picture(arena), arena.num_handles, resident_bytes(), open_files()
    lines = len(mappings())
    for number in range(500):
        cycle(number)
        if number % 50 == 0:
            check(arena)
    assert picture(arena) == before
    assert arena.num_handles == handles
    assert open_files() == files
    assert len(mappings()) <= lines + 4  # the interpreter may have mapped an arena of its own
    assert resident_bytes() <= resident + (4 << 20)


@pytest.mark.parametrize(
    ("stride", "chunk_blocks"),
    [(3 << 20, 2), (3 << 19, 4), (5 << 20, 2), (2 << 20, 1), (4 << 20, 1), (192 << 10, 32), (7 << 10, 2048)],
)
def test_blocks_that_do_not_fit_the_granule(stride, chunk_blocks):
    """kvcached #452, #367: blocks that straddle pages are counted once, blocks larger than a page work."""
    driver = LargeGranule()
    assert chunk_blocks_of([stride], driver.granule, 1000, None) == chunk_blocks
    arena = make_arena(driver, [stride], chunk_blocks, capacity=3)
    assert arena.chunk_bytes % driver.granule == 0
    arena.attach([1])
    assert arena.reported_bytes() == arena.resident_bytes == stride * chunk_blocks
    first = chunk_blocks * stride
    arena.tensor()[first : first + arena.chunk_bytes] = 1  # every byte of the chunk, and no other, has a page
    arena.attach([0, 2])
    assert arena.reported_bytes() == arena.resident_bytes == arena.nbytes == 3 * stride * chunk_blocks
    arena.detach([1])
    assert arena.reported_bytes() == arena.resident_bytes == 2 * stride * chunk_blocks
    arena.close()


def test_calls_to_attach_grow_with_handles_only(faulty):
    """Twice the bytes per chunk, the same calls: large handles, not single pages."""
    calls = []
    for stride in (faulty.granule, 64 * faulty.granule):
        arena = make_arena(faulty, [stride] * 3, 1, capacity=4)
        faulty.calls.clear()
        arena.attach([0, 1])
        calls.append(dict(faulty.calls))
        arena.close()
    assert calls[0] == calls[1] == {"create": 3, "map": 3, "make_usable": 1}


def test_the_memory_goes_with_the_last_view(faulty):
    """An engine that is deleted in a process that goes on gives its cache back."""
    arena = make_arena(faulty)
    arena.attach([0, 1])
    view = arena.owned_tensor()[: arena.segments[0].stride * arena.chunk_blocks].view(torch.float32)
    gc.collect()
    assert faulty.live  # the view keeps the whole
    view.fill_(1.0)
    del view
    gc.collect()
    assert not faulty.live
    assert arena.nbytes == 0


def test_arenas_that_share_memory_do_not_count_it_twice(faulty, monkeypatch):
    arena = KVArena(faulty, [Segment(0, faulty.granule)], 1, 8, ranks_sharing=2)
    monkeypatch.setattr(faulty, "available_bytes", lambda: 6 * faulty.granule)
    with pytest.raises(OutOfMemoryError, match=f"{3 * faulty.granule} bytes are available to each rank"):
        arena.attach(range(4))
    assert not arena.attached
    arena.attach(range(3))
    arena.close()


def test_the_limit_on_mappings_holds_for_the_worst_cut():
    """Every second chunk goes and comes back where the range has as many pieces as the driver allows."""
    driver = HostPageDriver()
    limit, segments = driver.max_mappings, 4
    if limit > 100_000:
        pytest.skip("vm.max_map_count is so high here that reaching it takes minutes")
    arena = make_arena(driver, strides=[PAGE] * segments, chunk_blocks=1, capacity=limit // segments)
    chunks = range(arena.capacity_chunks)
    arena.attach(chunks)
    arena.detach(chunks[::2])
    assert arena.reported_bytes() == arena.resident_bytes == len(chunks[1::2]) * arena.chunk_bytes
    arena.prepare(chunks[::2])
    assert arena.settle(SETTLE_S)
    assert 0 < arena.prepared_bytes < len(chunks[::2]) * arena.chunk_bytes
    arena.attach(chunks[::2])
    assert arena.reported_bytes() == arena.resident_bytes == arena.nbytes
    arena.detach(chunks[1::2])
    arena.close()
