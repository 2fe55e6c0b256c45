"""A real server answers while its cache grows and shrinks, and the system sees the memory come and go."""

import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
RESIZES = 8  # of the storm; `test_storm.py` has a harder one, with a model that is not real

PROMPTS = [f"Question {number}: name three things that are blue.\nAnswer:" for number in range(8)]


@pytest.fixture(scope="module")
def wanted(server):
    """What the prompts are answered with, one after the other, at one size."""
    return [server.complete(prompt, 48) for prompt in PROMPTS]


def worker_pid(server):
    """The process that has the cache."""
    return int(re.search(r"pid=(\d+)\).*Elastic KV cache: reserved", server.log.read_text())[1])


def ask_all(server):
    """All prompts at the same time: the threads that ask, and a dict that gets the answers. What fails is missing."""
    got = {}

    def ask(number):
        got[number] = server.complete(PROMPTS[number], 48)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    return threads, got


def wait_for(happened):
    """Wait until it has happened. That it did not is for the caller to find."""
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)


def assert_consistent(state):
    blocks = state["blocks"]
    assert all(count >= 0 for count in blocks.values()), blocks
    assert blocks["base"] <= blocks["resident"] <= blocks["capacity"], blocks
    # The null block belongs to none of the three.
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["resident"] - 1, blocks


def test_the_state_tells_all_sizes(server):
    state = server.state()
    assert_consistent(state)
    assert (state["policy"], state["driver"], state["block_size"]) == ("static", "host", 32)
    per_block = state["bytes"]["per_block"]
    assert per_block == 30 * 2 * 32 * 3 * 64 * 4  # layers, K and V, tokens, KV heads, head size, float32
    assert state["blocks"]["capacity"] == (512 << 20) // per_block
    assert state["blocks"]["base"] == state["chunk_blocks"]
    assert state["bytes"]["resident"] == state["blocks"]["resident"] * per_block
    assert [rank["rank"] for rank in state["ranks"]] == [0]
    handles = state["ranks"][0]["handles"]  # one for each layer and run of chunks
    assert handles % 30 == 0
    assert 30 <= handles <= 30 * state["blocks"]["resident"] // state["chunk_blocks"]
    assert state["last"]["to"] == state["blocks"]["capacity"]


def test_it_schedules_asynchronously(server):
    """Otherwise the tests here would say nothing about steps in flight."""
    assert "Asynchronous scheduling stays on" in server.log.read_text()


