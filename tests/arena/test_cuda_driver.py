"""What is CUDA's own, over the stand-in: errors, devices, threads and contexts, kept memory, counts of calls."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv import cuda_driver, worker_side
from vllm.v1.elastic_kv.layout import ElasticKVLayout, Segment
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError, check_driver, make_driver

from .arenas import SETTLE_S, detach, fill, holds, make_arena

PAGE = 4096
INVALID, OUT_OF_MEMORY = 1, 2
NONE, FIRST, SECOND = -1, 0, 1  # devices whose context a thread has

pytestmark = pytest.mark.usefixtures("clean_device")


@pytest.fixture
def driver():
    return device.StandInDriver()


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


def test_no_device():
    device.fail("cuInit", 1, 100)
    with pytest.raises(ValueError, match=r"^The page driver 'cuda' needs an NVIDIA GPU, and the driver finds none\.$"):
        device.StandInDriver()


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


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1,0", [1, 0]),
        ("1", [1]),
        ("0", [0]),
        ("MIG-11111111-0000-4000-8000-000000000000", [1]),
        ("MIG-1111,GPU-0000", [1, 0]),
        ("1,2,0", [1]),
    ],
    ids=str,
)
def test_a_device_s_number_counts_what_is_visible(monkeypatch, visible, devices):
    """As torch's index does: nobody here reads the names, which may be numbers or identifiers, of slices as well.

    Ray gives each worker a CUDA_VISIBLE_DEVICES; the machine's numbers do not matter then.
    """
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(cuda_driver, "CudaPageDriver", device.StandInDriver)
    for index, machine_s in enumerate(devices):
        driver = worker_side._driver("cuda", torch.device("cuda", index))
        assert driver.device == f"cuda:{index}"
        handle = driver.create(PAGE)
        assert [device.library().stand_in_used(number) for number in (0, 1)] == [
            PAGE * (number == machine_s) for number in (0, 1)
        ]
        driver.release(handle)
    with pytest.raises(ValueError, match=f"finds {len(devices)} devices, so that there is no device {len(devices)}"):
        worker_side._driver("cuda", torch.device("cuda", len(devices)))


def test_two_engines_on_one_device():
    """Each has what the other leaves. One that finds too little changes nothing, and can have it later."""
    first, second = (make_arena(device.StandInDriver()) for _ in range(2))
    device.reset(nbytes=8 * first.chunk_bytes)
    first.attach(range(4))
    fill(first, 3, 3)
    with pytest.raises(OutOfMemoryError, match=f"{4 * first.chunk_bytes} bytes are available"):
        second.attach(range(5))
    assert second.attached == frozenset()
    second.attach(range(2))
    first.detach([0, 1, 2])
    assert first.settle(SETTLE_S)
    second.attach(range(2, 7))
    assert holds(first, 3, 3)
    first.close()
    second.close()


def test_a_limit_that_the_free_memory_does_not_show():
    """As MPS can set one, or where another process was quicker: nothing is changed, and it can be had later."""
    arena = make_arena(device.StandInDriver())
    arena.attach([0])
    device.fail("cuMemCreate", 2, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError, match=r"cuMemCreate .*CUDA_ERROR_OUT_OF_MEMORY"):
        arena.attach([1, 2])
    assert arena.attached == {0}
    assert arena.settle(SETTLE_S)
    assert arena.driver.total_bytes() - arena.driver.available_bytes() == arena.chunk_bytes
    arena.attach([1, 2])
    arena.close()


def test_memory_that_the_driver_is_slow_to_take_back_is_waited_for():
    arena = make_arena(device.StandInDriver())
    device.reset(nbytes=4 * arena.chunk_bytes)
    arena.attach([0, 1])
    arena.attach([2, 3])
    device.delay("cuMemRelease")
    arena.detach([2, 3])
    arena.attach([4, 5])
    assert arena.attached == {0, 1, 4, 5}
    arena.close()


def on_a_new_thread(function, context: int = NONE):
    """What the function returns or raises on a thread that begins with a device's context, and must end with it."""
    outcome: list = []

    def run() -> None:
        device.enter(context)
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))
        outcome.append(device.current())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result, error), left_with = outcome
    if error is not None:
        raise error
    assert left_with == context or (context == NONE and left_with == FIRST)
    return result


