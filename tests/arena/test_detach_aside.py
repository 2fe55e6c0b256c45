"""A detach in the background: nobody waits for it but who needs to know what is attached."""

import threading

import pytest
from vllm.v1.elastic_kv import arena as arena_module
from vllm.v1.elastic_kv.arena import ArenaBrokenError
from vllm.v1.elastic_kv.page_driver import PageDriverError

from .arenas import SEGMENTS, SETTLE_S, check, detach, fill, holds, make_arena, picture


@pytest.fixture
def begun(arena):
    """Chunks 0 to 3, of which 1 and 2 are being detached and do not get on. They are a run of their own."""
    for run in ([0], [1, 2], [3]):
        arena.attach(run)
    for chunk in (0, 3):
        fill(arena, chunk, 9)
    arena.driver.hold("unmap")
    arena.begin_detach([1, 2])
    return arena


def test_it_does_not_wait(begun):
    assert not begun.end_detach()
    assert begun.busy
    assert holds(begun, 3, 9)
    begun.driver.go_on()
    assert begun.settle(SETTLE_S)
    assert begun.end_detach()
    assert begun.attached == {0, 3}
    check(begun)


def test_nobody_writes_meanwhile_to_what_is_copied(faulty):
    """Where a handle cannot be cut, what stays of a run is copied before anything else can be done."""
    arena = make_arena(faulty)
    arena.attach(range(4))
    for chunk in range(4):
        fill(arena, chunk, 9)
    threads = []
    for call in ("unmap", "synchronize"):
        real = getattr(faulty.inner, call)

        def noting(*arguments, real=real):
            threads.append(threading.current_thread() is threading.main_thread())
            return real(*arguments)

        setattr(faulty.inner, call, noting)
    arena.begin_detach([1, 2])
    if not faulty.divisible:
        assert arena.end_detach()
    assert arena.settle(SETTLE_S)
    assert arena.end_detach()
    assert set(threads) == {not faulty.divisible}
    assert holds(arena, 0, 9)
    assert holds(arena, 3, 9)
    threads.clear()
    arena.begin_detach([0, 3])
    assert arena.settle(SETTLE_S)
    assert arena.end_detach()
    assert set(threads) == {False}
    arena.close()


def test_nothing_begun_has_ended(arena):
    assert arena.end_detach()


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda arena: arena.attach([1]), {0, 1, 3}),
        (lambda arena: arena.detach([0]), {3}),
        (lambda arena: detach(arena, [0], aside=True), {3}),
        (lambda arena: arena.prepare([1]), {0, 3}),
        (lambda arena: arena.discard_prepared(), {0, 3}),
        (lambda arena: arena.attached, {0, 3}),
        (lambda arena: arena.resident_bytes, {0, 3}),
        (lambda arena: arena.num_handles, {0, 3}),
        (lambda arena: arena.reported_bytes(), {0, 3}),
        (lambda arena: arena.close(), set()),
    ],
    ids=["attach", "detach", "begin_detach", "prepare", "discard", "attached", "bytes", "handles", "reported", "close"],
)
def test_what_changes_or_tells_the_chunks_waits(begun, look, seen):
    timer = threading.Timer(0.05, begun.driver.go_on)
    timer.start()
    look(begun)
    assert begun.end_detach()
    timer.join()
    assert begun.attached == seen


def test_misuse_is_told_at_once_and_changes_nothing(arena):
    arena.attach([0])
    before = picture(arena)
    with pytest.raises(ValueError, match="chunk 1 is not attached"):
        arena.begin_detach([0, 1])
    assert arena.end_detach()
    assert picture(arena) == before


def test_a_failure_is_told_as_often_as_one_asks(arena):
    arena.attach(range(4))
    arena.driver.fail("unmap", number=SEGMENTS)
    arena.begin_detach([1, 2])
    assert arena.settle(SETTLE_S)
    for _ in range(2):
        with pytest.raises(PageDriverError, match="unmap"):
            arena.end_detach()
    assert arena.attached == {0, 1, 2, 3}
    arena.detach([1, 2])
    check(arena)


def test_what_cannot_be_undone_is_told(faulty):
    arena = make_arena(faulty)
    for run in ([0], [1, 2], [3]):
        arena.attach(run)
    faulty.fail("unmap", number=SEGMENTS)
    faulty.fail("map")
    arena.begin_detach([1, 2])
    assert arena.settle(SETTLE_S)
    with pytest.raises(ArenaBrokenError, match="could not be undone: map"):
        arena.end_detach()


def test_nobody_waits_for_ever(begun, monkeypatch):
    monkeypatch.setattr(arena_module, "_CLOSE_S", 0.01)
    for call in (lambda: begun.attach([5]), begun.close, lambda: begun.attached):
        with pytest.raises(ArenaBrokenError, match="still being detached"):
            call()
    assert begun.driver.calls["unreserve"] == 0  # the range stays while something is done to it


def test_without_a_thread_it_is_done_at_once(arena, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    arena.attach([0, 1])
    assert arena.settle(SETTLE_S)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena.begin_detach([0])
    assert arena.end_detach()
    assert arena.attached == {1}
    monkeypatch.undo()
    check(arena)
