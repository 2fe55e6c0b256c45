"""The prefill reserve is lent and taken back, and no step needs more of it than is left."""

import random
import time
from types import SimpleNamespace

import pytest
from pool.pools import TOKENS, cached_then_freed
from vllm.v1.elastic_kv import allowance, lending, worker_side
from vllm.v1.elastic_kv.activation import ActivationModel, Line
from vllm.v1.elastic_kv.reserve import make_reserve

from .engine import Engine

MOST = 128  # tokens of the largest step
LENT = 80  # tokens of a step while all is lent that `reclaim` lends
BLOCK = 3 * 4096  # bytes
OWN, ALL = 6, 10  # blocks of the cache beside the whole reserve, and with all that is lent
MODEL = ActivationModel(Line(0, 0.0, 1024.0, 0.0), Line(0, 0.0, 1200.0, 0.0))


def make_engine(policy: str) -> Engine:
    """Two ranks, 6 of 16 blocks resident in chunks of 2; steps take 1 KiB a token."""
    return Engine(reserve=make_reserve(policy, MODEL, MOST, 72, decodes=4))


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(lending, "time", clock)
    monkeypatch.setattr(allowance, "RETRY_SECONDS", (0.0, 0.0))
    return clock


@pytest.fixture
def start(clock):
    """Makes engines, and closes them."""
    engines = []

    def make(policy: str) -> Engine:
        engines.append(make_engine(policy))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def request(name: str, tokens: int, computed: int = 0, prompt_logprobs: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_tokens_with_spec=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=computed,
        num_output_placeholders=0,
        sampling_params=SimpleNamespace(prompt_logprobs=prompt_logprobs),
    )


def decode(engine: Engine, name: str = "decoding", blocks: int = 1) -> None:
    """A request that decodes, and has so many blocks."""
    engine.scheduler.running.append(request(name, 9, 8))
    engine.scheduler.blocks[name] = engine.pool.get_new_blocks(blocks)


def prefill(engine: Engine, tokens: int, name: str = "prompt", prompt_logprobs: int | None = None) -> None:
    """A request that runs, and whose prompt is to be computed."""
    engine.scheduler.running.append(request(name, tokens, 0, prompt_logprobs))
    engine.scheduler.blocks[name] = []


def lent(start, policy: str) -> Engine:
    engine = start(policy)
    decode(engine)
    engine.controller.token_budget(MOST)
    engine.idle()
    return engine


def borrowed_bytes(engine: Engine) -> int:
    """What the rank that has most holds of the reserve, by the arenas' own account."""
    held = (arena.resident_bytes + arena.prepared_bytes + arena.unreleased_bytes for arena in engine.arenas)
    return max(0, max(held) - OWN * BLOCK)


@pytest.mark.parametrize(
    ("policy", "blocks", "tokens"),
    [("static", OWN, MOST), ("small-chunk", ALL, 72), ("reclaim", ALL, LENT), ("adaptive", ALL, LENT)],
)
def test_while_only_decoding(start, policy, blocks, tokens):
    engine = lent(start, policy)
    assert engine.resident_blocks() == blocks
    assert engine.controller.token_budget(MOST) == tokens
    engine.check()


def test_the_budget_falls_before_memory_is_lent(start):
    """A step in flight may need the whole reserve: the growth waits for it, and later steps are small already."""
    engine = start("reclaim")
    engine.launch_step()
    decode(engine)
    assert engine.controller.token_budget(MOST) == LENT
    engine.controller.poll()
    assert borrowed_bytes(engine) == 0
    assert "prepare" not in engine.model_executor.calls
    engine.end_step()
    engine.idle()
    assert engine.resident_blocks() == ALL


@pytest.mark.parametrize("policy", ["reclaim", "adaptive"])
def test_a_resize_whose_turn_does_not_come_is_no_news_to_a_loan_under_way(start, policy, monkeypatch):
    real, clock = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    engine = start(policy)
    engine.launch_step()
    decode(engine)
    engine.controller.token_budget(MOST)
    answer = engine.controller.resize({"blocks": ALL, "timeout_s": 5})
    clock[0] = 10.0
    engine.controller.poll()
    assert answer.result(timeout=0)["outcome"] == "refused"
    engine.end_step()
    engine.idle()
    assert engine.resident_blocks() == ALL
    engine.controller.poll()
    assert engine.resident_blocks() == ALL
    assert engine.controller.state()["reserve"]["reserve_returns"] == 0
    engine.check()


