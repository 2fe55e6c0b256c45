"""The simulation of continuous batching: deterministic, loses no token, and agrees with what can be worked out by
hand.
"""

import pytest
from elastic_tools.planner.cache import KVLayout
from elastic_tools.planner.simulate import Simulation, simulate
from elastic_tools.planner.traffic import Engine, Loan, Request
from elastic_tools.planner.workload import Lengths, Workload

LAYOUT = KVLayout(block=16, bytes_per_block=1, groups=((0, 1),), bytes_per_token=1)


class OneMillisecond:
    """Step times that can be worked out by hand: 1 ms a step, and 1 ms for every 1,000 tokens of a prompt."""

    def step(self, decoding, context, chunks):
        return 1 + sum(size for size, _ in chunks) / 1000


def engine(blocks=10_000, chunk=1000, sequences=64, **rest):
    return Engine(OneMillisecond(), LAYOUT, blocks, chunk, sequences, **rest)


def requests(count, prompt=100, output=10, gap=0.0):
    return [Request(index * gap, prompt, output) for index in range(count)]


def run(given, concurrency=None, **settings):
    simulation = Simulation(engine(**settings), given, concurrency)
    return simulation.run(), simulation


def test_one_request_by_hand():
    outcome, _ = run(requests(1, prompt=2000, output=5))
    # two chunks of 1,000 tokens at 2 ms; the second gives the first token, and four steps of 1 ms the rest
    assert outcome.ttft["mean"] == pytest.approx(4)
    assert outcome.tpot["mean"] == pytest.approx(1)
    assert outcome.steps == 6


def test_requests_share_steps():
    outcome, _ = run(requests(4, prompt=100, output=11))
    assert outcome.steps == 11  # one step for four prompts, ten for the rest
    assert outcome.tokens == pytest.approx(4 * 11 / (1.4e-3 + 10e-3))


def test_the_token_budget_limits_a_step():
    outcome, _ = run(requests(3, prompt=600, output=1), chunk=1000)
    assert outcome.steps == 2


def test_the_number_of_sequences_is_a_limit():
    _, simulation = run(requests(9, output=50), sequences=3)
    assert simulation.counters.running / simulation.counters.busy <= 3


@pytest.mark.parametrize("concurrency", [None, 7])
def test_same_seed_same_outcome(concurrency):
    work = Workload(Lengths(300, 0.6), Lengths(60, 0.8), rate=None if concurrency else 50, concurrency=concurrency)
    first, second = (simulate(engine(blocks=200), work, 200, seed=5) for _ in range(2))
    assert first == second
    assert first != simulate(engine(blocks=200), work, 200, seed=6)


@pytest.mark.parametrize("blocks", [60, 100, 10_000])
def test_every_token_is_made_once_whatever_is_preempted(blocks):
    given = requests(40, prompt=200, output=150, gap=0.001)
    outcome, simulation = run(given, blocks=blocks)
    assert len(simulation.counters.finished) + outcome.refused == 40
    assert sum(each[3] for each in simulation.counters.finished) == 40 * 150
    assert (outcome.preemptions > 0) is (blocks <= 100)
    assert simulation.used() == 0
    assert [*simulation.waiting, *simulation.filling, *simulation.decoding] == []


def test_the_pool_is_never_overdrawn():
    simulation = Simulation(engine(blocks=90), requests(30, prompt=200, output=100), None)
    advance = simulation._advance

    def checked(time, steps):
        advance(time, steps)
        # a block that a request fills half counts half on average, so that much may be off
        assert simulation.used() <= simulation.capacity + 0.5 * len(simulation.decoding) + 1

    simulation._advance = checked
    simulation.run()


def test_a_request_that_can_never_fit_is_refused():
    outcome, simulation = run([*requests(2), Request(0.0, 200_000, 10)])
    assert outcome.refused == 1
    assert len(simulation.counters.finished) == 2


