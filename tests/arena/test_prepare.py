"""Pages that the background makes ahead of their use and gives back after it."""

import gc
import threading
import time

import pytest
from vllm.v1.elastic_kv import stock
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError

from .arenas import CAPACITY, SEGMENTS, SETTLE_S, check, fill, holds, make_arena, picture
from .drivers import resident_bytes


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "elastic-kv-pages"]


def test_attach_only_maps_what_is_prepared(arena):
    arena.prepare([1, 2, 5])
    check(arena, prepared=3)
    assert arena.attached == frozenset()
    arena.driver.calls.clear()
    arena.attach([1, 2, 5])
    assert set(arena.driver.calls) == {"map", "make_usable"}
    check(arena)
    assert all(holds(arena, chunk, 0) for chunk in (1, 2, 5))


@pytest.mark.parametrize("chunks", [[2], [1], [3], [1, 3], [2, 3, 4], [0, 2], [0, 1, 2, 3, 4], [6]], ids=str)
def test_any_part_of_what_is_prepared_can_be_attached(arena, chunks):
    arena.prepare([1, 2, 3])
    arena.attach(chunks)
    left = {1, 2, 3} - set(chunks)
    if not arena.driver.divisible and left != {1, 2, 3}:
        left = set()  # the run was not used, since it could not be cut
    check(arena, prepared=len(left))
    for chunk in chunks:
        assert holds(arena, chunk, 0)
        fill(arena, chunk, chunk + 1)
    rest = [chunk for chunk in range(CAPACITY) if chunk not in chunks]
    arena.attach(rest)
    check(arena)
    assert all(holds(arena, chunk, chunk + 1) for chunk in chunks)
    assert all(holds(arena, chunk, 0) for chunk in rest)


def test_prepare_and_detach_do_not_wait(arena):
    arena.attach([0])
    arena.attach([1])
    arena.driver.hold("create")
    arena.driver.hold("release")
    arena.prepare([2, 3])
    arena.detach([0])
    assert arena.busy
    assert arena.attached == {1}
    assert arena.unreleased_bytes == arena.chunk_bytes
    assert arena.prepared_bytes == 0
    assert not arena.settle(0.01)
    arena.driver.go_on()
    check(arena, prepared=2)


def test_attach_waits_for_pages_in_the_making(arena):
    arena.driver.hold("create")
    arena.prepare([1, 2])
    timer = threading.Timer(0.05, arena.driver.go_on)
    timer.start()
    arena.attach([1, 2])
    timer.join()
    check(arena)
    assert holds(arena, 2, 0)


@pytest.mark.parametrize("held", [False, True])
def test_discarded_pages_go_back(arena, held):
    arena.attach([0])
    before = picture(arena)
    if held:
        arena.driver.hold("create")
    arena.prepare([1, 2, 4])
    deadline = time.monotonic() + 60
    while held and arena.driver.calls["create"] == SEGMENTS and time.monotonic() < deadline:
        time.sleep(0.001)  # until the background is in the middle of it
    arena.discard_prepared()
    arena.driver.go_on()
    assert picture(arena) == before
    assert arena.driver.calls["create"] <= 4 * SEGMENTS
    arena.attach([1, 2])
    check(arena)


def test_what_was_discarded_can_be_prepared_again_at_once(arena):
    arena.driver.hold("create")
    arena.prepare([1, 2])
    arena.discard_prepared()
    arena.prepare([2, 3])
    arena.driver.go_on()
    arena.attach([1, 2])
    check(arena, prepared=1 if arena.driver.divisible else 0)


def test_preparing_twice_is_preparing_once(arena):
    arena.prepare([1, 2])
    arena.prepare([2, 3])
    check(arena, prepared=3)
    arena.prepare([])
    check(arena, prepared=3)


def test_misuse_changes_nothing(arena):
    arena.attach([0])
    before = picture(arena)
    for chunks, message in ([1, 1], "twice"), ([0], "already attached"), ([CAPACITY], "capacity"), ([-1], "capacity"):
        with pytest.raises(ValueError, match=message):
            arena.prepare(chunks)
        assert picture(arena) == before
    arena.prepare([1])
    with pytest.raises(ValueError, match="not attached"):
        arena.detach([1])