@pytest.mark.parametrize("context", [NONE, FIRST, SECOND], ids=["no context", "its own", "another device's"])
def test_calls_may_come_from_different_threads_one_at_a_time(context):
    """As where a detach runs in the worker's background while the engine steps: no call lacks a context."""
    driver = on_a_new_thread(device.StandInDriver, context)
    arena = on_a_new_thread(lambda: make_arena(driver), context)
    on_a_new_thread(lambda: arena.attach([0, 1, 2, 3]), context)
    on_a_new_thread(lambda: arena.prepare([5, 6]), context)
    on_a_new_thread(lambda: [fill(arena, chunk, chunk + 1) for chunk in range(4)], context)
    device.submit()
    on_a_new_thread(lambda: arena.detach([0, 2]), context)
    on_a_new_thread(lambda: arena.attach([5, 2]), context)
    assert on_a_new_thread(lambda: [holds(arena, chunk, chunk + 1) for chunk in (1, 3)], context) == [True, True]
    assert holds(arena, 2, 0)
    assert on_a_new_thread(arena.reported_bytes, context) == arena.resident_bytes == 4 * arena.chunk_bytes
    on_a_new_thread(arena.close, context)
    assert on_a_new_thread(lambda: arena.settle(SETTLE_S), context)


def test_what_is_asked_of_a_context_is_asked_of_the_driver_s_own():
    """A thread of another device: its memory is not told, its work is not waited for, and it has its context still."""
    first, second = device.StandInDriver(FIRST), device.StandInDriver(SECOND)
    handle, space = second.create(PAGE), second.reserve(PAGE)
    second.map(space, handle)
    device.submit(SECOND)
    device.enter(FIRST)
    first.synchronize()
    assert second.available_bytes() == second.total_bytes() - PAGE
    assert first.available_bytes() == first.total_bytes()
    second.synchronize()
    second.unmap(handle)
    second.release(handle)
    second.unreserve(space, PAGE)
    assert device.current() == FIRST


def test_a_context_goes_with_the_last_driver_and_so_does_what_it_kept():
    driver = device.StandInDriver(keep_bytes=4 * PAGE)
    driver.release(driver.create(2 * PAGE))
    assert device.retained() == 1
    assert device.left()[2:] == (1, 2 * PAGE)
    device.enter(NONE)  # garbage is collected on any thread
    del driver
    gc.collect()
    assert device.retained() == 0
    assert device.current() == NONE


@pytest.mark.parametrize("shareable", [False, True])
def test_handles_can_be_exported_where_that_is_asked_for(shareable):
    driver = device.StandInDriver(shareable=shareable)
    driver.release(driver.create(PAGE))
    assert device.library().stand_in_shareable() == shareable


@pytest.mark.parametrize(
    ("raised", "kind"), [(torch.OutOfMemoryError, OutOfMemoryError), (RuntimeError, PageDriverError)]
)
def test_a_failure_of_torch_s_is_a_page_driver_s(monkeypatch, raised, kind):
    """Zeroing and copying are torch's. What they could not do is undone."""
    arena = make_arena(device.StandInDriver())

    def fails(*_):
        raise raised("made to fail")

    with monkeypatch.context() as patched:
        patched.setattr(arena.driver, "_zero", fails)
        with pytest.raises(kind, match=rf"zero_ of \d+ bytes on cuda:0 failed: {raised.__name__} \(made to fail\)"):
            arena.attach([0, 1])
    assert arena.attached == frozenset()
    arena.attach([0, 1])
    fill(arena, 0, 5)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", fails)
        with pytest.raises(kind, match=rf"copy_ of \d+ bytes on cuda:0 failed: {raised.__name__}"):
            arena.detach([1])
    assert arena.attached == {0, 1}
    assert holds(arena, 0, 5)
    arena.close()


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


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("chunks", [[1], [3, 4]], ids=["a cut", "a whole run"])
def test_an_unmap_that_comes_too_early_is_seen_and_the_arena_makes_none(monkeypatch, chunks, aside):
    """Work is in flight. A driver that does not wait for it loses the device, so it is the arena's wait that counts."""
    arena = make_arena(device.StandInDriver())
    arena.attach([0, 1, 2])
    arena.attach([3, 4])
    with monkeypatch.context() as patched:
        patched.setattr(arena.driver, "synchronize", lambda: None)
        device.submit()
        with pytest.raises(PageDriverError, match=r"cuMemUnmap .*CUDA_ERROR_ILLEGAL_ADDRESS"):
            detach(arena, chunks, aside)
    device.reset()
    device.submit()
    detach(arena, chunks, aside)
    assert arena.attached == set(range(5)) - set(chunks)
    arena.close()


