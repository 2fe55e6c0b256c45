"""Resizes as transactions over several ranks: every outcome leaves one size everywhere."""

import gc
import random
import time
from collections import deque

import pytest
from arena.drivers import needs_stand_in
from pool.pools import PAGE, TOKENS, cached_then_freed
from support.cuda_stand_in import cuda_stand_in as device
from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.elastic_kv import accounts
from vllm.v1.elastic_kv import ranks as ranks_module
from vllm.v1.elastic_kv import resizer as resizer_module
from vllm.v1.elastic_kv.controller import ElasticKVController
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.ranks import RanksDisagreeError
from vllm.v1.elastic_kv.undo import ArenaBrokenError

from .engine import Engine

COSTS = ("evicted", "moved", "moved_bytes", "preempted")
ANSWER = {"outcome", "from", "to", *COSTS, "duration_ms", "pause_ms", "reason"}


@pytest.fixture
def engine():
    """Two ranks, 6 of 16 blocks resident in chunks of 2, base 2."""
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def small_slices(monkeypatch):
    """One chunk at a time, so that a resize can fail after it has begun."""
    monkeypatch.setattr(ranks_module, "SLICE_MS", 1e-9)
    monkeypatch.setattr(ranks_module, "FIRST_SLICE_BYTES", 1)
    monkeypatch.setattr(resizer_module, "PREPARE_BYTES", 1)


def brief(answer: dict, moved: int = 0, preempted: int = 0) -> tuple:
    assert set(answer) == ANSWER
    assert answer["duration_ms"] >= 0
    assert answer["pause_ms"] >= 0
    assert (answer["moved"], answer["preempted"]) == (moved, preempted)
    assert bool(answer["moved_bytes"]) == bool(moved)
    return answer["outcome"], answer["from"], answer["to"], answer["evicted"]


def transactions(engine) -> dict:
    return {name: count for name, count in engine.controller.state()["transactions"].items() if count}


