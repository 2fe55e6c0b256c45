"""Growth that nobody asked for: in the scheduling pass that lacks the blocks."""

import queue

import pytest
from pool.pools import cached_then_freed
from vllm.v1.elastic_kv import allowance, controller, worker_side
from vllm.v1.engine import EngineCoreRequestType

from .engine import Engine
from .test_controller import transactions


@pytest.fixture
def engine():
    """Two ranks, 4 of 24 blocks resident in chunks of 2, which may grow by themselves."""
    engine = Engine(start=2, capacity=12, policy="on-demand")
    yield engine
    engine.close()


@pytest.fixture
def static():
    """The same, but with a size of its own."""
    engine = Engine(start=2, capacity=12)
    yield engine
    engine.close()


def need(engine, blocks: int, name: str = "new") -> int:
    """What `allocate_slots` does before it looks for blocks. Returns how many there are then."""
    request = next((request for request in engine.scheduler.running if request.request_id == name), object())
    engine.controller.make_room(request, blocks)
    engine.check()
    return engine.resident_blocks()


def test_it_grows_before_a_prefix_is_evicted(engine):
    """imp #1938: 5 of 8 sessions had to prefill again."""
    cached_then_freed(engine.pool, seed=1, count=3)
    assert need(engine, 2) == 6
    assert [block.block_id for block in engine.pool.get_new_blocks(2)] == [4, 5]
    assert engine.pool.counts().cached == 3
    assert transactions(engine) == {"done": 1}


def test_it_grows_for_a_request_that_runs(engine):
    """imp #1453: the pool grew only when a request was admitted."""
    engine.scheduler.run("first", 1)
    engine.scheduler.run("second", 2)
    assert need(engine, 1, "first") == 6


def test_it_does_not_grow_while_there_are_blocks(engine):
    assert need(engine, 3) == 4
    assert transactions(engine) == {}


def test_it_grows_to_the_capacity_and_no_further(engine):
    engine.scheduler.run("first", 3)
    assert need(engine, 100) == 24


def test_it_grows_by_an_eighth_at_least(engine):
    engine.resize(blocks=16)
    engine.controller.allowance.blocks = 24
    engine.scheduler.run("first", 15)
    assert need(engine, 1) == 18


def test_a_size_that_was_asked_for_is_the_limit(engine):
    engine.resize(blocks=6)
    engine.scheduler.run("first", 5)
    engine.scheduler.run("second", 0)
    assert need(engine, 4, "second") == 6
    engine.resize(blocks=8)
    assert need(engine, 2, "second") == 8


def test_it_grows_no_further_than_asked_for_when_others_run(static):
    static.scheduler.run("first", 2)
    static.scheduler.run("second", 1)
    assert need(static, 1, "second") == 4
    assert need(static, 3, "third") == 4


class TestTheOnlyRequest:
    """It would wait for ever, and everything behind it."""

    def test_one_that_waits(self, static):
        assert need(static, 9) == 10

    def test_one_that_runs(self, static):
        static.scheduler.run("first", 3)
        assert need(static, 2, "first") == 6

    def test_what_it_needed_comes_back(self, static):
        static.scheduler.run("first", 3)
        need(static, 2, "first")
        static.scheduler.blocks["first"] += static.pool.get_new_blocks(2)
        static.idle()
        assert static.resident_blocks() == 6
        static.scheduler.finish("first")
        assert static.controller.pending
        static.idle()
        assert static.resident_blocks() == 4
        assert static.controller.state()["blocks"]["allowed"] == 4
        static.check()

    def test_more_than_the_capacity(self, static):
        assert need(static, 100) == 24


def test_how_much_is_grown_at_once_is_learnt_from_such_growth_alone(engine):
    """An attach of pages that were made before takes a hundredth of the time."""
    at_once = engine.controller._resizer.ranks.in_a_slice(worker_side.attach)
    for blocks in (24, 2, 24, 2):
        engine.resize(blocks=blocks)
    assert engine.controller._resizer.ranks.in_a_slice(worker_side.attach) == at_once


def test_an_idle_engine_is_woken_to_try_again(engine, monkeypatch):
    monkeypatch.setattr(allowance, "RETRY_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(controller, "EngineCoreProc", type(engine))
    engine.input_queue = queue.Queue()
    engine.scheduler.run("first", 3)
    assert engine.resize(blocks=2, allow_preemption=False)["outcome"] in ("partial", "refused")
    engine.scheduler.finish("first")
    assert engine.input_queue.get(timeout=60) == (EngineCoreRequestType.WAKEUP, None)
    assert engine.controller.pending
    engine.idle()
    assert engine.resident_blocks() == 2


class TestNoMemory:
    """imp #1452: started while another process held the card, the pool stayed small for life."""

    def test_it_is_tried_again_later(self, engine):
        engine.drivers[1].out_of_memory = True
        engine.drivers[1].fail("create", always=True)
        engine.scheduler.run("first", 3)
        assert need(engine, 1, "first") == 4
        assert need(engine, 1, "first") == 4
        assert transactions(engine) == {"failed": 1}  # not with every step
        assert engine.controller.state()["last"]["reason"].startswith("rank 1: create ")
        engine.drivers[1].mend()
        engine.controller.allowance._retry_at = 0.0
        assert need(engine, 1, "first") == 6

    def test_a_grow_that_was_cut_short_goes_on(self, static):
        static.drivers[0].fail("create", always=True)
        assert static.resize(blocks=12)["outcome"] == "refused"
        static.drivers[0].mend()
        static.controller.allowance._retry_at = 0.0
        cached_then_freed(static.pool, seed=1, count=3)
        assert need(static, 2) == 6

    def test_waiting_times_grow_until_it_succeeds_or_somebody_asks(self, engine):
        engine.drivers[0].fail("create", always=True)
        engine.scheduler.run("first", 3)
        waits = []
        for _ in range(3):
            engine.controller.allowance._retry_at = 0.0
            need(engine, 1, "first")
            waits.append(engine.controller.allowance._retry_after)
        assert waits == [3600.0] * 3  # the longest
        engine.drivers[0].mend()


def test_not_while_a_resize_runs(engine):
    engine.launch_step()
    answer = engine.controller.resize({"blocks": 2})
    assert not answer.done()
    engine.controller.make_room(object(), 9)
    assert "attach" not in engine.model_executor.calls
    engine.end_step()
    engine.idle()
    assert answer.result()["to"] == 2
