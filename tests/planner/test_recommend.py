"""The decision and the regime map."""

import json
import re
from dataclasses import replace

import pytest
from elastic_tools.planner.__main__ import parser
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import PRESETS, load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan, times_of
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.options import question
from elastic_tools.planner.recommend import recommend
from elastic_tools.planner.regime import Regime, cells, prefill_ms, regime, smallest_chunk
from elastic_tools.planner.step import pairs


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
    """Llama-3.1-8B, steps of 32,768 tokens and 256 requests, requests of 16,896 tokens = 1,056 blocks of 2 MiB.

    The reserve is 2 x 32,768 x 4,096 x 2 + 32,768 x 3 x 14,336 x 2 = 3,355,443,200 bytes. A step of 256 tokens keeps
    4,194,304 and the sampler's 256 x 128,256 x 10 = 328,335,360: 3,022,913,536 less, 1,441.4 blocks.
    """
    found = regime(plan(), 16384, 512)
    assert plan().memory().reserve.total == 3_355_443_200
    assert found.context == 16_896
    assert found.lent_blocks in (1441, 1442)
    assert found.lent_most == pytest.approx(16 * found.lent_blocks)
    assert found.lent_gain == found.lent_most * found.idle
    assert 0 < found.idle < 1
    # a step of c tokens keeps c x 16,384 for the residual stream, and the sampler's or c x 86,016 of the MLP
    kept = found.small_chunk * 16_384 + max(328_335_360, found.small_chunk * 86_016)
    assert found.small_gain == pytest.approx((3_355_443_200 - kept) / 131_072, abs=16)


def test_gains_of_a_hybrid_by_hand():
    """Gemma-2-9B: a block of 2,752,512 bytes holds 16 tokens of one of two groups of layers.

    A request of 8,192 tokens takes 512 of full attention, and of the window 513 while the prompt is computed: a block
    more is 8,192 / 1,025 tokens more, and not the 16 that it has room for.
    """
    asked = Plan(load_model("Gemma-2-9B"), gpu("H100"), cache_dtype("bf16"), 1, 8192, 256)
    found = regime(asked, 7680, 512)
    # the reserve: 8,192 x (2 x 3,584 + 3 x 14,336) x 2 = 822,083,584; a step of 256 keeps 3,670,016 and the sampler's
    # 256 x 256,000 x 10 = 655,360,000: 163,053,568 bytes less, 59.2 blocks
    assert asked.memory().reserve.total == 822_083_584
    assert found.lent_blocks in (59, 60)
    assert found.lent_most == pytest.approx(found.lent_blocks * 8192 / 1025)


def test_a_smaller_chunk_keeps_to_what_it_may_cost():
    times = times_of(plan())
    whole = prefill_ms(times, 65536, 32768)
    for allowed in (0.0, 0.01, 0.1):
        chunk, cost = smallest_chunk(times, 65536, 32768, allowed)
        assert cost <= allowed
        assert prefill_ms(times, 65536, chunk) <= whole * (1 + allowed) + 1e-9


def test_the_reserve_melts_under_tensor_parallelism():
    shares = [regime(plan(tp=tp), 16384, 512).lent_most / regime(plan(tp=tp), 16384, 512).tokens for tp in (1, 2, 4, 8)]
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
    point = Regime("m", "H100", 1, 8192, 4096, 10_000, 1024, 0.0, small, idle, lent, 1)
    assert point.verdict == verdict


def test_the_map_is_deterministic():
    first, second = ([each.as_row() for each in cells(["Llama-3.1-8B"])] for _ in range(2))
    assert first == second
    assert {row["tp"] for row in first} == {1, 2, 4, 8}


def test_the_map_ends_where_models_do():
    assert max(each.context for each in cells(["Llama-2-7B"])) == 4096


def test_a_cache_that_the_gpu_lacks_makes_no_map():
    with pytest.raises(PlanError, match="nvfp4 needs compute capability"):
        list(cells(["Llama-2-7B"], cache="nvfp4"))


def test_attention_of_a_cut_prompt():
    """The second half of 8,192 tokens: over itself a prompt of 4,096, and of the 33,554,432 pairs of the whole prompt
    half, those with the first half, as the whole prompt computes them.
    """
    times = times_of(plan())
    whole, half = times.prefill(8192, 0), times.prefill(4096, 0)
    assert times.prefill(4096, 4096) == pytest.approx(half + whole / 2)
    assert half + times.prefill(4096, 4096) > whole


@pytest.mark.parametrize(("tokens", "window", "expected"), [(4, 0, 8), (4, 4, 8), (10, 4, 8 + 6 * 4), (3, 8, 4.5)])
def test_pairs_of_queries_and_keys(tokens, window, expected):
    assert pairs(tokens, window) == expected


def test_a_context_without_room_has_no_point():
    assert regime(replace(plan("Qwen2.5-32B")), 131072, 512) is None


def test_what_a_cache_costs_can_be_checked_by_hand():
    decision = decide("--model", "Llama-3.1-8B", "--gpu", "H100")
    step = next(one for one in decision.steps if one.startswith("Cache:"))
    price = float(re.search(r"\$([\d.]+) an hour", step)[1])
    found = re.findall(r"([\d,]+) tokens/s, \$(\d+\.\d+)", step)
    assert len(found) >= 3
    for tokens, dollars in found:
        assert float(dollars) == pytest.approx(price / (3600 * float(tokens.replace(",", ""))) * 1e6, abs=0.0006)