class TestOutcomes:
    def test_grow(self, engine):
        answer = engine.resize(blocks=16)
        assert brief(answer) == ("done", 6, 16, 0)
        assert answer["reason"] is None
        assert answer["pause_ms"] > 0
        engine.check()
        assert engine.resident_blocks() == 16
        assert len(engine.pool.get_new_blocks(15)) == 15

    def test_shrink(self, engine):
        assert brief(engine.resize(blocks=2)) == ("done", 6, 2, 0)
        engine.check()
        assert engine.resident_blocks() == 2

    def test_the_size_that_is_there(self, engine):
        assert brief(engine.resize(blocks=6)) == ("done", 6, 6, 0)
        engine.check()
        assert set(engine.model_executor.calls) <= {"busy", "measure"}

    @pytest.mark.parametrize(
        ("fields", "blocks"),
        [
            ({"blocks": 9}, 8),  # rounded down to chunks
            ({"bytes": 10 * 3 * 4096}, 10),
            ({"bytes": "144KiB"}, 12),
            ({"tokens": 12 * TOKENS}, 12),
            ({"tokens": 11 * TOKENS + 1}, 12),
            ({"fraction": 0.5}, 8),
            ({"fraction": 1}, 16),
        ],
        ids=str,
    )
    def test_units(self, engine, fields, blocks):
        assert engine.resize(**fields)["to"] == blocks
        engine.check()

    def test_shrink_evicts_and_says_so(self, engine):
        cached_then_freed(engine.pool, seed=1, count=5)
        engine.pool.take_events()
        assert brief(engine.resize(blocks=2)) == ("done", 6, 2, 4)
        assert [type(event) for event in engine.pool.take_events()] == [BlockRemoved] * 4
        engine.check()

    def test_shrink_stops_at_blocks_in_use(self, engine):
        live = engine.pool.get_new_blocks(3)  # 1, 2 and 3: chunks 0 and 1
        answer = engine.resize(blocks=2)
        assert brief(answer) == ("partial", 6, 4, 0)
        assert answer["reason"] == "live blocks need the room of 1 more chunks"
        engine.check()
        answer = engine.resize(blocks=2)
        assert brief(answer) == ("refused", 4, 4, 0)
        engine.pool.free_blocks(live)
        assert brief(engine.resize(blocks=2)) == ("done", 4, 2, 0)
        engine.check()
        assert transactions(engine) == {"partial": 1, "refused": 1, "done": 1}

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"blocks": 1}, ["2 (its base)", "16 (its capacity)", "blocks=1"]),
            ({"blocks": 17}, ["blocks=17"]),
            ({"bytes": "1GiB"}, [f"bytes={1 << 30}"]),
            ({"blocks": 0}, ["blocks:", "got 0"]),
            ({}, ["exactly one"]),
            ({"blocks": 4, "size": 4}, ["size:"]),
        ],
        ids=str,
    )
    def test_what_cannot_be_had_is_invalid_and_changes_nothing(self, engine, fields, words):
        before = engine.controller.state()
        answer = engine.controller.resize(fields).result()
        assert set(answer) == {"invalid"}
        assert all(word in answer["invalid"] for word in words)
        assert engine.controller.state() == before
        assert not engine.controller.pending

    @pytest.mark.parametrize(
        ("blocks", "expected"), [(16, ("done", 6, 16, 0)), (2, ("partial", 6, 4, 2)), (6, ("done", 6, 6, 0))]
    )
    def test_dry_run_foresees_and_does_nothing(self, engine, blocks, expected):
        # Chunk 0 and 1 in use, chunk 2 cached.
        held = engine.pool.get_new_blocks(3)
        cached_then_freed(engine.pool, seed=1, count=2)
        before, calls = engine.controller.state(), engine.model_executor.calls.count
        answer = engine.resize(blocks=blocks, dry_run=True)
        assert brief(answer) == expected
        assert engine.controller.state() == before
        assert engine.controller.take_stats().resizes == []
        assert calls("begin_attach") == calls("begin_detach") == 0
        real = engine.resize(blocks=blocks)
        assert brief(real) == expected
        assert real["reason"] == answer["reason"]
        engine.pool.free_blocks(held)
        engine.check()

    def test_dry_run_of_what_is_refused(self, engine):
        engine.pool.get_new_blocks(5)
        answer = engine.resize(blocks=2, dry_run=True)
        assert brief(answer) == ("refused", 6, 6, 0)
        assert answer["reason"]

    def test_a_fifth_and_back(self):
        engine = Engine(chunk_blocks=1, start=20, capacity=20)
        for _ in range(3):
            assert engine.resize(fraction=0.2)["to"] == 4
            engine.check()
            assert engine.resize(fraction=1)["to"] == 20
            engine.check()
        engine.close()

    def test_ranks_of_different_sizes(self):
        """Bytes are those of the rank where a block takes most."""
        engine = Engine(ranks=2, strides=[4096, 8192])
        state = engine.controller.state()
        assert state["bytes"]["per_block"] == 3 * 8192
        assert state["bytes"]["reported"] == 6 * 3 * 8192
        assert engine.resize(bytes=10 * 3 * 8192)["to"] == 10
        engine.check()
        engine.close()


class TestState:
    def test_last_and_transactions(self, engine):
        assert engine.controller.state()["last"] is None
        answer = engine.resize(blocks=10)
        state = engine.controller.state()
        assert state["last"] == answer
        assert state["transactions"] == {"done": 1, "partial": 0, "refused": 0, "failed": 0}
        assert (state["policy"], state["driver"]) == ("static", "host")
        assert (state["block_size"], state["chunk_blocks"]) == (TOKENS, 2)
        assert state["bytes"]["capacity"] == 16 * state["bytes"]["per_block"]

    def test_reported_bytes_come_from_the_system(self, engine):
        whole = engine.arenas[0].tensor()
        assert whole.data_ptr() == engine.arenas[0].address
        for blocks in (16, 2, 8):
            engine.resize(blocks=blocks)
            assert engine.controller.state()["bytes"]["reported"] == blocks * 3 * 4096

    def test_stats_hand_out_each_resize_once(self, engine):
        first, second = engine.resize(blocks=10), engine.resize(blocks=4)
        stats = engine.controller.take_stats()
        assert stats.resizes == [first | {"direction": "grow"}, second | {"direction": "shrink"}]
        assert (stats.resident_blocks, stats.base_blocks, stats.capacity_blocks) == (4, 2, 16)
        assert stats.reported_bytes == 4 * stats.block_bytes
        assert engine.controller.take_stats().resizes == []

    def test_a_refused_shrink_is_a_shrink(self, engine):
        engine.pool.get_new_blocks(5)
        assert engine.resize(blocks=2)["outcome"] == "refused"
        (resize,) = engine.controller.take_stats().resizes
        assert (resize["direction"], resize["outcome"]) == ("shrink", "refused")

    def test_nothing_is_kept_for_metrics_that_are_off(self, engine):
        engine.log_stats = False
        engine.resize(blocks=10)
        assert engine.controller.take_stats().resizes == []

    def test_another_pool_is_refused(self, engine):
        engine.scheduler.kv_cache_manager.block_pool = BlockPool(4, True, TOKENS)
        with pytest.raises(TypeError, match="own block pool"):
            ElasticKVController(engine)


