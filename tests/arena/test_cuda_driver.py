"""What is CUDA's own, over the stand-in: each driver call fails in turn, errors, threads, kept memory, counts."""

import gc
import threading

import pytest
import torch
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError, make_driver

from .arenas import SETTLE_S, fill, holds, make_arena

PAGE = 4096
INVALID, OUT_OF_MEMORY = 1, 2
CALLS = [
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    device.reset()
    device.forget()
    yield
    gc.collect()
    assert device.left() == (0, 0, 0, 0)


@pytest.fixture
def driver():
    return device.StandInDriver()


def life() -> None:
    """All that an arena does, with a cut, on a device of its own."""
    arena = make_arena(device.StandInDriver())
    try:
        arena.attach([0])
        fill(arena, 0, 1)
        arena.prepare([1, 2, 3, 4])
        arena.attach([1, 2, 3, 4])
        for chunk in (1, 2, 3, 4):
            assert holds(arena, chunk, 0)
            fill(arena, chunk, chunk + 1)
        arena.detach([2])
        assert all(holds(arena, chunk, chunk + 1) for chunk in (0, 1, 3, 4))
        arena.detach([0, 1])
        assert all(holds(arena, chunk, chunk + 1) for chunk in (3, 4))
        assert arena.reported_bytes() == arena.resident_bytes
    finally:
        try:
            arena.close()
        finally:
            arena.close()  # tries again what could not be done, and what could not be given back
            assert arena.settle(SETTLE_S)


def outcome_of(function) -> PageDriverError | None:
    """The failure, if there was one. An ArenaBrokenError is none of those: a second failure would be needed for it."""
    try:
        function()
    except PageDriverError as error:
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("code", [INVALID, OUT_OF_MEMORY], ids=["invalid", "out of memory"])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_fails_once_and_nothing_is_left(call, code):
    device.reset()
    life()
    made = device.calls(call)
    assert made
    failures = 0
    for number in range(1, made + 1):
        device.reset()
        device.fail(call, number, code)
        error = outcome_of(life)
        if error is not None:
            name = "CUDA_ERROR_OUT_OF_MEMORY" if code == OUT_OF_MEMORY else "CUDA_ERROR_INVALID_VALUE"
            assert (error.call, error.code, error.device) == (call, name, "cuda:0")
            assert isinstance(error, OutOfMemoryError) == (code == OUT_OF_MEMORY)
            failures += 1
        del error
        gc.collect()
        device.reset()
        assert device.left() == (0, 0, 0, 0), f"{call} number {number}"
    assert failures or call == "cuMemRelease"  # what cannot be released is tried again


def test_an_error_names_call_code_bytes_and_device(driver):
    device.fail("cuMemCreate", 1, INVALID)
    with pytest.raises(PageDriverError, match=r"cuMemCreate of 8192 bytes on cuda:0 failed: CUDA_ERROR_INVALID_VALUE"):
        driver.create(2 * PAGE)


def test_the_budget_of_the_device(driver):
    device.reset(nbytes=4 * PAGE)
    first = driver.create(3 * PAGE)
    with pytest.raises(OutOfMemoryError, match=r"cuMemCreate of 8192 bytes on cuda:0 failed: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(2 * PAGE)
    driver.release(first)
    driver.release(driver.create(4 * PAGE))


@pytest.mark.parametrize("ordinal", [-1, 2, 99])
def test_a_device_that_is_not_there(ordinal):
    with pytest.raises(ValueError, match=f"finds 2 devices, so that there is no device {ordinal}"):
        device.StandInDriver(ordinal)


def test_the_second_device_has_memory_of_its_own():
    first, second = device.StandInDriver(0), device.StandInDriver(1)
    handle = second.create(PAGE)
    assert first.available_bytes() == first.total_bytes()
    assert second.available_bytes() == second.total_bytes() - PAGE
    space = second.reserve(PAGE)
    second.map(space, handle)
    second.unmap(handle)
    second.release(handle)
    second.unreserve(space, PAGE)


def test_a_thread_without_a_context_gets_one(driver):
    handles = []
    thread = threading.Thread(target=lambda: handles.append(driver.create(PAGE)))
    thread.start()
    thread.join()
    driver.release(handles[0])


def test_new_pages_are_not_zero_until_they_are_usable(driver):
    """The stand-in's new memory is NaN in every format, so zeros are the driver's doing."""
    handle, space = driver.create(PAGE), driver.reserve(PAGE)
    driver.map(space, handle, usable=False)
    driver._fill, fill_ = lambda places: None, driver._fill
    driver.make_usable([handle])
    assert (driver.tensor(space, PAGE) == -1).all()
    driver._fill = fill_
    driver._unwritten.add(handle)
    driver.make_usable([handle])
    assert not driver.tensor(space, PAGE).any()
    driver.unmap(handle)
    driver.release(handle)
    driver.unreserve(space, PAGE)


def test_an_unmap_that_comes_too_early_is_seen_and_the_arena_makes_none():
    """Work is in flight: without a wait, the stand-in answers as a GPU whose kernel has lost its page."""
    arena = make_arena(device.StandInDriver())
    arena.attach([0, 1, 2])
    device.library().stand_in_submit()
    arena.detach([1])
    assert arena.attached == {0, 2}
    arena.close()


def test_without_the_wait_the_device_is_lost():
    driver = device.StandInDriver()
    handle, space = driver.create(PAGE), driver.reserve(PAGE)
    driver.map(space, handle)
    device.library().stand_in_submit()
    with pytest.raises(PageDriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.unmap(handle)
    device.reset()
    driver.unmap(handle)
    driver.release(handle)
    driver.unreserve(space, PAGE)


@pytest.mark.parametrize("chunks", [1, 8, 64])
@pytest.mark.parametrize("segments", [1, 4, 32])
def test_calls_of_an_attach_do_not_depend_on_its_size(segments, chunks):
    """At most three for each segment, and a constant."""
    arena = make_arena(device.StandInDriver(), strides=[PAGE] * segments, chunk_blocks=1, capacity=65)
    device.reset()
    arena.attach(range(chunks))
    counts = {call: device.calls(call) for call in CALLS if device.calls(call)}
    each = dict.fromkeys(("cuMemCreate", "cuMemMap", "cuMemSetAccess"), segments)
    assert {call: counts.pop(call) for call in each} == each
    assert sum(counts.values()) <= 4, counts
    device.reset()
    arena.detach(range(chunks))
    assert device.calls("cuMemUnmap") == segments
    assert device.calls("cuMemCreate") == 0
    arena.close()


class TestKept:
    def test_released_memory_is_taken_again(self):
        driver = device.StandInDriver(keep_bytes=4 * PAGE)
        driver.release(driver.create(2 * PAGE))
        assert driver.kept_bytes == 2 * PAGE
        assert driver.available_bytes() == driver.total_bytes()
        handle, space = driver.create(2 * PAGE), driver.reserve(2 * PAGE)
        assert device.calls("cuMemCreate") == 1
        driver.map(space, handle)
        assert not driver.tensor(space, 2 * PAGE).any()  # old contents would be there
        driver.tensor(space, 2 * PAGE).fill_(-1)
        driver.unmap(handle)
        driver.release(handle)
        handle = driver.create(2 * PAGE)
        driver.map(space, handle)
        assert not driver.tensor(space, 2 * PAGE).any()
        driver.unmap(handle)
        driver.release(handle)
        driver.unreserve(space, 2 * PAGE)
        assert driver.give_up_kept() == 2 * PAGE

    def test_up_to_the_limit(self):
        driver = device.StandInDriver(keep_bytes=4 * PAGE)
        for handle in [driver.create(2 * PAGE) for _ in range(3)]:
            driver.release(handle)
        assert driver.kept_bytes == 4 * PAGE
        assert driver.give_up_kept() == 4 * PAGE
        assert driver.kept_bytes == 0

    def test_given_up_under_pressure(self):
        device.reset(nbytes=4 * PAGE)
        driver = device.StandInDriver(keep_bytes=4 * PAGE)
        for handle in [driver.create(PAGE) for _ in range(4)]:
            driver.release(handle)
        handle = driver.create(4 * PAGE)
        assert driver.kept_bytes == 0
        with pytest.raises(OutOfMemoryError):
            driver.create(PAGE)
        driver.release(handle)
        driver.give_up_kept()


def test_a_cut_without_memory_for_it_changes_nothing():
    arena = make_arena(device.StandInDriver())
    device.reset(nbytes=4 * arena.chunk_bytes)
    arena.attach(range(4))
    for chunk in range(4):
        fill(arena, chunk, chunk + 1)
    with pytest.raises(OutOfMemoryError, match="0 bytes are available"):
        arena.detach([1])
    assert arena.attached == {0, 1, 2, 3}
    assert all(holds(arena, chunk, chunk + 1) for chunk in range(4))
    arena.detach(range(4))
    arena.close()


def test_whole_runs_go_first_so_that_others_can_be_cut():
    arena = make_arena(device.StandInDriver())
    device.reset(nbytes=4 * arena.chunk_bytes)
    arena.attach([0, 1])
    arena.attach([2, 3])
    fill(arena, 0, 7)
    arena.detach([1, 2, 3])
    assert arena.attached == {0}
    assert holds(arena, 0, 7)
    arena.close()


def test_a_machine_without_a_driver_gets_one_sentence(python_without_vllm):
    result = python_without_vllm("""
import elastic_kv.page_driver, elastic_kv.cuda_driver, elastic_kv.arena
print(sorted(name for name in sys.modules if name.split(".")[0] in ("cuda", "torch")))
from elastic_kv.cuda_driver import CudaPageDriver
try:
    CudaPageDriver()
except ValueError as error:
    print(error)
""")
    loaded, message = result.stdout.splitlines()
    assert loaded == "[]", result.stderr
    if "finds" not in message:  # where there is a driver, it made one
        assert message.startswith("The page driver 'cuda' needs NVIDIA's driver library, and there is none: ")


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="no page driver for ROCm"):
        make_driver("auto", "cuda")


def test_the_arena_over_the_device_is_a_tensor_without_a_copy():
    arena = make_arena(device.StandInDriver())
    arena.attach([0])
    view = arena.owned_tensor()
    assert view.data_ptr() == arena.address
    part = view[:PAGE].view(torch.float32)
    del view
    gc.collect()
    part.fill_(1.0)
    assert device.left()[0] > 0
    del part
    gc.collect()
    assert arena.nbytes == 0
    assert device.left() == (0, 0, 0, 0)