def test_memory_follows_each_resize(server):
    """The memory behind the cache, read from outside, rises and falls by what was asked, within a chunk.

    The same holds for all memory of the server's processes, but for what they allocate besides.
    """
    state = server.state()
    per_block, chunk_blocks = state["bytes"]["per_block"], state["chunk_blocks"]
    capacity, base = state["blocks"]["capacity"], state["blocks"]["base"]
    for blocks in (capacity // 2, capacity, base, capacity // 3, capacity // 4, capacity):
        size, cache, total = server.state()["blocks"]["resident"], server.cache_bytes(), server.resident_bytes()
        answer = server.resize(blocks=blocks)
        assert (answer["outcome"], answer["from"]) == ("done", size), answer
        assert blocks - chunk_blocks < answer["to"] <= blocks
        asked = (blocks - size) * per_block
        assert abs(server.cache_bytes() - cache - asked) <= chunk_blocks * per_block
        assert abs(server.resident_bytes() - total - asked) <= chunk_blocks * per_block + (16 << 20)
        reported = server.state()["bytes"]["reported"]
        assert reported == server.cache_bytes() == answer["to"] * per_block
        if blocks != base:
            assert server.complete("The capital of France is", 2).startswith(" Paris")


@pytest.mark.parametrize("unit", ["blocks", "bytes", "tokens", "fraction"])
def test_each_unit(server, unit):
    state = server.state()
    blocks = state["blocks"]["capacity"] // 2
    value = {
        "blocks": blocks,
        "bytes": blocks * state["bytes"]["per_block"],
        "tokens": blocks * state["block_size"],
        "fraction": 0.5,
    }[unit]
    answer = server.resize(**{unit: value})
    assert answer["outcome"] == "done", answer
    assert answer["to"] == blocks // state["chunk_blocks"] * state["chunk_blocks"]


def test_a_dry_run_tells_and_changes_nothing(server):
    before = server.state()["blocks"]
    answer = server.resize(blocks=before["base"], dry_run=True)
    assert (answer["outcome"], answer["from"], answer["to"]) == ("done", before["resident"], before["base"])
    assert server.state()["blocks"] == before


def test_bad_input_changes_nothing(server):
    before = server.state()
    for body in ({}, {"blocks": 0}, {"blocks": 10**9}, {"bytes": "1 parsec"}, {"blocks": 20, "tokens": 2}, {"what": 1}):
        status, answer = server.call("POST", "/elastic_kv/resize", body)
        assert status == 400, answer
        assert answer["error"]["message"]
    status, _ = server.call("POST", "/elastic_kv/resize", {"fraction": 0.5}, key="wrong")
    assert status == 401
    after = server.state()
    assert (after["blocks"], after["transactions"]) == (before["blocks"], before["transactions"])


@pytest.mark.parametrize("allowed", [False, True])
def test_a_shrink_under_running_requests(server, wanted, allowed):
    """It stops at what they hold, or preempts them: they go on, one after the other at least, and no token changes."""
    floor = server.state()["blocks"]["base"]
    threads, got = ask_all(server)
    server.wait_until_busy()
    answer = server.resize(blocks=floor, allow_preemption=allowed)
    if allowed:
        assert (answer["outcome"], answer["to"]) == ("done", floor), answer
        assert answer["preempted"] > 0
    else:
        assert (answer["outcome"], answer["preempted"]) == ("partial", 0), answer
        assert floor < answer["to"]
        assert "live blocks need the room" in answer["reason"]
    for thread in threads:
        thread.join(300)
    assert [got.get(number) for number in range(len(PROMPTS))] == wanted
    # What the requests needed beyond the size that was asked for comes back.
    wait_for(lambda: server.state()["blocks"]["resident"] <= floor)
    blocks = server.state()["blocks"]
    assert (blocks["resident"], blocks["allowed"]) == (floor, floor)
    server.resize(fraction=1)


def test_resizes_while_generation_is_paused(server, wanted):
    """As for a change of weights: requests wait where they are, and the memory may go to something else meanwhile."""
    threads, got = ask_all(server)
    server.wait_until_busy()
    assert server.call("POST", "/pause?mode=keep&clear_cache=false")[0] == 200
    base = server.state()["blocks"]["base"]
    answer = server.resize(blocks=base)
    assert (answer["outcome"], answer["to"]) == ("done", base), answer
    assert answer["preempted"] > 0
    assert server.cache_bytes() == base * server.state()["bytes"]["per_block"]
    assert server.resize(fraction=1)["outcome"] == "done"
    assert got == {}, "a request went on while generation was paused"
    assert server.call("POST", "/resume")[0] == 200
    for thread in threads:
        thread.join(300)
    assert [got.get(number) for number in range(len(PROMPTS))] == wanted


def test_a_storm_of_resizes_changes_no_token(server, wanted):
    state = server.state()
    stop, wrong, failed, answers = threading.Event(), [], [], 0

    def client(seed):
        nonlocal answers
        rng = random.Random(seed)
        while not stop.is_set():
            number = rng.randrange(len(PROMPTS))
            try:
                text = server.complete(PROMPTS[number], 48)
            except Exception as error:  # an exception that ends a thread would pass unseen
                failed.append(error)
                return
            answers += 1
            if text != wanted[number]:
                wrong.append((number, text))

    threads = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    rng, outcomes = random.Random(1), set()
    for _ in range(RESIZES):
        answer = server.resize(blocks=rng.randint(state["blocks"]["base"], state["blocks"]["capacity"]))
        outcomes.add(answer["outcome"])
        assert_consistent(server.state())
        time.sleep(rng.uniform(0, 0.2))
    server.resize(fraction=1)
    stop.set()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert answers > 0
    assert failed == []
    assert wrong == []
    assert outcomes <= {"done", "partial", "refused"}
    idle = server.resize(blocks=state["blocks"]["base"])
    assert idle["outcome"] == "done", idle
    assert server.state()["bytes"]["reported"] == state["blocks"]["base"] * state["bytes"]["per_block"]


def test_500_cycles_return_to_where_they_began(server):
    """vLLM #36651: pages were released twice over repeated cycles. Half the cache, so that live pages stay beside."""
    process = psutil.Process(worker_pid(server))
    half = server.state()["blocks"]["capacity"] // 2

    def holds():
        server.resize(blocks=half)
        rank = server.state()["ranks"][0]
        mappings = len(Path(f"/proc/{process.pid}/maps").read_text().splitlines())
        return rank["handles"], server.cache_bytes(), process.num_fds(), mappings, process.memory_info().rss

    def cycle():
        for blocks in (half + 16, half):
            answer = server.resize(blocks=blocks)
            assert answer["outcome"] == "done", answer

    cycle()
    before = holds()
    for _ in range(500):
        cycle()
    after = holds()
    assert after[:3] == before[:3]
    assert abs(after[3] - before[3]) <= 16  # of the allocator
    assert abs(after[4] - before[4]) < 16 << 20


def test_it_says_that_it_is_elastic(server):
    """kvcached #110: elasticity was silently off after a slip in packaging. What tells of it has to agree."""
    state = server.state()
    logged = re.search(r"Elastic KV cache: reserved (\d+) bytes in (\d+) segments", server.log.read_text())
    assert logged, "the log does not say that the cache is elastic"
    assert (int(logged[1]), int(logged[2])) == (state["bytes"]["capacity"], 30)
    told = subprocess.run(
        [ROOT / "scripts" / "patchset", "status", Path(sys.prefix)], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told
    assert told.stdout.splitlines()[0].endswith(": applied")


def test_upstream_s_numbers_follow(server):
    """Several forks: the number of blocks was no longer true after a resize."""
    for fraction in (0.25, 0.75):
        answer = server.resize(fraction=fraction)
        deadline = time.monotonic() + 60  # the front end gets them a moment after the answer
        while time.monotonic() < deadline:
            metrics = server.call("GET", "/metrics")[1]
            told = re.search(r'vllm:cache_config_info{[^}]*num_gpu_blocks="(\d+)"', metrics)
            if int(told[1]) == answer["to"]:
                break
            time.sleep(0.1)
        assert int(told[1]) == answer["to"]
        tokens = answer["to"] * server.state()["block_size"]
        last = [line for line in server.log.read_text().splitlines() if "Elastic KV cache: resize" in line][-1]
        size, most = re.search(r"KV cache size: ([\d,]+) tokens, maximum concurrency: ([\d.]+)x", last).groups()
        assert int(size.replace(",", "")) == tokens
        assert float(most) == pytest.approx(tokens / 1024, abs=0.01)  # of requests of the greatest length


def test_metrics_follow(server):
    answer = server.resize(fraction=0.25)
    deadline = time.monotonic() + 60  # the front end gets them a moment after the answer
    while time.monotonic() < deadline:
        lines = server.call("GET", "/metrics")[1].splitlines()
        metrics = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:elastic_kv_"))
        labels = '{engine="0",model_name="SmolLM2"}'
        if float(metrics["vllm:elastic_kv_resident_blocks" + labels]) == answer["to"]:
            break
        time.sleep(0.1)
    state = server.state()
    for name, value in {
        "resident_blocks": answer["to"],
        "capacity_blocks": state["blocks"]["capacity"],
        "base_blocks": state["blocks"]["base"],
        "resident_bytes": state["bytes"]["resident"],
        "reported_bytes": state["bytes"]["reported"],
        "resize_seconds_count": sum(state["transactions"].values()),
        "resize_pause_seconds_count": sum(state["transactions"].values()),
    }.items():
        assert float(metrics[f"vllm:elastic_kv_{name}{labels}"]) == value, name
    resizes = [float(value) for name, value in metrics.items() if name.startswith("vllm:elastic_kv_resizes_total")]
    assert sum(resizes) == sum(state["transactions"].values())