class TestFailingRanks:
    """kvcached #372: the error was swallowed and the workers hung."""

    @pytest.mark.parametrize("call", ["create", "map"])
    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_grow_is_undone_on_the_others(self, rank, call):
        engine = Engine(ranks=3)
        engine.drivers[rank].out_of_memory = True
        engine.drivers[rank].fail(call, number=4)
        before = engine.controller.state()
        answer = engine.resize(blocks=16)
        assert brief(answer) == ("refused", 6, 6, 0)
        assert answer["reason"].startswith(f"rank {rank}: {call} ")
        assert "; rank" not in answer["reason"]
        engine.check()
        after = engine.controller.state()
        assert after["blocks"] == before["blocks"] | {"allowed": 16}
        assert after["ranks"] == before["ranks"]
        assert after["transactions"]["failed"] == 1
        assert brief(engine.resize(blocks=16)) == ("done", 6, 16, 0)  # memory came free
        engine.check()
        engine.close()

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_shrink_is_undone_on_the_others(self, rank):
        engine = Engine(ranks=3)
        cached_then_freed(engine.pool, seed=1, count=5)
        engine.drivers[rank].fail("unmap", number=4)
        answer = engine.resize(blocks=2)
        assert brief(answer) == ("refused", 6, 6, 4)  # the prefixes are gone, the blocks are not
        assert answer["reason"].startswith(f"rank {rank}: unmap ")
        engine.check()
        assert transactions(engine) == {"failed": 1}
        assert len(engine.pool.get_new_blocks(5)) == 5
        engine.close()

    def test_several_ranks_fail(self):
        engine = Engine(ranks=3)
        engine.drivers[0].fail("create")
        engine.drivers[2].fail("map")
        answer = engine.resize(blocks=8)
        assert answer["reason"].startswith("rank 0: create ")
        assert "; rank 2: map " in answer["reason"]
        engine.check()
        engine.close()

    def test_all_ranks_fail(self, engine):
        for driver in engine.drivers:
            driver.fail("create")
        answer = engine.resize(blocks=8)
        assert brief(answer) == ("refused", 6, 6, 0)
        assert engine.model_executor.calls.count("on_ranks") == 0  # nothing to undo
        engine.check()

    def test_grow_reports_how_far_it_got(self, engine, small_slices):
        """vLLM #34600: another process took the memory meanwhile."""
        engine.drivers[1].fail("create", number=3 * 3 + 2)  # in the fourth of five chunks
        answer = engine.resize(blocks=16)
        assert brief(answer) == ("partial", 6, 12, 0)
        assert answer["reason"].startswith("rank 1: create ")
        engine.check()
        assert brief(engine.resize(blocks=16)) == ("done", 12, 16, 0)
        engine.check()

    def test_shrink_reports_how_far_it_got(self, engine):
        """The chunk that was empty is gone; the one that had to be emptied first stays."""
        first, second = engine.pool.get_new_blocks(2)
        engine.pool.free_blocks([first])
        engine.drivers[0].fail("unmap", number=3 + 1)
        answer = engine.resize(blocks=2)
        assert brief(answer, moved=1) == ("partial", 6, 4, 0)
        assert answer["reason"].startswith("rank 0: unmap ")
        engine.check()
        assert brief(engine.resize(blocks=2)) == ("done", 4, 2, 0)
        assert (second.block_id, second.ref_cnt) == (1, 1)
        engine.check()

    def test_every_call_in_turn(self, small_slices):
        """Whatever fails on whichever rank, the ranks agree, and a retry succeeds."""
        for rank in range(2):
            for call, size in (("create", 12), ("map", 12), ("unmap", 2)):
                for number in range(1, 3 * (3 if size == 12 else 2) + 1):
                    engine = Engine()
                    engine.drivers[rank].fail(call, number)
                    answer = engine.resize(blocks=size)
                    assert answer["outcome"] in ("partial", "refused")
                    assert f"rank {rank}: {call}" in answer["reason"]
                    engine.check()
                    assert engine.resize(blocks=size)["outcome"] == "done"
                    engine.check()
                    engine.close()

    @pytest.mark.parametrize(("blocks", "call", "undo"), [(16, "create", "unmap"), (2, "unmap", "map")])
    def test_ranks_that_cannot_be_brought_together_end_the_engine(self, engine, blocks, call, undo):
        engine.drivers[0].fail(call)
        engine.drivers[1].fail(undo)
        with pytest.raises(RanksDisagreeError, match=f"rank 0: {call} .*could not be undone on rank 1: {undo}"):
            engine.resize(blocks=blocks)
        assert engine.controller.pending
        for _ in range(2):  # and at every later turn
            with pytest.raises(RanksDisagreeError):
                engine.controller.poll()

    def test_a_rank_that_lost_count_ends_the_engine(self):
        """Its pages are in doubt: to go on could end in a crash of the kernel that touches them."""
        engine = Engine()
        engine.drivers[0].fail("unmap", number=4)
        engine.drivers[0].fail("map", number=1)
        with pytest.raises(ArenaBrokenError):
            engine.resize(blocks=2)
        assert engine.controller.pending
        with pytest.raises(ArenaBrokenError):
            engine.controller.poll()

    def test_a_handle_that_cannot_be_released_on_one_rank(self, engine):
        """The chunk is detached there as on the others; the memory is given back with the next resize."""
        engine.drivers[1].fail("release")
        assert brief(engine.resize(blocks=4)) == ("done", 6, 4, 0)
        assert engine.arenas[0].attached == engine.arenas[1].attached == engine.pool.resident_chunks
        assert [rank["handles"] for rank in engine.controller.state()["ranks"]] == [6, 7]
        assert (
            engine.controller.state()["last"]["reason"] == "8192 bytes of a rank are not given back to the device yet"
        )
        assert engine.resize(blocks=2)["reason"] is None
        engine.check()
        assert [rank["handles"] for rank in engine.controller.state()["ranks"]] == [3, 3]


