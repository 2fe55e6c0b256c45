"""Every call of NVIDIA's driver fails in turn, over the stand-in, and nothing is left behind."""

import gc
import logging

import pytest
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError

from .arenas import SETTLE_S, fill, holds, make_arena, strides_of

PAGE = 4096
INVALID, OUT_OF_MEMORY = 1, 2
NONE, SECOND = -1, 1
MAKING = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuDevicePrimaryCtxRetain",
]
USING = [
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttributes",
]
ENDING = ["cuDevicePrimaryCtxRelease"]  # as the driver is collected, when there is nobody to tell

pytestmark = pytest.mark.usefixtures("clean_device")


def life(context: int) -> None:
    """All that a driver and an arena do, with a cut and with memory that is kept, on a thread of that context.

    What goes on in the background is waited for, so that the same call is the same one each time. Steps are in flight
    all the while, since `fill` submits one: whatever fails, an unmap that does not wait for them loses the device.
    """
    device.enter(context)
    driver = device.StandInDriver()
    driver._keep_bytes = 4 * strides_of(driver)[0]
    arena = make_arena(driver)
    try:
        arena.attach([0])
        fill(arena, 0, 1)
        arena.prepare([1, 2, 3, 4])
        arena.begin_attach([1, 2, 3, 4])
        assert arena.settle(SETTLE_S)
        assert arena.ended()
        for chunk in (1, 2, 3, 4):
            assert holds(arena, chunk, 0)
            fill(arena, chunk, chunk + 1)
        arena.detach([2])
        assert all(holds(arena, chunk, chunk + 1) for chunk in (0, 1, 3, 4))
        arena.begin_detach([0, 1])
        assert arena.settle(SETTLE_S)
        assert arena.ended()
        arena.take_back([0, 1])
        arena.detach([0, 1])
        assert all(holds(arena, chunk, chunk + 1) for chunk in (3, 4))
        assert arena.reported_bytes() == arena.resident_bytes
    finally:
        twice(arena.close)
        arena.close()  # tries again what could not be given back
        assert arena.settle(SETTLE_S)
        twice(driver.give_up_kept)


def twice(function) -> None:
    """A failure comes once."""
    try:
        function()
    except PageDriverError:
        function()


def outcome_of(function) -> PageDriverError | None:
    """The failure, if there was one. An ArenaBrokenError is none of those: a second failure would be needed for it."""
    try:
        function()
    except PageDriverError as error:
        return error.with_traceback(None)
    return None


def test_these_are_all_the_calls_there_are():
    life(NONE)
    life(SECOND)
    gc.collect()
    assert set(device.all_calls()) == {*MAKING, *USING, *ENDING}


@pytest.mark.parametrize("code", [INVALID, OUT_OF_MEMORY], ids=["invalid", "out of memory"])
@pytest.mark.parametrize("call", [*MAKING, *USING, *ENDING])
def test_every_call_fails_once_and_nothing_is_left(call, code, caplog):
    caplog.set_level(logging.CRITICAL, "vllm.v1.elastic_kv.stock")  # pytest keeps what is logged, the driver with it
    context = SECOND if call in ("cuCtxPushCurrent", "cuCtxPopCurrent") else NONE
    device.reset()
    life(context)
    gc.collect()
    made = device.calls(call)
    assert made
    told = 0
    for number in range(1, made + 1):
        device.reset()
        device.fail(call, number, code)
        error = outcome_of(lambda: life(context))
        if error is not None:
            name = "CUDA_ERROR_OUT_OF_MEMORY" if code == OUT_OF_MEMORY else "CUDA_ERROR_INVALID_VALUE"
            assert (error.call, error.code, error.device) == (call, name, "cuda:0")
            assert isinstance(error, OutOfMemoryError) == (code == OUT_OF_MEMORY)
            told += 1
        del error
        gc.collect()
        assert device.left() == (0, 0, 0, 0), f"{call} number {number}"
        assert device.retained() == (call in ENDING), f"{call} number {number}"
        device.forget()
    # What cannot be released, or is no arena's any more when it fails, is tried again. So is closing.
    assert told or call in ("cuMemRelease", "cuMemAddressFree", *ENDING)
    if call in MAKING:
        assert told == made


def pressed() -> None:
    """A driver finds too little, and gives up what it kept."""
    driver = device.StandInDriver(keep_bytes=4 * PAGE)
    handles: list[int] = []
    try:
        for _ in range(4):
            handles.append(driver.create(PAGE))
        while handles:
            driver.release(handles[-1])
            handles.pop()
        handles.append(driver.create(4 * PAGE))
    finally:
        for handle in handles:
            twice(lambda handle=handle: driver.release(handle))
        twice(driver.give_up_kept)


@pytest.mark.parametrize("code", [INVALID, OUT_OF_MEMORY], ids=["invalid", "out of memory"])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemRelease"])
def test_kept_memory_is_not_lost_where_giving_it_up_fails(call, code):
    for number in range(1, 7):
        device.reset(nbytes=4 * PAGE)
        device.fail(call, number, code)
        error = outcome_of(pressed)
        # The fifth handle is refused anyway, and asked for again. Releases behind the fourth are repeated.
        told = number <= 4 if call == "cuMemRelease" else (number, code) != (5, OUT_OF_MEMORY)
        assert (error is not None) == told, number
        del error
        gc.collect()
        assert device.left() == (0, 0, 0, 0), number