def test_what_is_counted_is_handed_out_once(start):
    engine = lent(start, "reclaim")
    prefill(engine, 100)
    engine.controller.token_budget(MOST)
    told = [engine.controller.take_stats().reserve["reserve_returns"] for _ in range(2)]
    assert told == [1, 0]
    assert engine.controller.state()["reserve"]["reserve_returns"] == 1


@pytest.mark.parametrize("policy", ["reclaim", "adaptive"])
class TestTakenBack:
    def test_in_the_scheduling_pass_that_needs_it(self, start, policy):
        engine = lent(start, policy)
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN
        assert borrowed_bytes(engine) == 0
        assert engine.controller.state()["reserve"]["reserve_returns"] == 1
        engine.check()

    def test_not_for_a_step_that_fits(self, start, policy):
        engine = lent(start, policy)
        prefill(engine, LENT - 1)
        assert engine.controller.token_budget(MOST) == LENT
        assert engine.resident_blocks() == ALL

    def test_not_where_a_request_would_have_to_be_preempted(self, start, policy):
        engine = lent(start, policy)
        decode(engine, "second", 5)
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == LENT
        assert engine.resident_blocks() == ALL
        assert [one.request_id for one in engine.scheduler.running] == ["decoding", "second", "prompt"]

    def test_not_for_a_prompt_that_has_no_room_beside_the_reserve(self, start, policy):
        """It would wait for the reserve to be lent, and then take it back, for ever."""
        engine = lent(start, policy)
        engine.scheduler.waiting.append(request("waiting", 5 * TOKENS + 80))
        assert engine.controller.token_budget(MOST) == LENT
        assert engine.resident_blocks() == ALL

    def test_for_one_that_wants_the_log_probabilities_of_its_prompt(self, start, policy):
        engine = lent(start, policy)
        prefill(engine, 72, prompt_logprobs=1)
        assert engine.controller.token_budget(MOST) == MOST * 1024 // 1200
        assert engine.resident_blocks() == OWN

    def test_from_a_loan_that_is_still_being_made(self, start, policy, monkeypatch):
        """Pages for gigabytes take seconds to make: a prompt does not wait for a loan that it has to take back."""
        engine = start(policy)
        decode(engine)
        making = [True]  # empty once what was made is given back
        monkeypatch.setattr(worker_side, "busy", lambda worker: bool(making))
        engine.model_executor.after["discard"] = making.clear
        assert engine.controller.token_budget(MOST) == LENT
        prefill(engine, 100)
        budget = engine.controller.token_budget(MOST)
        engine.idle()
        assert budget == (MOST if policy == "reclaim" else LENT)
        assert engine.controller.token_budget(MOST) == MOST
        assert "begin_attach" not in engine.model_executor.calls
        assert engine.resident_blocks() == OWN
        assert borrowed_bytes(engine) == 0
        engine.check()

    def test_from_a_loan_that_waits_for_a_step(self, start, policy):
        """No page is made for it."""
        engine = start(policy)
        engine.launch_step()
        decode(engine)
        assert engine.controller.token_budget(MOST) == LENT
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == LENT
        engine.end_step()
        assert "prepare" not in engine.model_executor.calls
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN
        engine.check()

    @pytest.mark.parametrize("before", [0, 1])
    def test_blocks_move_after_the_step_of_the_pass_in_which_it_began(self, start, policy, before):
        engine = lent(start, policy)
        decode(engine, "second", 8)
        blocks = engine.scheduler.blocks["second"]
        engine.scheduler.blocks["second"] = blocks[::2]  # one in each chunk
        engine.pool.free_blocks(blocks[1::2])
        for _ in range(before):
            engine.launch_step()
        prefill(engine, 100)
        engine.controller.token_budget(MOST)
        if policy == "reclaim" and not before:  # it waits, and has a step only after that
            assert engine.resident_blocks() == OWN
            return
        engine.launch_step()
        for _ in range(before):
            engine.end_step()
        for _ in range(5):
            engine.controller.poll()
        assert engine.controller.holds_steps
        assert "move" not in engine.model_executor.calls
        engine.end_step()
        engine.idle()
        assert engine.resident_blocks() == OWN
        assert engine.controller.state()["last"]["moved"]
        engine.check()

    def test_for_more_of_a_streamed_prompt(self, start, policy):
        """A request that waits and has blocks is in another queue of upstream's, which is scheduled first."""
        engine = lent(start, policy)
        engine.scheduler.kv_holding_waiting.append(request("streamed", 108, 8))
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN

    def test_log_probabilities_of_a_streamed_prompt_make_the_step_smaller(self, start, policy):
        engine = lent(start, policy)
        decode(engine, "second", 5)  # nothing can be taken back
        engine.scheduler.kv_holding_waiting.append(request("streamed", 108, 8, prompt_logprobs=1))
        assert engine.controller.token_budget(MOST) == LENT * 1024 // 1200
        assert engine.resident_blocks() == ALL

    def test_while_an_operator_asks_for_more_than_there_can_be(self, start, policy, monkeypatch):
        """Such a resize is refused, but nothing has failed that the lender should wait for."""
        monkeypatch.setattr(allowance, "RETRY_SECONDS", (1000.0, 1000.0))
        engine = lent(start, policy)
        assert engine.resize(blocks=ALL + 2)["outcome"] == "refused"
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN

    def test_with_hysteresis(self, start, policy, clock):
        """A trickle of prompts does not move the reserve to and fro."""
        engine = lent(start, policy)
        for _ in range(5):
            prefill(engine, 100)
            assert engine.controller.token_budget(MOST) == MOST
            engine.scheduler.finish("prompt")
            clock.now += 1.9
            assert engine.controller.token_budget(MOST) == MOST
            engine.idle()
            assert engine.resident_blocks() == OWN
        assert engine.controller.state()["transactions"]["done"] == 2
        clock.now += 0.2
        assert engine.controller.token_budget(MOST) == LENT
        engine.idle()
        assert engine.resident_blocks() == ALL

    @pytest.mark.parametrize("number", range(1, 7))
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_call_that_fails_makes_the_step_smaller(self, start, policy, number, rank):
        engine = lent(start, policy)
        engine.drivers[rank].fail("unmap", number)
        prefill(engine, 100)
        budget = engine.controller.token_budget(MOST)
        left = engine.controller.lender.reserve.nbytes - borrowed_bytes(engine)
        assert LENT <= budget <= left // 1024
        engine.drivers[rank].mend()
        engine.idle()
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN
        engine.check()


