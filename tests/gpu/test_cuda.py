"""The CUDA page driver on a real GPU. Nothing here needs the engine."""

import time

import pytest
import torch
from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.layout import Segment
from vllm.v1.elastic_kv.page_driver import PageDriverError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or this torch has no CUDA"),
]

GIB = 1 << 30
MIB = 1 << 20
SEGMENTS = 32


@pytest.fixture
def driver():
    from vllm.v1.elastic_kv.cuda_driver import CudaPageDriver

    torch.cuda.init()
    return CudaPageDriver(torch.cuda.current_device())


@pytest.fixture
def make(driver):
    """Makes an arena with chunks of 2 MiB in each of 32 segments, and room for so many GiB and one chunk more.

    It is closed after the test, also after one that fails: its memory is the whole GPU's.
    """
    arenas = []

    def make(gib: int) -> KVArena:
        chunks = gib * GIB // (SEGMENTS * driver.granule) + 1
        segments = [Segment(number * driver.granule * chunks, driver.granule) for number in range(SEGMENTS)]
        arenas.append(KVArena(driver, segments, 1, chunks))
        return arenas[-1]

    yield make
    torch.cuda.synchronize()
    for arena in arenas:
        arena.close()


def test_pages_are_zero_keep_their_data_and_are_reported(driver):
    size = 4 * driver.granule
    space = driver.reserve(2 * size)
    for _ in range(3):
        handle = driver.create(size)
        driver.map(space, handle)
        pages = driver.tensor(space, size)
        assert pages.device.type == "cuda"
        assert pages.data_ptr() == space
        assert not pages.any()
        pages.fill_(-1)
        torch.cuda.synchronize()
        driver.unmap(handle)
        assert driver.reported_bytes(space, 2 * size) == 0
        driver.map(space + size, handle)
        assert (driver.tensor(space + size, size) == -1).all()
        assert driver.reported_bytes(space, 2 * size) == size
        driver.synchronize()
        driver.unmap(handle)
        driver.release(handle)
    driver.unreserve(space, 2 * size)


def test_memory_goes_back_to_the_device(driver, make):
    before = driver.available_bytes()
    arena = make(1)
    arena.attach(range(16))
    assert before - driver.available_bytes() >= 16 * arena.chunk_bytes
    arena.close()
    assert abs(driver.available_bytes() - before) < 64 * MIB


def test_a_cut_keeps_what_stays(driver, make):
    arena = make(1)
    arena.attach(range(16))
    whole = arena.tensor()
    size = driver.granule
    for chunk in range(16):
        whole[chunk * size : (chunk + 1) * size] = chunk + 1
    arena.detach([3, 8])
    for chunk in set(range(16)) - {3, 8}:
        assert (whole[chunk * size : (chunk + 1) * size] == chunk + 1).all()
    assert arena.reported_bytes() == arena.resident_bytes


def test_a_graph_captured_before_a_resize_is_replayed_after_it(driver, make):
    arena = make(1)
    arena.attach(range(4))
    whole = arena.tensor()
    size = driver.granule
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    index = torch.arange(1024, device="cuda")
    result = torch.zeros(1024, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()  # the side stream does not wait for what was launched on this one
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result.copy_(whole[first + index])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(whole[first + index])
    arena.attach([8])
    whole[8 * size : 8 * size + 1024] = 5
    first.fill_(8 * size)
    graph.replay()
    assert (result == 5).all()
    first.fill_(0)
    torch.cuda.synchronize()
    arena.detach([8, 2])
    graph.replay()
    assert not result.any()


def test_a_detach_in_the_background_beside_work(driver, make):
    """Its calls come from another thread, and it waits for the work that was submitted before it."""
    arena = make(1)
    arena.attach(range(4))
    arena.attach(range(4, 8))
    whole, size = arena.tensor(), driver.granule
    whole[4 * size : 8 * size].fill_(1)
    arena.begin_detach(range(4, 8))
    for value in range(100):
        whole[:size].fill_(value)
    assert arena.settle(60)
    assert arena.ended()
    assert (whole[:size] == 99).all()
    assert arena.reported_bytes() == arena.resident_bytes == 4 * arena.chunk_bytes


@pytest.fixture(params=[False, True], ids=["segments of torch's", "expandable segments of torch's"])
def allocator(request):
    """torch's allocator, with either kind of segments."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{request.param}")
    yield
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@pytest.mark.usefixtures("allocator")
def test_torch_s_allocator_beside_it(make):
    """It never has the cache's addresses or pages, so neither has what registers torch's memory, as NCCL can."""
    arena = make(1)
    allocated = torch.cuda.memory_allocated()
    arena.attach(range(8))
    assert torch.cuda.memory_allocated() == allocated
    own = torch.full((64 * MIB,), 7, dtype=torch.int8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    assert segments
    for segment in segments:
        start, end = segment["address"], segment["address"] + segment["total_size"]
        assert end <= arena.address or arena.address + arena.nbytes <= start
    arena.detach(range(8))
    assert (own == 7).all()
    arena.attach(range(8))
    assert (own == 7).all()


def test_no_other_process_is_given_the_addresses(driver, make):
    """By CUDA's old way of sharing, which custom all-reduce takes for its own buffers."""
    arena = make(1)
    arena.attach([0])
    with driver._do.in_context(), pytest.raises(PageDriverError, match="cuIpcGetMemHandle"):
        driver._do("cuIpcGetMemHandle", 0, arena.address)


@pytest.mark.parametrize("gib", [1, 4, 16])
def test_attach_and_detach_timed(driver, make, gib, record_property):
    """With `--junit-xml` the times are in the report, with the card and the driver's version."""
    if driver.available_bytes() < (gib + 1) * GIB:
        pytest.skip(f"less than {gib + 1} GiB of GPU memory is free")
    record_property("card", driver.card)
    record_property("driver", driver._do("cuDriverGetVersion", 0))
    arena = make(gib)
    arena.attach([0])  # the first one loads the kernel that zeroes
    arena.detach([0])
    assert arena.settle(60)
    chunks = range(gib * GIB // arena.chunk_bytes)
    for name, call in {"attach": arena.attach, "detach": arena.detach}.items():
        start = time.perf_counter()
        call(chunks)
        record_property(f"{name}_{gib}_gib_ms", round((time.perf_counter() - start) * 1000, 1))
    assert arena.settle(60)
    assert arena.num_handles == 0
