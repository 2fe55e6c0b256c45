"""What is offered where a plan has no room is one change, and it fits."""

from dataclasses import replace

import pytest
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.estimate import Plan
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.remedy import remedy


def plan(model="Llama-3.1-70B", device="L40S", **limits):
    return Plan(load_model(model), gpu(device), cache_dtype("auto"), **limits)


@pytest.mark.parametrize(
    ("given", "length", "words"),
    [
        (plan(), 1280, "--tp 4"),
        (plan(device="H100"), 1280, "--tp 2"),
        (plan("Llama-3.1-8B", utilization=0.1), 1280, "--utilization 0.92"),
        (plan("Llama-3.1-8B", chunk=10**14), 1280, "--chunk 2048"),
        (plan("Llama-3.1-70B", "L40S", tp=8, utilization=0.5), 131_072, "--utilization 0.92"),
    ],
)
def test_the_nearest_choice(given, length, words):
    assert remedy(given, length) == f"the nearest choice that fits is {words}"


def test_a_shorter_request_where_nothing_else_helps():
    words = remedy(plan("Llama-3.1-8B", "H200", tp=8), 10**9)
    assert words.startswith("the nearest choice that fits is a request of ")


def test_nothing_fits():
    huge = replace(plan(tp=8), model=replace(load_model("Llama-3.1-70B"), intermediate=10**7))
    assert remedy(huge, 1280) == "no choice of those in configs/hardware.toml fits"
