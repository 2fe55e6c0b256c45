"""Shrinks that have to move blocks or to preempt requests, over several ranks."""

import random

import pytest
from pool.pools import reads, write
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.elastic_kv import moves as moves_module
from vllm.v1.elastic_kv import ranks as ranks_module
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.page_driver import PageDriverError
from vllm.v1.elastic_kv.ranks import RanksDisagreeError

from .engine import Engine
from .test_controller import brief, transactions


@pytest.fixture
def engine():
    """Three ranks, 16 of 16 blocks resident in chunks of 2, base 2."""
    engine = Engine(ranks=3, start=8, capacity=8)
    yield engine
    engine.close()


def occupy(engine, *block_ids: int) -> list:
    """Give exactly these blocks to a request that every rank has in its table, and fill them."""
    blocks = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    wanted = sorted((block for block in blocks if block.block_id in block_ids), key=lambda block: block.block_id)
    engine.pool.free_blocks(reversed([block for block in blocks if block.block_id not in block_ids]))
    for rank, worker in enumerate(engine.model_executor.workers):
        worker.model_runner.table[0, : len(block_ids)] = sorted(block_ids)
        worker.model_runner.requests["request"] = type("", (), {"block_ids": (sorted(block_ids),)})()
        for block_id in block_ids:
            write(engine.arenas[rank], block_id, block_id + 40 * rank)
    return wanted


def assert_follows(engine, blocks: list, marks: list[int]) -> None:
    """On every rank the tables name the blocks where they are now, and what was in them is there."""
    ids = [block.block_id for block in blocks]
    for rank, worker in enumerate(engine.model_executor.workers):
        assert worker.model_runner.table[0, : len(ids)].tolist() == ids
        assert worker.model_runner.table[1].tolist() == [0] * 8
        assert list(worker.model_runner.requests["request"].block_ids[0]) == ids
        for block_id, mark in zip(ids, marks, strict=True):
            assert reads(engine.arenas[rank], block_id, mark + 40 * rank)


def test_scattered_blocks_move(engine):
    """kvcached #359: what stays is the live blocks, rounded up to chunks."""
    marks = [3, 6, 9, 15]
    blocks = occupy(engine, *marks)
    foreseen = engine.resize(blocks=6, dry_run=True)
    assert_follows(engine, blocks, marks)
    answer = engine.resize(blocks=6)
    assert brief(answer, moved=2) == ("done", 16, 6, 0)  # chunks 2, 5 and 6 are free
    assert answer["moved_bytes"] == 2 * engine.controller.state()["bytes"]["per_block"]
    costs = ("outcome", "to", "evicted", "moved", "moved_bytes", "preempted", "reason")
    assert {name: foreseen[name] for name in costs} == {name: answer[name] for name in costs}
    assert_follows(engine, blocks, marks)
    assert max(block.block_id for block in blocks) < 16
    engine.check()


def test_moves_wait_for_the_steps_in_flight_and_hold_up_new_ones(engine):
    blocks = occupy(engine, 9, 15)
    engine.launch_step()
    answer = engine.controller.resize({"blocks": 4})
    for _ in range(20):
        if not engine.controller.holds_steps:  # the engine goes on
            engine.batch_queue.pop()[0].set_result(None)
            engine.launch_step()
        engine.controller.poll()
    assert engine.controller.holds_steps
    assert "move" not in engine.model_executor.calls
    assert [block.block_id for block in blocks] == [9, 15]
    engine.end_step()
    engine.idle()
    assert not engine.controller.holds_steps
    assert brief(answer.result(), moved=1) == ("done", 16, 4, 0)
    assert_follows(engine, blocks, [9, 15])
    engine.check()


def test_some_at_a_time(engine, monkeypatch):
    monkeypatch.setattr(ranks_module, "SLICE_MS", 1e-9)
    marks = [5, 7, 9, 11, 13]
    blocks = occupy(engine, *marks)
    assert brief(engine.resize(blocks=6), moved=3) == ("done", 16, 6, 0)  # chunks 1 and 7 are free
    assert engine.model_executor.calls.count("move") == 3
    assert_follows(engine, blocks, marks)
    engine.check()