class TestStepsInFlight:
    def test_shrink_waits_for_the_steps_that_may_touch_the_pages(self, engine):
        """vLLM #45615, kvcached #463: pages were unmapped under a running batch."""
        engine.launch_step()
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 2})
        assert not answer.done()
        assert engine.controller.pending
        # The blocks are gone for new requests, the pages are still there for the steps.
        assert engine.resident_blocks() == 2
        engine.check(same_as_pool=False)
        assert all(len(arena.attached) == 3 for arena in engine.arenas)
        engine.end_step()
        assert all(len(arena.attached) == 3 for arena in engine.arenas)
        engine.launch_step()  # began later, cannot know the blocks: need not be waited for
        engine.end_step()
        engine.controller.poll()
        assert all(len(arena.attached) == 1 for arena in engine.arenas)
        engine.end_step()
        assert answer.done()
        assert brief(answer.result()) == ("done", 6, 2, 0)
        engine.check()

    def test_a_finished_step_that_is_not_processed_still_counts(self, engine):
        engine.launch_step().set_result(None)
        answer = engine.controller.resize({"blocks": 2})
        engine.controller.poll()
        assert not answer.done()
        assert all(len(arena.attached) == 3 for arena in engine.arenas)
        engine.end_step()
        assert answer.done()

    def test_growth_is_published_after_every_rank_has_the_pages(self, engine):
        engine.model_executor.hold = True
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 16})
        for _ in range(3):
            engine.controller.poll()
            assert engine.resident_blocks() == 6
            assert engine.controller.state()["blocks"]["resident"] == 6
        sizes = []
        while not answer.done():
            engine.model_executor.step()
            attached = {len(arena.attached) for arena in engine.arenas}
            engine.controller.poll()
            sizes.append((engine.resident_blocks(), attached))
        assert sizes[-1] == (16, {8})
        assert all(attached == {8} for blocks, attached in sizes if blocks == 16)
        assert brief(answer.result()) == ("done", 6, 16, 0)
        engine.model_executor.hold = False
        engine.end_step()
        engine.check()

    def test_blocks_freed_by_the_step_in_flight_do_not_leave(self, engine):
        """What a shrink takes is settled when it begins."""
        live = engine.pool.get_new_blocks(3)
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 2})
        engine.pool.free_blocks(live)
        engine.end_step()
        assert brief(answer.result()) == ("partial", 6, 4, 0)
        engine.check()

    def test_waiting_callers_drive_it_to_the_end(self, engine):
        """Without an engine loop: `LLM.resize_kv_cache` in one process."""
        engine.launch_step().set_result(None)
        answer = engine.controller.resize({"blocks": 2})
        assert not answer.done()
        engine.controller.poll(wait=True)
        assert brief(answer.result()) == ("done", 6, 2, 0)
        assert not engine.controller.pending

    def test_an_engine_without_a_batch_queue(self, engine):
        engine.batch_queue = None
        assert brief(engine.resize(blocks=2)) == ("done", 6, 2, 0)
        assert brief(engine.resize(blocks=16)) == ("done", 2, 16, 0)
        engine.check()

    def test_state_holds_at_every_point_where_a_resize_waits(self, engine, small_slices):
        engine.model_executor.hold = True
        for blocks in (16, 2, 10):
            engine.launch_step()
            answer = engine.controller.resize({"blocks": blocks})
            waits = 0
            while not answer.done():
                engine.check(same_as_pool=False) if engine.arenas[0].attached == engine.arenas[1].attached else None
                engine.model_executor.step()
                engine.check(same_as_pool=False)
                engine.launch_step()
                engine.end_step()
                waits += 1
                assert waits < 50
            assert waits >= 3
            assert answer.result()["to"] == blocks
            while engine.batch_queue:
                engine.end_step()
            engine.model_executor.hold = False
            engine.check()
            engine.model_executor.hold = True