class TestWhereItCostsEvictions:
    def test_reclaim_waits_for_them(self, start):
        engine = lent(start, "reclaim")
        cached_then_freed(engine.pool, seed=1, count=8)
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN

    def test_adaptive_goes_on_with_smaller_steps(self, start):
        engine = lent(start, "adaptive")
        cached_then_freed(engine.pool, seed=1, count=8)
        engine.model_executor.hold = True
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == LENT
        assert not engine.controller.holds_steps
        assert engine.controller.token_budget(MOST) == LENT
        engine.model_executor.hold = False
        engine.model_executor.step()
        engine.idle()
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN

    def test_reclaim_holds_the_steps_where_some_are_in_flight(self, start):
        engine = lent(start, "reclaim")
        engine.launch_step()
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == LENT
        assert engine.controller.holds_steps
        engine.end_step()
        assert not engine.controller.holds_steps
        assert engine.controller.token_budget(MOST) == MOST


class TestTheOperator:
    def test_a_smaller_size_is_kept(self, start, clock):
        engine = lent(start, "reclaim")
        assert engine.resize(blocks=4)["outcome"] == "done"
        for _ in range(3):
            clock.now += 10
            engine.controller.token_budget(MOST)
            engine.idle()
            assert engine.resident_blocks() == 4
        assert engine.controller.token_budget(MOST) == MOST

    def test_a_size_between_is_the_most_that_is_lent(self, start):
        engine = lent(start, "adaptive")
        assert engine.resize(blocks=8)["to"] == 8
        assert engine.controller.token_budget(MOST) == 104
        prefill(engine, 120)
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN

    def test_more_than_the_reserve_can_lend(self, start):
        engine = lent(start, "reclaim")
        answer = engine.resize(blocks=16)
        assert (answer["outcome"], answer["to"]) == ("refused", ALL)
        assert answer["reason"] == "the prefill reserve is kept: there can be 10 blocks now"
        assert engine.controller.token_budget(MOST) == LENT

    def test_growth_while_the_reserve_is_needed_comes_later(self, start, clock):
        engine = lent(start, "reclaim")
        engine.resize(blocks=4)
        prefill(engine, 100)
        assert engine.controller.token_budget(MOST) == MOST
        answer = engine.resize(blocks=ALL)
        assert (answer["outcome"], answer["to"]) == ("partial", OWN)
        engine.scheduler.finish("prompt")
        clock.now += 3
        engine.controller.token_budget(MOST)
        engine.idle()
        assert engine.resident_blocks() == ALL