@pytest.mark.parametrize("step", ["copy", "repoint"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_move(engine, monkeypatch, rank, step):
    """The others take their tables back; the old blocks are as they were."""
    marks = [5, 15]
    blocks = occupy(engine, *marks)
    real = {"copy": moves_module.copy_blocks, "repoint": moves_module.repoint}[step]
    broken = [engine.arenas[rank], engine.model_executor.workers[rank].model_runner]

    def fails(subject, *arguments):
        if broken and any(subject is one for one in broken):
            broken.clear()
            raise PageDriverError("synchronize", "made to fail", 0, "host")
        return real(subject, *arguments)

    monkeypatch.setattr(worker_side, "copy_blocks" if step == "copy" else "repoint", fails)
    answer = engine.resize(blocks=4)
    assert answer["outcome"] in ("partial", "refused")
    assert answer["reason"].startswith(f"rank {rank}: synchronize ")
    assert answer["moved"] == 0
    assert_follows(engine, blocks, marks)
    engine.check()
    assert transactions(engine) == {"failed": 1}
    assert engine.resize(blocks=4)["outcome"] == "done"
    assert_follows(engine, blocks, marks)
    engine.check()


def test_ranks_whose_tables_differ_end_the_engine(engine, monkeypatch):
    occupy(engine, 5, 15)
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise PageDriverError("synchronize", "made to fail", 0, "host")

    monkeypatch.setattr(worker_side, "repoint", fails)
    with pytest.raises(RanksDisagreeError, match="could not be undone on rank 0"):
        engine.resize(blocks=4)


def test_a_request_that_is_aborted_between_two_moves(engine, monkeypatch):
    monkeypatch.setattr(ranks_module, "SLICE_MS", 1e-9)
    blocks = occupy(engine, 5, 7, 9, 11, 13)
    answer = engine.controller.resize({"blocks": 6})
    while engine.model_executor.calls.count("move") < 2:
        engine.controller.poll()
    engine.pool.free_blocks(reversed(blocks))
    engine.pool.check()
    engine.idle()
    assert answer.result()["outcome"] == "done"
    assert answer.result()["moved"] == 2
    engine.check()


def test_time_that_is_up_between_two_moves(engine, monkeypatch):
    monkeypatch.setattr(ranks_module, "SLICE_MS", 1e-9)
    marks = [5, 7, 9, 11, 13]
    blocks = occupy(engine, *marks)
    answer = engine.controller.resize({"blocks": 6, "timeout_s": 60.0})
    while engine.model_executor.calls.count("move") < 2:
        engine.controller.poll()
    engine.controller._queue[0].asked_at -= 60.0
    engine.idle()
    assert answer.result()["outcome"] == "partial"
    assert "not done within 60 s" in answer.result()["reason"]
    assert_follows(engine, blocks, marks)
    engine.check()


class TestPreemption:
    def test_the_last_requests_go(self, engine):
        for name in ("first", "second", "third"):
            engine.scheduler.run(name, 4)
        engine.scheduler.prev_step_scheduled_req_ids |= {"first", "second", "third"}
        foreseen = engine.resize(blocks=8, dry_run=True)
        assert (foreseen["outcome"], foreseen["to"], foreseen["preempted"]) == ("done", 8, 2)
        assert len(engine.scheduler.running) == 3
        answer = engine.resize(blocks=8)
        assert (answer["outcome"], answer["to"], answer["preempted"]) == ("done", 8, 2)
        assert [request.request_id for request in engine.scheduler.running] == ["first"]
        assert [request.request_id for request in engine.scheduler.waiting] == ["second", "third"]
        # A runner that takes them for requests that went on would not be told their tokens.
        assert engine.scheduler.prev_step_scheduled_req_ids == {"first"}
        engine.check()

    def test_with_priorities_the_least_important_goes(self, engine):
        engine.scheduler.policy = SchedulingPolicy.PRIORITY
        for name, priority, arrival in (("old", 2, 1.0), ("urgent", 0, 3.0), ("late", 2, 2.0)):
            engine.scheduler.run(name, 4, priority=priority, arrival_time=arrival)
        assert engine.resize(blocks=10)["preempted"] == 1
        assert [request.request_id for request in engine.scheduler.waiting] == ["late"]

    def test_shared_blocks_come_free_with_the_last_of_their_requests(self, engine):
        engine.scheduler.run("first", 8)
        engine.scheduler.run("second", 1)
        shared = engine.scheduler.blocks["first"][:6]
        engine.pool.touch(shared)
        engine.scheduler.blocks["second"] = shared + engine.scheduler.blocks["second"]
        # 9 blocks in use, room for 7: the second frees one block of its own, so the first has to go too.
        answer = engine.resize(blocks=8)
        assert answer["preempted"] == 2
        assert engine.pool.counts().used == 0

    def test_not_where_it_is_not_allowed(self, engine):
        engine.scheduler.run("first", 9)
        for dry_run in (True, False):
            answer = engine.resize(blocks=4, allow_preemption=False, dry_run=dry_run)
            assert (answer["outcome"], answer["to"], answer["preempted"]) == ("partial", 10, 0)
            assert answer["reason"] == "live blocks need the room of 3 more chunks"
        engine.check()

    def test_a_shrink_that_was_stopped_goes_on_when_there_is_room(self, engine):
        engine.scheduler.run("first", 9)
        engine.resize(blocks=4, allow_preemption=False)
        engine.controller.allowance._retry_at = 0.0
        assert not engine.controller.pending
        engine.scheduler.finish("first")
        assert engine.controller.pending
        engine.idle()
        assert engine.resident_blocks() == 4
        assert transactions(engine) == {"partial": 1, "done": 1}
        engine.check()

    def test_blocks_that_no_running_request_holds_stop_it(self, engine):
        """Such as those of a session that waits for its next input."""
        held = engine.pool.get_new_blocks(5)
        engine.scheduler.run("running", 4)
        for dry_run in (True, False):
            answer = engine.resize(blocks=2, dry_run=dry_run)
            assert (answer["outcome"], answer["to"], answer["preempted"]) == ("partial", 6, 1)
        engine.pool.free_blocks(held)

    def test_it_waits_for_the_steps_in_flight(self, engine):
        """What a step samples for a request is not thrown away."""
        engine.scheduler.run("first", 9)
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 4})
        for _ in range(3):
            engine.controller.poll()
            assert engine.controller.holds_steps
            assert len(engine.scheduler.running) == 1
        engine.end_step()
        engine.idle()
        assert answer.result()["preempted"] == 1
        assert not engine.controller.holds_steps


def test_100_random_shrinks_of_scattered_blocks():
    choose = random.Random(11)
    engine = Engine(ranks=2, chunk_blocks=3, base=1, start=12, capacity=12)
    for _ in range(100):
        engine.resize(blocks=36)
        blocks = engine.pool.get_new_blocks(35)
        choose.shuffle(blocks)
        live, rest = blocks[: choose.randint(0, 20)], blocks[20:]
        engine.pool.free_blocks(rest + [block for block in blocks[:20] if block not in live])
        marks = [choose.randint(1, 100) for _ in live]
        for block, mark in zip(live, marks, strict=True):
            for arena in engine.arenas:
                write(arena, block.block_id, mark)
        least = -(-(len(live) + 1) // 3) * 3
        target = choose.randrange(3, 37, 3)
        answer = engine.resize(blocks=target, allow_preemption=False)
        assert answer["to"] == max(target, least), "to live blocks plus one chunk it always succeeds"
        for block, mark in zip(live, marks, strict=True):
            assert all(reads(arena, block.block_id, mark) for arena in engine.arenas)
        engine.check()
        engine.pool.free_blocks(live)
        engine.idle()
    engine.close()