@pytest.mark.parametrize("number", [1, SEGMENTS, SEGMENTS + 1])
def test_a_failure_in_the_background_is_told_once(arena, number):
    before = picture(arena)
    arena.driver.fail("create", number)
    arena.prepare([1, 4])
    assert arena.settle(SETTLE_S)
    with pytest.raises(PageDriverError, match=r"create .*made to fail"):
        arena.attach([1, 4])
    assert arena.attached == frozenset()
    arena.attach([1, 4])
    check(arena)
    arena.detach([1, 4])
    assert picture(arena) == before


def test_a_failure_in_the_background_is_forgotten_when_prepared_again(arena):
    arena.driver.fail("create")
    arena.prepare([1])
    assert arena.settle(SETTLE_S)
    arena.prepare([1])
    arena.attach([1])
    check(arena)


def test_more_than_the_device_has_is_not_prepared(arena, monkeypatch):
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: 2 * arena.chunk_bytes)
    calls = dict(arena.driver.calls)
    with pytest.raises(OutOfMemoryError, match=f"{2 * arena.chunk_bytes} bytes are available"):
        arena.prepare([0, 1, 2])
    assert dict(arena.driver.calls) == calls
    check(arena)


def test_memory_promised_to_pages_in_the_making_is_not_promised_again(arena, monkeypatch):
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: 3 * arena.chunk_bytes)
    arena.driver.hold("create")
    arena.prepare([0, 1])
    with pytest.raises(OutOfMemoryError, match=f"{arena.chunk_bytes} bytes are available"):
        arena.prepare([2, 3])
    arena.driver.go_on()
    arena.attach([0, 1])
    check(arena)


def test_memory_that_is_gone_when_its_turn_comes(arena, monkeypatch):
    """Another process took it: no page may be touched then, since the system could end the process."""
    arena.driver.hold("release")
    arena.attach([7])
    arena.detach([7])
    arena.prepare([0])
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: 0)
    arena.driver.go_on()
    with pytest.raises(OutOfMemoryError, match="0 bytes are available"):
        arena.attach([0])
    check(arena)


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_on_its_way_back_counts(arena, monkeypatch, ahead):
    """A grow right after a shrink is not refused because the pages are not free yet."""
    budget = 4 * arena.chunk_bytes
    used = lambda: sum(dict(arena.driver.inner._ledger._sizes).values())  # noqa: E731
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: budget - used())
    arena.attach([3])
    arena.attach([0, 1, 2])
    arena.driver.hold("release")
    arena.detach([0, 1, 2])
    timer = threading.Timer(0.05, arena.driver.go_on)
    timer.start()
    if ahead:
        arena.prepare([4, 5, 6])
    arena.attach([4, 5, 6])
    timer.join()
    check(arena)


def test_memory_that_does_not_come_back_is_out_of_memory(arena, monkeypatch):
    monkeypatch.setattr(arena.driver, "available_bytes", lambda: arena.chunk_bytes)
    arena.attach([0])
    arena.driver.fail("release", always=True)
    arena.detach([0])
    with pytest.raises(OutOfMemoryError, match=f"{arena.chunk_bytes} bytes are available"):
        arena.attach([0, 1])
    assert arena.settle(SETTLE_S)
    assert not arena.busy


def test_nobody_waits_for_ever_for_pages(arena, monkeypatch):
    """A driver that hangs is told; the pages can be used when they are there."""
    monkeypatch.setattr(stock, "_MAKING_S", 0.01)
    arena.driver.hold("create")
    arena.prepare([1])
    with pytest.raises(PageDriverError, match="still being made after 0 s"):
        arena.attach([1])
    assert arena.attached == frozenset()
    arena.driver.go_on()
    assert arena.settle(SETTLE_S)
    arena.attach([1])
    check(arena)


def test_close_takes_everything_along(faulty):
    arena = make_arena(faulty)
    arena.attach([0, 1, 2])
    arena.prepare([3, 4])
    arena.detach([1])
    arena.prepare([6])
    arena.close()
    assert not faulty.live
    assert not arena.busy
    assert not background_threads()
    arena.close()


