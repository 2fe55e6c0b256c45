"""Estimates: arithmetic beside simulation, limits, provenance."""

import json
from dataclasses import replace

import pytest
import yaml
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.emit import as_yaml, longest
from elastic_tools.planner.estimate import Plan, estimate, run, steady, times_of, users
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.operators import Source
from elastic_tools.planner.workload import WORKLOADS, Lengths, Workload


def plan(model="Llama-3.1-8B", device="H100", cache="bf16", tp=1, **rest):
    return Plan(load_model(model), gpu(device), cache_dtype(cache), tp, **rest)


@pytest.mark.parametrize(
    ("asked", "prompt", "output", "concurrency"),
    [
        (plan(), 1024, 256, 64),
        (plan(device="L40S", cache="fp8"), 4096, 512, 16),
        (plan("Qwen2.5-14B", "A100", "int8", 2), 2048, 1024, 100),
        (plan("Llama-3.1-70B", "H200", "3bit", 4), 16384, 2048, 20),
        (plan("Mixtral-8x7B", "H100", "bf16", 2), 1024, 1024, 32),
    ],
)
def test_arithmetic_agrees_with_the_simulation(asked, prompt, output, concurrency):
    found = steady(times_of(asked), asked.step_tokens, concurrency, prompt, output)
    work = Workload(Lengths(prompt), Lengths(output), concurrency=concurrency)
    outcome = run(asked, asked.memory(), work)
    assert found.tokens == pytest.approx(outcome.tokens, rel=0.1)
    assert found.tpot == pytest.approx(outcome.tpot["mean"], rel=0.1)


@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4"])
def test_a_plan_takes_the_most_that_keeps_the_slos(cache):
    work = WORKLOADS["document"]
    found = estimate(plan(cache=cache), work)
    assert found.met
    assert found.concurrency <= found.users
    more = min(int(found.concurrency * 1.25) + 1, 1024)
    outcome = run(found.plan, found.memory, replace(work, concurrency=more))
    assert outcome.tpot["p90"] > work.tpot or more > found.users


def test_slos_that_cannot_be_kept_are_missed_with_one_request():
    found = estimate(plan(), replace(WORKLOADS["chat"], tpot=0.1))
    assert not found.met
    assert found.concurrency == 1


def test_users_by_hand():
    """28,567 blocks, one of which is the null block; 1,280 tokens are 80 blocks."""
    assert users(plan().memory(), 1280) == 28_566 / 80


def test_the_longest_request_by_hand():
    memory = plan("Gemma-2-9B", "L40S", utilization=0.47).memory()
    assert memory.blocks == 837
    # 417 blocks of full attention, and one more than that of the window, which so few tokens do not fill
    assert longest(memory, 8192) == 417 * 16
    assert longest(memory, 1000) == 1000


@pytest.mark.parametrize(
    ("elastic", "lend", "policy"), [(False, False, None), (True, False, "on-demand"), (False, True, "reclaim")]
)
def test_what_a_plan_asks_of_an_elastic_cache(elastic, lend, policy):
    found = estimate(plan(), replace(WORKLOADS["chat"], concurrency=4))
    options = yaml.safe_load(as_yaml(found, "m", 1280, None, elastic, lend))
    config = options.get("elastic-kv-config")
    assert (json.loads(config)["policy"] if config else None) == policy


def test_a_rate_above_what_a_plan_answers_keeps_no_slo():
    """Some minutes of a queue that grows may still look fast."""
    asked = plan("Qwen2.5-7B", "L40S")
    loose = Workload(Lengths(1000), Lengths(200), rate=1.0, ttft=1e9, tpot=1e9)
    slow = estimate(asked, loose)
    assert slow.met
    # all requests together: L40S steps of 2,048 tokens, 256 requests
    most = steady(times_of(asked), 2048, 256, 1000, 200).tokens / 200
    assert slow.most_rate == pytest.approx(most)
    assert not estimate(asked, replace(loose, rate=1.5 * most)).met
    assert estimate(asked, replace(loose, rate=0.8 * most)).met


def test_a_free_cache_is_faster_than_a_slow_one_and_holds_as_much():
    slow, free = plan(cache="3bit"), plan(cache="3bit", ideal=True)
    assert times_of(free).step(32, 8192, []) < times_of(slow).step(32, 8192, []) / 2
    assert slow.memory() == free.memory()


def test_more_gpus_are_faster_and_a_bigger_context_is_slower():
    steps = [times_of(plan("Llama-3.1-70B", "H200", tp=tp)).step(16, 4096, []) for tp in (2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert times_of(plan()).step(16, 32768, []) > times_of(plan()).step(16, 1024, [])


def test_provenance():
    known = times_of(plan()).sources()
    assert known["attention projections"] is Source.INTERPOLATED
    assert known["norms, rotation, activation"] is Source.MODELLED
    assert times_of(plan(cache="int4")).sources()["decode attention"] is Source.MODELLED
    assert times_of(plan("DeepSeek-V2-Lite")).sources()["decode attention"] is Source.MODELLED
    assert times_of(replace(plan(), model=load_model("Llama-3.1-8B", "int4"))).sources()["MLP"] is Source.MODELLED
    assert known["prefill attention, uncut prompts"] is Source.INTERPOLATED
    assert known["prefill attention, cut prompts"] is Source.MODELLED


def test_no_step_is_faster_than_the_memory():
    asked = plan()
    step = times_of(asked).step(1, 16, [])
    assert step > asked.memory().weights / asked.gpu.bandwidth * 1e3 * 0.9
