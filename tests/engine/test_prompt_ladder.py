"""Long prompts under a memory budget, up and down: vLLM #52872, where the engine died though profiling had passed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.model import tiny_llama
from support.servers import engine_environment

pytestmark = pytest.mark.engine

MOST = 6144  # tokens of the largest step: a quarter of the ladder, which went up to 24k
SMALL = MOST // 12
LIVING = ["static", "small-chunk", "reclaim", "adaptive"]
BY_PHASE = ["reclaim", "adaptive"]
PROMPTS = [MOST // 12, MOST // 4, MOST // 2, MOST - 8, MOST // 12, MOST // 2]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """What came of every policy."""
    # As wide an MLP as makes a large step take more than the margin and everything that the engine has at hand.
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", intermediate=4096)
    options = {
        "model": str(model),
        "policies": [*LIVING, "always-lent"],
        "room": 1536 << 20,
        "margin": 192 << 20,
        "most": MOST,
    }
    command = [sys.executable, Path(__file__).with_name("ladder.py"), json.dumps(options)]
    finished = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, timeout=1500)
    assert finished.returncode == 0, finished.stderr[-6000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("policy", LIVING)
def test_it_completes_with_the_same_tokens(ladder, policy):
    """Prompt log probabilities, structured output and several answers to a prompt among them."""
    assert "error" not in ladder[policy], ladder[policy]["error"]
    assert len(ladder[policy]["rungs"]) == len(PROMPTS) + 3
    assert all(len(answers[0]) > 0 for answers in ladder[policy]["tokens"].values())
    assert len(ladder[policy]["tokens"]["several"]) == 3
    assert ladder[policy]["tokens"] == ladder["static"]["tokens"]


def test_always_lent_dies_of_the_first_step_that_needs_the_reserve(ladder):
    """As an allocation fails on a GPU that is full."""
    result = ladder["always-lent"]
    assert result["error"].startswith("RuntimeError"), result["error"]
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in result["error"]
    assert len(result["rungs"]) < PROMPTS.index(max(PROMPTS)) + 1


@pytest.mark.parametrize("policy", BY_PHASE)
@pytest.mark.parametrize("when", ["decoding", "decoding_again"])
def test_while_only_decoding_the_cache_has_nearly_all(ladder, policy, when):
    result = ladder[policy]
    reserve = result[when]["reserve"]
    everything = result["start"] + reserve["reserve_bytes"] // result["per_block"]
    assert result[when]["resident"] >= 0.95 * everything
    assert result[when]["resident"] == result["start"] + reserve["borrowed_blocks"]
    assert reserve["borrowed_blocks"] == reserve["lendable_blocks"] > 0


@pytest.mark.parametrize("policy", BY_PHASE)
def test_a_large_prompt_has_the_steps_of_static(ladder, policy):
    largest = [rung["largest"] for rung in ladder[policy]["rungs"][: len(PROMPTS)]]
    assert largest == [rung["largest"] for rung in ladder["static"]["rungs"][: len(PROMPTS)]]
    assert largest == [length + 1 for length in PROMPTS]  # and a token of the request that decodes
    assert ladder[policy]["decoding_again"]["reserve"]["reserve_returns"] >= 2


def test_a_small_chunk_is_kept(ladder):
    result = ladder["small-chunk"]
    assert max(rung["largest"] for rung in result["rungs"]) == SMALL
    assert result["decoding"]["resident"] > result["start"]


def test_log_probabilities_of_a_prompt_have_smaller_steps(ladder):
    """Each of its tokens takes several times the vocabulary: more than the whole reserve has for half of the prompt."""
    scored = ladder["static"]["rungs"][len(PROMPTS)]
    assert scored["length"] == MOST // 2
    assert scored["largest"] < MOST // 2