def test_without_the_wait_the_device_is_lost():
    driver = device.StandInDriver()
    handle, space = driver.create(PAGE), driver.reserve(PAGE)
    driver.map(space, handle)
    device.submit()
    with pytest.raises(PageDriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.unmap(handle)
    device.reset()
    driver.unmap(handle)
    driver.release(handle)
    driver.unreserve(space, PAGE)


@pytest.mark.parametrize("chunks", [1, 8, 64])
@pytest.mark.parametrize("segments", [1, 4, 32])
@pytest.mark.parametrize("new_thread", [False, True])
def test_calls_of_an_attach_do_not_depend_on_its_size(segments, chunks, new_thread):
    """At most three for each segment, and a constant."""
    arena = make_arena(device.StandInDriver(), strides=[PAGE] * segments, chunk_blocks=1, capacity=65)
    device.reset()
    if new_thread:
        on_a_new_thread(lambda: arena.attach(range(chunks)))
    else:
        arena.attach(range(chunks))
    counts = device.all_calls()
    each = dict.fromkeys(("cuMemCreate", "cuMemMap", "cuMemSetAccess"), segments)
    assert {call: counts.pop(call) for call in each} == each
    assert sum(counts.values()) <= 8, counts
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

    def test_others_do_not_have_it_until_it_is_given_up(self):
        device.reset(nbytes=4 * PAGE)
        first, second = device.StandInDriver(keep_bytes=4 * PAGE), device.StandInDriver()
        first.release(first.create(4 * PAGE))
        assert (first.available_bytes(), second.available_bytes()) == (4 * PAGE, 0)
        assert first.give_up_kept() == 4 * PAGE
        second.release(second.create(4 * PAGE))


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


@pytest.mark.parametrize("aside", [False, True])
def test_whole_runs_can_go_where_others_cannot_be_cut(aside):
    """One detach is all or nothing. The arena tells what can go by itself, which makes the memory for the rest."""
    arena = make_arena(device.StandInDriver())
    device.reset(nbytes=4 * arena.chunk_bytes)
    arena.attach([0, 1])
    arena.attach([2, 3])
    fill(arena, 0, 7)
    with pytest.raises(OutOfMemoryError, match="0 bytes are available"):
        detach(arena, [1, 2, 3], aside)
    assert arena.attached == {0, 1, 2, 3}
    assert arena.whole([1]) == []
    assert arena.whole([3, 1, 2]) == [2, 3]
    detach(arena, [2, 3], aside)
    detach(arena, [1], aside)
    assert arena.attached == {0}
    assert holds(arena, 0, 7)
    arena.close()


@pytest.mark.parametrize("name", ["Residency", "attach"])
def test_a_cache_that_a_worker_cannot_have_leaves_nothing(monkeypatch, name):
    def fails(*_):
        raise torch.OutOfMemoryError("made to fail")

    layout = ElasticKVLayout(base_blocks=1, start_blocks=2, capacity_blocks=4, chunk_blocks=1, driver="cuda")
    monkeypatch.setattr(worker_side, "segments_of", lambda *_: [Segment(0, PAGE), Segment(4 * PAGE, PAGE)])
    monkeypatch.setattr(worker_side, "_driver", lambda *_: device.StandInDriver())
    monkeypatch.setattr(worker_side if name == "Residency" else worker_side.KVArena, name, fails)
    config = SimpleNamespace(elastic_kv=layout, kv_cache_tensors=[])
    with pytest.raises(torch.OutOfMemoryError):
        worker_side.allocate(config, torch.device("cuda", 0))
    assert device.left() == (0, 0, 0, 0)


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


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_rocm_is_refused(monkeypatch, name):
    """Before anything is loaded: where the engine's configuration is made."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for function in (check_driver, make_driver):
        with pytest.raises(ValueError, match=r"^The elastic KV cache has no page driver for ROCm: "):
            function(name, "cuda")


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