class TestQueue:
    def test_resizes_run_one_at_a_time_in_order(self, engine):
        engine.launch_step()
        answers = [engine.controller.resize({"blocks": blocks}) for blocks in (2, 16, 8, 10)]
        assert [answer.done() for answer in answers] == [False] * 4
        assert engine.resident_blocks() == 2  # only the first has begun
        engine.end_step()
        assert [brief(answer.result())[:3] for answer in answers] == [
            ("done", 6, 2),
            ("done", 2, 16),
            ("done", 16, 8),
            ("done", 8, 10),
        ]
        assert not engine.controller.pending
        engine.check()
        assert transactions(engine) == {"done": 4}

    def test_a_bad_request_does_not_wait(self, engine):
        engine.launch_step()
        engine.controller.resize({"blocks": 2})
        assert engine.controller.resize({"blocks": 99}).done()
        engine.end_step()

    def test_a_turn_that_comes_too_late_is_refused_while_another_one_still_runs(self, engine, monkeypatch):
        real, clock = time.monotonic, [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
        engine.launch_step()
        first = engine.controller.resize({"blocks": 2})
        late = engine.controller.resize({"blocks": 16, "timeout_s": 5})
        patient = engine.controller.resize({"blocks": 4})
        clock[0] = 10.0
        engine.controller.poll()
        assert brief(late.result(timeout=0)) == ("refused", 2, 2, 0)
        assert "5 s" in late.result()["reason"]
        assert not first.done()
        engine.end_step()
        engine.turns(patient)
        assert brief(first.result()) == ("done", 6, 2, 0)
        assert brief(patient.result()) == ("done", 2, 4, 0)
        engine.check()

    def test_growth_stops_where_its_time_is_up(self, engine, small_slices, monkeypatch):
        real, clock = time.monotonic, [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 16, "timeout_s": 5})
        while engine.resident_blocks() == 6:
            engine.controller.poll()
        clock[0] = 10.0
        engine.turns(answer)
        assert brief(answer.result())[:2] == ("partial", 6)
        assert brief(answer.result())[2] in (8, 10)
        assert "not done within 5 s" in answer.result()["reason"]
        engine.end_step()
        engine.check()

    def test_a_shrink_that_has_begun_is_finished(self, engine, monkeypatch):
        real, clock = time.monotonic, [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
        engine.launch_step()
        answer = engine.controller.resize({"blocks": 2, "timeout_s": 5})
        clock[0] = 10.0
        engine.end_step()
        assert brief(answer.result()) == ("done", 6, 2, 0)
        engine.check()

    def test_the_clock_is_not_started_by_a_dry_run(self, engine):
        engine.launch_step()
        assert engine.controller.resize({"blocks": 2, "dry_run": True}).done()
        engine.end_step()
        assert transactions(engine) == {}


class TestExecutorFailures:
    """What the workers hold is unknown: the engine has to end, not to go on with a guess."""

    @pytest.mark.parametrize("call", ["begin_attach", "measure"])
    def test_a_time_out_reaches_the_engine_loop(self, engine, call):
        engine.model_executor.time_out_on = call
        with pytest.raises(TimeoutError, match=call):
            engine.resize(blocks=16)
        assert engine.controller.pending
        with pytest.raises(TimeoutError, match=call):
            engine.controller.poll()

    def test_a_broken_executor_reaches_the_engine_loop(self, engine):
        engine.model_executor.broken_on = "prepare"
        with pytest.raises(RuntimeError, match="shut down"):
            engine.controller.resize({"blocks": 16})
        assert engine.controller.pending
        with pytest.raises(RuntimeError, match="shut down"):
            engine.controller.poll()

    def test_nothing_more_is_started_after_one(self, engine):
        engine.model_executor.time_out_on = "begin_detach"
        with pytest.raises(TimeoutError):
            engine.resize(blocks=2)
        calls = list(engine.model_executor.calls)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                engine.controller.resize({"blocks": 16})
        assert engine.model_executor.calls == calls


class TestDetachAside:
    """The pages of a shrink go while the engine steps: no client waits for it."""

    @pytest.fixture
    def held(self, engine):
        """A shrink by two chunks, of which rank 1 does not get on with the first call."""
        engine.model_executor.settles = False
        engine.drivers[1].hold("unmap")
        answer = engine.controller.resize({"blocks": 2})
        while "begin_detach" not in engine.model_executor.calls:
            engine.controller.poll()
        yield answer
        engine.drivers[1].mend()

    def test_the_engine_steps_meanwhile(self, engine, held):
        engine.batch_queue = deque()
        for _ in range(5):
            engine.launch_step()
            engine.controller.poll()
            engine.launch_step()
            engine.end_step()
            engine.batch_queue.clear()
            assert engine.controller.pending
            assert not held.done()
            assert not engine.controller.holds_steps
            assert engine.resident_blocks() == 2  # nobody gets the blocks while it is open how it ends
        engine.drivers[1].go_on()
        engine.model_executor.settles = True
        engine.turns(held)
        assert brief(held.result()) == ("done", 6, 2, 0)
        engine.check()

    def test_a_rank_that_fails_after_the_others_are_through(self, engine, held):
        engine.drivers[1].fail("unmap", number=3)  # the first of them waits
        assert engine.arenas[0].settle(60.0)
        assert len(engine.arenas[0].attached) == 1
        engine.drivers[1].go_on()
        engine.model_executor.settles = True
        engine.turns(held)
        assert brief(held.result()) == ("refused", 6, 6, 0)
        assert held.result()["reason"].startswith("rank 1: unmap ")
        engine.check()

    def test_a_rank_that_never_gets_on_ends_the_engine(self, engine, held, monkeypatch):
        monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
        engine.drivers[0].hold("unmap")
        with pytest.raises(TimeoutError, match="begin_detach of 2 chunks has not ended on every rank after 0 s"):
            engine.controller.poll(wait=True)
        with pytest.raises(TimeoutError):
            engine.controller.poll()
        assert engine.controller.pending
        engine.drivers[0].go_on()

    def test_it_is_one_call_however_much_goes(self):
        engine = Engine(start=198, capacity=200)
        assert engine.resize(blocks=2)["outcome"] == "done"
        assert engine.model_executor.calls == ["begin_detach", "ended", "let_go", "busy", "measure"]
        engine.check()
        engine.close()


class TestCuts:
    """Of runs whose handles cannot be cut, so that what stays is copied, and memory is needed to shrink."""

    @pytest.fixture
    def engine(self):
        engine = Engine(start=6, capacity=8, run_chunks=6)
        yield engine
        engine.close()

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("number", range(1, 7))
    def test_no_memory_for_it_on_one_rank(self, engine, rank, number):
        """The shrink is refused, and the other rank has what it had without new memory: others may have taken it."""
        for driver in engine.drivers:
            driver.out_of_memory = True
        engine.drivers[rank].fail("create", number, always=True)
        engine.model_executor.after["ended"] = lambda: engine.drivers[1 - rank].fail("create", always=True)
        answer = engine.resize(blocks=4)
        assert brief(answer) == ("refused", 12, 12, 0)
        assert answer["reason"].startswith(f"rank {rank}: create ")
        assert count_of(engine, "let_go") == 0
        for driver in engine.drivers:
            driver.mend()
        engine.model_executor.after.clear()
        engine.check()
        assert brief(engine.resize(blocks=4)) == ("done", 12, 4, 0)
        engine.check()

    @pytest.mark.parametrize("number", range(1, 10))
    def test_no_memory_to_undo_the_other_rank(self, engine, number):
        """A call fails on one rank, and all other memory is gone by then: what was detached is held until all agree."""
        engine.drivers[1].fail("unmap", number)
        engine.model_executor.after["ended"] = lambda: engine.drivers[0].fail("create", always=True)
        answer = engine.resize(blocks=4)
        assert brief(answer) == ("refused", 12, 12, 0)
        assert answer["reason"].startswith("rank 1: unmap ")
        for driver in engine.drivers:
            driver.mend()
        engine.model_executor.after.clear()
        engine.check()
        assert brief(engine.resize(blocks=4)) == ("done", 12, 4, 0)
        engine.check()


class TestCutsOnAFullDevice:
    """Where a run cannot be cut, the whole runs that were to leave with it go, and may leave what the cut lacks."""

    def lay(self, ranks_full: int):
        """Runs of chunks 0 to 3 and of 4 to 7 on two devices, of which the first `ranks_full` have no memory left."""
        needs_stand_in()
        gc.collect()  # the drivers of earlier tests, before their contexts are forgotten
        device.reset()
        device.forget()
        strides = [2 * PAGE, 2 * PAGE] if ranks_full == 2 else [2 * PAGE, PAGE]
        drivers = [device.StandInDriver(ordinal) for ordinal in range(2)]
        engine = Engine(start=4, capacity=8, run_chunks=4, strides=strides, drivers=drivers)
        assert engine.resize(blocks=16)["outcome"] == "done"
        device.reset(nbytes=device.library().stand_in_used(0))
        engine.model_executor.calls.clear()
        return engine

    @pytest.mark.parametrize("ranks_full", [1, 2])
    def test_the_whole_runs_make_the_room(self, ranks_full):
        engine = self.lay(ranks_full)
        answer = engine.resize(blocks=6)
        assert brief(answer) == ("done", 16, 6, 0)
        assert transactions(engine) == {"done": 2}
        assert count_of(engine, "begin_detach") == 3
        engine.check()
        engine.close()
        assert device.left() == (0, 0, 0, 0)

    def test_somebody_else_takes_the_room(self):
        engine = self.lay(ranks_full=2)
        robbed = lambda: device.reset(nbytes=device.library().stand_in_used(0))  # noqa: E731
        engine.model_executor.after["let_go"] = robbed
        answer = engine.resize(blocks=6)
        assert brief(answer) == ("partial", 16, 8, 0)
        assert answer["reason"].startswith("rank 0: attach of ")
        assert transactions(engine) == {"done": 1, "failed": 1}
        engine.check()
        engine.model_executor.after.clear()
        device.reset()
        assert brief(engine.resize(blocks=6)) == ("done", 8, 6, 0)
        engine.check()
        engine.close()

    def test_nothing_but_the_cut_is_refused(self):
        engine = self.lay(ranks_full=1)
        answer = engine.resize(blocks=14)
        assert brief(answer) == ("refused", 16, 16, 0)
        assert count_of(engine, "begin_detach") == 1
        engine.check()
        engine.close()


def count_of(engine, call: str) -> int:
    return engine.model_executor.calls.count(call)


def test_a_grow_takes_as_long_runs_as_there_is_memory_for(engine, monkeypatch):
    """Where the length of a run is limited, a slice is as long as that: fewer handles, and it has no pause to fear."""
    monkeypatch.setattr(resizer_module, "PREPARE_BYTES", 1)
    engine.layout.run_blocks = 8
    engine.resize(blocks=16)
    slices = ["prepare", "busy", "begin_attach", "ended"]
    assert engine.model_executor.calls == ["probe", *slices, *slices, "busy", "measure"]
    engine.resize(blocks=2)
    chunk = 2 * engine.controller.state()["bytes"]["per_block"]
    monkeypatch.setattr(HostPageDriver, "available_bytes", lambda self: 3 * chunk)
    engine.model_executor.calls.clear()
    answer = engine.resize(blocks=8)
    assert answer["outcome"] == "done"
    assert count_of(engine, "prepare") == 1


def test_the_engine_steps_between_two_slices(engine, small_slices):
    """Also where no step stays in flight, and where the engine was idle: requests may come meanwhile."""
    engine.batch_queue = None
    answer = engine.controller.resize({"blocks": 16})
    sizes = [engine.resident_blocks()]
    while not answer.done():
        engine.controller.poll()
        engine.check(same_as_pool=False)
        sizes.append(engine.resident_blocks())
    assert sorted(set(sizes)) == [6, 8, 10, 12, 14, 16]  # one chunk of 2 blocks at a time
    assert sizes == sorted(sizes)
    assert engine.model_executor.calls == ["prepare", "busy", "begin_attach", "ended"] * 5 + ["busy", "measure"]


def test_asking_often_measures_seldom(engine, monkeypatch):
    for _ in range(10):
        engine.controller.state()
    assert engine.model_executor.calls.count("measure") <= 1
    monkeypatch.setattr(accounts, "MEASURE_SECONDS", 0.0)
    for _ in range(10):
        engine.controller.state()
    assert engine.model_executor.calls.count("measure") >= 10


def test_a_dry_run_of_a_grow_looks_at_the_memory(engine, monkeypatch):
    chunk = 2 * engine.controller.state()["bytes"]["per_block"]
    for free, expected in ((3 * chunk, ("partial", 6, 12, 0)), (0, ("refused", 6, 6, 0))):
        monkeypatch.setattr(HostPageDriver, "available_bytes", lambda self, free=free: free)
        answer = engine.resize(blocks=16, dry_run=True)
        assert brief(answer) == expected
        assert f"{free} bytes are available" in answer["reason"]


def test_calls_per_resize(engine):
    """The workers make pages while steps go on, and are asked whether they are ready."""
    engine.resize(blocks=16)
    assert engine.model_executor.calls == ["prepare", "busy", "begin_attach", "ended", "busy", "measure"]
    engine.model_executor.calls.clear()
    engine.resize(blocks=2)
    assert engine.model_executor.calls == ["begin_detach", "ended", "let_go", "busy", "measure"]


def test_200_random_resizes_with_steps_failures_and_requests(small_slices):
    choose = random.Random(7)
    engine = Engine(ranks=3, start=5, capacity=12)
    requests, answers = [], []
    while len(answers) < 200:
        what = choose.choice(["resize", "step", "end", "request", "request", "finish", "fail"])
        if what == "resize":
            answers.append(engine.controller.resize({"blocks": choose.randint(2, 24)}))
        elif what == "step" and len(engine.batch_queue) < 2:
            engine.launch_step()
        elif what == "end" and engine.batch_queue:
            engine.end_step()
        elif what == "request" and engine.pool.get_num_free_blocks() >= 3:
            requests.append(engine.pool.get_new_blocks(choose.randint(1, 3)))
        elif what == "finish" and requests:
            engine.pool.free_blocks(reversed(requests.pop(choose.randrange(len(requests)))))
        elif what == "fail" and not engine.controller.pending:
            # One rank fails at most: two could leave the engine without a way back.
            for driver in engine.drivers:
                driver.mend()
            choose.choice(engine.drivers).fail(choose.choice(["create", "unmap"]), choose.randint(1, 9))
        engine.check(same_as_pool=not engine.controller.pending)
        live = [block.block_id for blocks in requests for block in blocks]
        assert len(set(live)) == len(live)
        # A block that is set aside for one that moves is no longer free.
        assert engine.pool.counts().used == len(live) + len(engine.pool._destinations)
    while engine.batch_queue:
        engine.end_step()
    engine.idle()
    assert all(answer.done() for answer in answers)
    outcomes = engine.controller.state()["transactions"]
    assert sum(outcomes.values()) >= len(answers)  # a shrink that was stopped goes on by itself
    assert all(outcomes.values()), outcomes
    engine.check()
    engine.close()