@pytest.mark.parametrize("held", ["create", "release"])
def test_close_waits_for_the_background(faulty, held):
    arena = make_arena(faulty)
    arena.attach([0, 2])
    arena.attach([1])
    faulty.hold(held)
    arena.prepare([3, 4])
    arena.detach([1])
    timer = threading.Timer(0.05, faulty.go_on)
    timer.start()
    arena.close()
    timer.join()
    assert not faulty.live
    assert not background_threads()


def test_the_memory_goes_with_the_last_view_also_if_the_background_drops_it(faulty):
    """Garbage is collected on any thread."""
    arena = make_arena(faulty)
    arena.attach([0, 1])
    views = [arena.owned_tensor()]
    arena.prepare([2])
    arena._stock.background.submit(views.clear)
    arena._stock.background.submit(gc.collect)
    assert arena.settle(SETTLE_S)
    assert not faulty.live
    assert arena.nbytes == 0


def test_closing_in_the_middle_of_a_job_waits_for_its_end(faulty, caplog):
    arena = make_arena(faulty)
    arena.attach([0])
    arena.attach([1])
    views, real = [arena.owned_tensor()], faulty.release

    def release(handle: int) -> None:
        views.clear()
        real(handle)

    faulty.release = release
    arena.detach([0])
    assert arena.settle(SETTLE_S)
    assert not faulty.live
    assert arena.nbytes == 0
    assert not caplog.text


def test_handles_of_neighbours_are_common(arena):
    arena.attach(range(CAPACITY))
    assert arena.num_handles == SEGMENTS
    arena.detach([3])
    check(arena)
    assert arena.num_handles == SEGMENTS * 2
    arena.driver.calls.clear()
    arena.detach([0, 1, 2])
    assert arena.driver.calls["unmap"] == SEGMENTS
    assert arena.driver.calls["split"] == 0
    check(arena)


@pytest.mark.parametrize("driver_name", ["host", "indivisible"])
@pytest.mark.parametrize("chunks", ["[2]", "[0]", "[1, 2]", "range(4)"])
def test_touching_a_detached_chunk_ends_the_process(python_without_vllm, chunks, driver_name):
    """At once, whether its pages are given back already or not."""
    result = python_without_vllm(f"""
import ctypes, threading
from elastic_kv.arena import KVArena
from elastic_kv.host_driver import HostPageDriver
from elastic_kv.layout import Segment
class Driver(HostPageDriver):
    divisible = {driver_name == "host"}
    def release(self, handle):
        if threading.current_thread() is not threading.main_thread():  # not what a cut replaces
            threading.Event().wait()  # never
arena = KVArena(Driver(), [Segment(0, 1 << 20), Segment(4 << 20, 1 << 20)], 1, 4)
arena.attach(range(4))
ctypes.memset(arena.address, 1, arena.nbytes)
arena.detach({chunks})
for chunk in sorted(arena.attached):
    for segment in arena.segments:
        ctypes.memset(arena.address + segment.offset + chunk * (1 << 20), 1, 1 << 20)
print("before", flush=True)
ctypes.string_at(arena.address + (4 << 20) + list({chunks})[-1] * (1 << 20) + 4096 * 17, 1)
print("after", flush=True)
""")
    assert result.returncode == -11, result.stderr
    assert result.stdout.split() == ["before"]


def test_the_memory_of_a_detached_part_goes_back(driver):
    """Every second chunk of a run, whose pieces are not whole huge pages."""
    if driver.device != "host":
        pytest.skip("the pages do not count as the process's")
    arena = make_arena(driver, strides=[192 << 10] * 3, chunk_blocks=1, capacity=64)
    empty = resident_bytes()
    arena.attach(range(64))
    full = resident_bytes()
    assert full - empty > 0.9 * arena.nbytes
    arena.detach(range(0, 64, 2))
    assert arena.settle(SETTLE_S)
    assert full - resident_bytes() > 0.9 * arena.nbytes / 2
    arena.detach(range(1, 64, 2))
    assert arena.settle(SETTLE_S)
    assert resident_bytes() - empty < 0.1 * arena.nbytes
    arena.close()