@pytest.mark.parametrize("blocks", [60, 66, 70, 90, 140, 200])
def test_prompts_in_pieces_end_whatever_they_hold_from_each_other(blocks):
    """A window keeps more blocks while a chunk is in flight than it does afterwards."""
    layout = KVLayout(block=16, bytes_per_block=1, groups=((512, 1), (0, 1)), bytes_per_token=1)
    simulation = Simulation(Engine(OneMillisecond(), layout, blocks, 256, 64), requests(6, prompt=700, output=20), None)
    simulation.run()
    assert len(simulation.counters.finished) + simulation.refused == 6
    assert bool(simulation.refused) == (layout.request_blocks(720, 2 * 256) > blocks - 1)


def test_nobody_is_let_in_in_a_step_that_preempts():
    """Two requests fill 20 blocks; when they need more, the second waits, and so does a third that would fit."""
    given = [Request(0.0, 150, 60), Request(0.0, 150, 60), Request(0.0, 16, 5)]
    simulation = Simulation(engine(blocks=21, sequences=2), given, None)
    schedule, seen = simulation._schedule, []

    def watched():
        before = simulation.counters.preemptions
        chunks = schedule()
        seen.append((simulation.counters.preemptions > before, [request for request, _ in chunks]))
        return chunks

    simulation._schedule = watched
    simulation.run()
    assert any(preempted for preempted, _ in seen)
    assert all(not chunks for preempted, chunks in seen if preempted)
    assert len(simulation.counters.finished) == 3


def test_a_prompt_is_let_in_only_where_all_of_it_fits():
    """Chunks of 100 tokens: the second prompt of 200 would fit with its first chunk, 7 of 9 free blocks."""
    simulation = Simulation(engine(blocks=23, chunk=100), requests(2, prompt=200, output=5), None)
    most = []
    step = simulation._step

    def watched(chunks):
        most.append(len(simulation.filling) + len(simulation.decoding))
        step(chunks)

    simulation._step = watched
    simulation.run()
    assert max(most) == 1
    assert len(simulation.counters.finished) == 2


def test_preemption_costs_time_not_tokens():
    tight, _ = run(requests(20, prompt=200, output=200), blocks=120)
    roomy, _ = run(requests(20, prompt=200, output=200), blocks=10_000)
    assert tight.preemptions > 0
    assert tight.tokens < roomy.tokens


def test_a_pool_that_shrinks_and_grows():
    given = requests(60, prompt=160, output=100, gap=0.002)
    outcome, simulation = run(given, blocks=400, resizes=((0.05, 60), (0.3, 400)))
    assert simulation.pool == 400
    assert len(simulation.counters.finished) == 60
    steady, _ = run(requests(60, prompt=160, output=100, gap=0.002), blocks=400)
    assert outcome.ttft["p99"] > steady.ttft["p99"]


def test_a_loan_is_taken_back_for_a_big_prompt_and_lent_again():
    loan = Loan(blocks=50, tokens=256, pause=0.005)
    outcome, _ = run(requests(1, prompt=900, output=5), loan=loan)
    plain, _ = run(requests(1, prompt=900, output=5))
    assert outcome.ttft["mean"] == pytest.approx(plain.ttft["mean"] + 5)
    small, _ = run(requests(1, prompt=200, output=5), loan=loan)
    assert small.ttft["mean"] == pytest.approx(1.2)


def test_a_loan_makes_room_for_more_requests():
    given = {"concurrency": 30, "blocks": 100}
    lent, one = run(requests(90, prompt=60, output=200), **given, loan=Loan(100, 256))
    static, other = run(requests(90, prompt=60, output=200), **given)
    assert lent.running > 1.3 * static.running
    assert len(one.counters.finished) == len(other.counters.finished) == 90


def test_more_load_means_more_waiting():
    slow = simulate(engine(), Workload(Lengths(500), Lengths(50), rate=20), 300)
    fast = simulate(engine(), Workload(Lengths(500), Lengths(50), rate=600), 300)
    assert fast.ttft["p90"] > slow.ttft["p90"]
    assert fast.tokens > slow.tokens
