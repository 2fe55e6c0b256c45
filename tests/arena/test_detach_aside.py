"""A detach in the background: nobody waits for it but who needs to know what is attached."""

import threading

import pytest
from vllm.v1.elastic_kv import turn
from vllm.v1.elastic_kv.page_driver import PageDriverError
from vllm.v1.elastic_kv.undo import ArenaBrokenError

from .arenas import CAPACITY, SEGMENTS, SETTLE_S, check, detach, fill, holds, holds_or_zero, make_arena, picture


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
    assert not begun.ended()
    assert begun.busy
    assert holds(begun, 3, 9)
    begun.driver.go_on()
    assert begun.settle(SETTLE_S)
    assert begun.ended()
    assert begun.attached == {0, 3}
    begun.let_go()
    check(begun)


def test_only_the_cut_is_done_at_once(faulty):
    """Steps write to what stays of a run, so it is copied before anything else can be done. The rest has time."""
    arena = make_arena(faulty)
    for run in (range(4), [4, 5], [6, 7]):
        arena.attach(run)
    for chunk in range(CAPACITY):
        fill(arena, chunk, 9)
    unmapped: dict[bool, set[int]] = {True: set(), False: set()}  # by whether it was at once: handles
    real = faulty.inner.unmap

    def noting(handle):
        unmapped[threading.current_thread() is threading.main_thread()].add(handle)
        real(handle)

    faulty.inner.unmap = noting
    cut = set(faulty.live) if faulty.divisible else set(list(sorted(faulty.live))[:SEGMENTS])
    arena.begin_detach([3, 4, 5, 6, 7])
    assert arena.settle(SETTLE_S)
    assert arena.ended()
    assert unmapped[True] == (set() if faulty.divisible else cut)
    assert len(unmapped[False]) == 3 * SEGMENTS
    assert all(holds(arena, chunk, 9) for chunk in range(3))
    arena.let_go()
    check(arena)
    arena.close()


def test_what_was_detached_is_held_until_every_rank_agrees(arena):
    """To attach it again needs no memory, so that nobody else can have taken it."""
    arena.attach(range(4))
    for chunk in range(4):
        fill(arena, chunk, 9)
    before = picture(arena)
    arena.begin_detach([1, 3])
    assert arena.settle(SETTLE_S)
    assert arena.ended()
    assert arena.attached == {0, 2}
    assert arena.unreleased_bytes == 2 * arena.chunk_bytes
    assert len(arena.driver.live) == arena.num_handles
    arena.driver.fail("create", always=True)
    arena.take_back([1, 3])
    assert picture(arena) == before
    assert holds(arena, 0, 9)
    assert holds(arena, 2, 9)
    assert all(holds_or_zero(arena, chunk, 9) for chunk in (1, 3))
    arena.driver.mend()
    detach(arena, [1, 3], aside=True)
    check(arena)


@pytest.mark.parametrize("again", ["attach", "detach", "prepare", "discard_prepared", "let_go"])
def test_every_other_change_lets_go(arena, again):
    arena.attach([0, 1])
    arena.begin_detach([0, 1])
    assert arena.settle(SETTLE_S)
    getattr(arena, again)(*([] if again in ("discard_prepared", "let_go") else [[]]))
    check(arena)


def test_taking_back_that_fails_leaves_them_held(arena):
    for run in ([0], [1], [2]):
        arena.attach(run)
    arena.begin_detach([0, 1])
    assert arena.settle(SETTLE_S)
    for number in range(1, 2 * SEGMENTS + 1):
        arena.driver.fail("map", number)
        with pytest.raises(PageDriverError, match="map"):
            arena.take_back([0, 1])
        assert arena.attached == {2}
        assert arena.unreleased_bytes == 2 * arena.chunk_bytes
    arena.take_back([0, 1])
    check(arena)
    assert arena.attached == {0, 1, 2}


class TestAttach:
    """Attaching in the background, as a grow does."""

    @pytest.mark.parametrize("prepared", [False, True])
    def test_it_does_not_wait(self, arena, prepared):
        if prepared:
            arena.prepare([1, 2])
        arena.driver.hold("map")
        arena.begin_attach([1, 2])
        assert not arena.ended()
        assert arena.busy
        arena.driver.go_on()
        assert arena.settle(SETTLE_S)
        assert arena.ended()
        assert arena.attached == {1, 2}
        assert holds(arena, 1, 0)
        check(arena)

    @pytest.mark.parametrize("call", ["create", "map", "make_usable"])
    def test_a_failure_is_told(self, arena, call):
        before = picture(arena)
        arena.driver.fail(call)
        arena.begin_attach([1, 2])
        assert arena.settle(SETTLE_S)
        with pytest.raises(PageDriverError, match=call):
            arena.ended()
        assert picture(arena) == before

    def test_misuse_is_told_at_once(self, arena):
        arena.attach([1])
        with pytest.raises(ValueError, match="already attached"):
            arena.begin_attach([1])
        assert arena.ended()


def test_nothing_begun_has_ended(arena):
    assert arena.ended()


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
    assert begun.ended()
    timer.join()
    assert begun.attached == seen


def test_misuse_is_told_at_once_and_changes_nothing(arena):
    arena.attach([0])
    before = picture(arena)
    with pytest.raises(ValueError, match="chunk 1 is not attached"):
        arena.begin_detach([0, 1])
    assert arena.ended()
    assert picture(arena) == before


def test_a_failure_is_told_as_often_as_one_asks(arena):
    arena.attach(range(4))
    arena.driver.fail("unmap", number=SEGMENTS)
    arena.begin_detach([1, 2])
    assert arena.settle(SETTLE_S)
    for _ in range(2):
        with pytest.raises(PageDriverError, match="unmap"):
            arena.ended()
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
        arena.ended()


def test_nobody_waits_for_ever(begun, monkeypatch):
    monkeypatch.setattr(turn, "_LONGEST_S", 0.01)
    for call in (lambda: begun.attach([5]), begun.close, lambda: begun.attached):
        with pytest.raises(ArenaBrokenError, match="still being attached or detached"):
            call()
    assert begun.driver.calls["unreserve"] == 0  # the range stays while something is done to it


def test_without_a_thread_it_is_done_at_once(arena, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    arena.attach([0, 1])
    assert arena.settle(SETTLE_S)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    arena.begin_detach([0])
    assert arena.ended()
    assert arena.attached == {1}
    arena.let_go()
    monkeypatch.undo()
    check(arena)