def test_what_is_needed_is_not_lent_again_in_the_same_pass(start):
    engine = start("reclaim")
    engine.controller.lender._lend_after_s = 0.0
    decode(engine)
    engine.controller.token_budget(MOST)
    engine.idle()
    prefill(engine, 100)
    for _ in range(3):
        assert engine.controller.token_budget(MOST) == MOST
        assert engine.resident_blocks() == OWN


def test_memory_that_could_not_be_lent_makes_no_step_smaller(start):
    engine = start("reclaim")
    engine.drivers[1].fail("create", always=True)
    decode(engine)
    assert engine.controller.token_budget(MOST) == LENT
    engine.idle()
    assert engine.resident_blocks() == OWN
    assert engine.controller.lender.borrowed_blocks == 0


def test_always_lent_does_not_care(start):
    engine = lent(start, "always-lent")
    assert engine.resident_blocks() == ALL
    prefill(engine, 100)
    assert engine.controller.token_budget(MOST) == MOST
    assert engine.resident_blocks() == ALL


def test_without_a_reserve_nothing_is_asked():
    engine = Engine()
    assert engine.controller.token_budget(77) == 77
    assert engine.controller.state()["reserve"] is None
    engine.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["static", "small-chunk", "reclaim", "adaptive"])
def test_no_step_ever_needs_more_than_is_left(start, clock, policy, seed):
    """Prompts come and go, steps are in flight, the operator resizes, and calls fail: at every moment every step in
    flight fits beside what the cache has, prepares, or has not given back."""
    rng = random.Random(f"{policy} {seed}")
    engine = start(policy)
    reserve, faulty = engine.controller.lender.reserve, engine.drivers[seed % 2]
    in_flight: list[int] = []  # bytes that the steps take, the newest first
    resizes = []

    def check() -> None:
        for nbytes in in_flight:
            assert nbytes <= reserve.nbytes - borrowed_bytes(engine)

    def come() -> None:
        name = f"request {rng.random()}"
        wants = rng.choice([None, None, 1])
        if len(engine.scheduler.running) < 4 and engine.pool.get_num_free_blocks():
            prefill(engine, rng.choice([4, 60, 100, 300]), name, wants)
            engine.scheduler.blocks[name] = engine.pool.get_new_blocks(1)
        elif len(engine.scheduler.waiting) < 3:
            engine.scheduler.waiting.append(request(name, rng.choice([8, 200]), 0, wants))

    def go() -> None:
        if engine.scheduler.running:
            engine.scheduler.finish(rng.choice(engine.scheduler.running).request_id)
        elif engine.scheduler.waiting:
            engine.scheduler.waiting.pop()

    def step() -> None:
        if engine.controller.holds_steps or len(engine.batch_queue) >= 2:
            return
        budget, nbytes, logprobs = engine.controller.token_budget(MOST), 0, False
        check()
        for one in engine.scheduler.running:
            tokens = min(budget, max(1, one.num_tokens - one.num_computed_tokens))
            if tokens:
                logprobs = logprobs or bool(one.sampling_params.prompt_logprobs)
            one.num_computed_tokens = min(one.num_tokens - 1, one.num_computed_tokens + tokens)
            budget, nbytes = budget - tokens, nbytes + tokens
        engine.launch_step()
        in_flight.insert(0, MODEL.nbytes(nbytes, logprobs))

    def end() -> None:
        if engine.batch_queue:
            in_flight.pop()
            future, *_ = engine.batch_queue.pop()
            future.set_result(None)
            engine.controller.poll()

    def resize() -> None:
        blocks = rng.randrange(2, 17)
        resizes.append(engine.controller.resize({"blocks": blocks, "allow_preemption": False}))

    def fail() -> None:
        faulty.mend()  # one call of one rank at a time, so that it can be undone
        faulty.fail(rng.choice(["create", "unmap"]), rng.randint(1, 4))

    def later() -> None:
        clock.now += rng.choice([0.1, 1.0, 3.0])

    actions = [come, come, go, step, step, step, end, end, later, engine.controller.poll, resize, fail]
    for _ in range(200):
        rng.choice(actions)()
        check()
    while engine.batch_queue:
        end()
    for driver in engine.drivers:
        driver.mend()
    engine.idle()
    assert all(answer.done() for answer in resizes)
    engine.check()
