"""The decision and the regime map."""

import json
from dataclasses import replace

import pytest
from elastic_tools.planner.__main__ import parser
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import PRESETS, load_model
from elastic_tools.planner.estimate import Plan, times_of
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.memory import activations
from elastic_tools.planner.options import question
from elastic_tools.planner.recommend import recommend
from elastic_tools.planner.regime import Regime, cells, prefill_ms, regime, smallest_chunk


def decide(*arguments):
    return recommend(question(parser().parse_args(["recommend", *arguments])))


def test_a_model_that_fits_one_gpu_is_compressed():
    decision = decide("--model", "Llama-3.1-8B", "--gpu", "H100")
    assert decision.chosen.plan.tp == 1
    assert decision.chosen.plan.dtype.name == "fp8"
    assert decision.steps[0].startswith("Weights fit one GPU. 1 x H100: 72.9 - weights 15.0")
    assert "compress to fp8" in decision.steps[1]
    assert not decision.elastic


def test_weights_that_need_two_gpus_get_two():
    decision = decide("--model", "Llama-3.1-70B", "--gpu", "H200")
    assert decision.steps[0].startswith("Weights need 2 GPUs. 1 x H200")
    assert decision.chosen.plan.tp >= 2


def test_more_gpus_are_taken_where_they_are_cheaper():
    """Two H100 hold the weights of a 70B model and next to nothing else."""
    decision = decide("--model", "Llama-3.1-70B", "--gpu", "H100", "--workload", "document")
    assert decision.chosen.plan.tp > 2
    assert any(step.startswith("More GPUs are cheaper here") for step in decision.steps)
    two = [each for each in decision.considered if each.plan.tp == 2 and each.met]
    assert decision.chosen.dollars < min(each.dollars for each in two)


def test_more_gpus_buy_latency():
    decision = decide("--model", "Llama-3.1-8B", "--gpu", "L40S", "--workload", "long", "--tpot", "15")
    assert decision.chosen.met
    assert decision.chosen.plan.tp > 1
    assert any(step.startswith("Latency: 1 GPU cannot keep the SLOs") for step in decision.steps)


def test_slos_that_nothing_keeps_are_said():
    decision = decide("--model", "Llama-3.1-8B", "--gpu", "L40S", "--tpot", "0.5")
    assert not decision.chosen.met
    assert any("no plan here keeps the SLOs" in step for step in decision.steps)


def test_the_gpu_is_chosen_by_price():
    cheap = decide("--model", "Llama-3.1-8B", "--gpu", "H100", "A100", "--tp", "1", "--price", "A100=0.1")
    assert cheap.chosen.plan.gpu.name == "A100"
    assert cheap.steps[0].startswith("GPU: A100.")


def test_where_the_map_says_lend_the_simulation_decides(tmp_path):
    """A model with a large cache a token, and very long steps."""
    config = json.loads((PRESETS / "Llama-2-7B.json").read_text()) | {"max_position_embeddings": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--gpu", "H100", "--tp", "2", "--chunk", "32768", "--sequences", "256", "--no-slo", "--cache", "bf16"]
    lengths = ["--prompt-tokens", "16384", "--output-tokens", "512"]
    decision = decide("--model", str(tmp_path), *given, *lengths)
    assert "simulated" in decision.steps[-1]
    assert decision.elastic is decision.steps[-1].startswith("Reserve: lend it")
    assert decision.steps[0].startswith("Weights fit 2 GPUs, the fewest offered")


def plan(model="Llama-3.1-8B", tp=1, chunk=32768):
    return Plan(load_model(model), gpu("H100"), cache_dtype("bf16"), tp, chunk, 256)


def test_gains_by_hand():
    asked = plan()
    found = regime(asked, 16384)
    model = asked.model

    def reserve(tokens):
        return activations(model, tokens, 1, 256).total

    assert found.small_gain == pytest.approx((reserve(32768) - reserve(found.small_chunk)) / 131_072)
    assert found.lent_most == pytest.approx((reserve(32768) - reserve(256)) / 131_072)
    assert found.lent_gain == found.lent_most * found.idle
    assert 0 < found.idle < 1


def test_a_smaller_chunk_keeps_to_what_it_may_cost():
    times = times_of(plan())
    whole = prefill_ms(times, 65536, 32768)
    for allowed in (0.0, 0.01, 0.1):
        chunk, cost = smallest_chunk(times, 65536, 32768, allowed)
        assert cost <= allowed
        assert prefill_ms(times, 65536, chunk) <= whole * (1 + allowed) + 1e-9


def test_the_reserve_melts_under_tensor_parallelism():
    shares = [regime(plan(tp=tp), 16384).lent_most / regime(plan(tp=tp), 16384).tokens for tp in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(
    ("small", "lent", "idle", "verdict"),
    [
        (50, 400, 0.1, "neither"),
        (500, 400, 1.0, "small-chunk"),
        (500, 2000, 0.5, "lend"),
        (500, 2000, 0.2, "small-chunk"),
    ],
)
def test_verdicts(small, lent, idle, verdict):
    point = Regime("m", "H100", 1, 8192, 4096, 10_000, 1024, 0.0, small, idle, lent)
    assert point.verdict == verdict


def test_the_map_is_deterministic():
    first, second = ([each.as_row() for each in cells(["Llama-3.1-8B"])] for _ in range(2))
    assert first == second
    assert {row["tp"] for row in first} == {1, 2, 4, 8}


def test_a_context_without_room_has_no_point():
    assert regime(replace(plan("Qwen2.5-32B")), 131072) is None
