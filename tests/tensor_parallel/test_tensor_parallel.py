"""Two ranks: processes of the engine, or actors on two Ray nodes. A resize is one transaction over both."""

import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time
import urllib.error

import psutil
import pytest
from elastic_tools.model import padded_heads
from support.servers import SUPPORT, engine_environment, serving

from .networks import why_not
from .ray_nodes import ray_environment, two_nodes
from .shared_memory import no_shared_memory_left

pytestmark = [pytest.mark.engine, pytest.mark.alone]

KEY = "a-test-key"
ELASTIC = '{"start": "48MiB", "capacity": "96MiB"}'
STEP_SECONDS = 60  # that a rank may take for one step, or for its part of a resize
STORY = "The lighthouse keeper wrote in his log every evening, whatever the weather was. "
PROMPTS = [
    f"{STORY * (number % 4 * 3)}Question {number}: name three things that are blue.\nAnswer:" for number in range(12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2 with heads that two ranks can share."""
    return str(padded_heads(tmp_path_factory.mktemp("model") / "padded"))


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory):
    """What a single rank answers, its cache never resized."""
    log = tmp_path_factory.mktemp("one") / "log"
    with serving(log, "--kv-cache-memory-bytes", str(256 << 20), model=model, key=KEY) as server:
        return [server.complete(prompt, 24) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["mp", "ray"])
def server(request, model, one_rank, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = ray_environment(engine_environment())
    environment |= {
        "PYTHONPATH": f"{SUPPORT}:{SUPPORT / 'faulty_host'}:{environment['PYTHONPATH']}",
        "HOST_GRANULE": str(4 * 32 << 10),  # chunks of four blocks, so that blocks in use have to move
        "HOST_FAULT": str(folder / "fault"),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_SECONDS),
    }
    options = ("--elastic-kv-config", ELASTIC, "--tensor-parallel-size", "2", "--async-scheduling")
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_shared_memory_left())
        if request.param == "ray":
            environment = stack.enter_context(two_nodes(environment))
        backend = ("--distributed-executor-backend", request.param)
        server = stack.enter_context(
            serving(folder / "log", *options, *backend, model=model, key=KEY, environment=environment)
        )
        server.fault = folder / "fault"
        server.backend = request.param
        yield server


def assert_ranks_agree(server):
    state = server.state()
    assert [rank.pop("rank") for rank in state["ranks"]] == [0, 1]
    assert state["ranks"][0] == state["ranks"][1]
    assert state["ranks"][0]["reported_bytes"] == state["ranks"][0]["resident_bytes"] == state["bytes"]["resident"]
    return state


def ask_all(server) -> list[threading.Thread]:
    """All prompts at the same time; `server.got` has the answers when the threads have ended."""
    server.got = {}

    def ask(number):  # what fails here is missing
        server.got[number] = server.complete(PROMPTS[number], 24)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    return threads


def answers(server, threads: list[threading.Thread]) -> list[str | None]:
    for thread in threads:
        thread.join(300)
    return [server.got.get(number) for number in range(len(PROMPTS))]


def test_same_tokens_as_one_rank_while_it_is_resized(server, one_rank):
    """Two nodes for Ray, steps in flight, and blocks in use that have to move."""
    assert "Asynchronous scheduling stays on" in server.log.read_text()
    choose = random.Random(3)
    state = server.state()["blocks"]
    costs = {"moved": 0, "preempted": 0, "evicted": 0}
    turns = itertools.cycle([1, 3, 3, 0])  # of the capacity; at the base, the requests that run do not find room
    for rounds in itertools.count():
        if rounds >= 3 and (all(costs.values()) or rounds == 12):
            break
        threads = ask_all(server)
        while any(thread.is_alive() for thread in threads):
            part = next(turns)
            most = state["capacity"] // part if part else state["base"]
            answer = server.resize(blocks=choose.randint(state["base"], most))
            assert answer["outcome"] in ("done", "partial"), answer
            costs = {name: count + answer[name] for name, count in costs.items()}
            time.sleep(0.1)
        assert answers(server, threads) == one_rank
    assert all(costs.values()), costs


def test_ranks_on_ray_are_in_two_networks(server):
    if server.backend == "mp":
        pytest.skip("processes of one engine share its network")
    if reason := why_not():
        pytest.skip(f"both Ray nodes are in this machine's network: {reason}")
    assert len({os.readlink(f"/proc/{worker.pid}/ns/net") for worker in ray_workers()}) == 2


def test_ranks_have_the_same_left_after_shrinking(server):
    server.resize(fraction=1)
    assert_ranks_agree(server)
    base = server.state()["blocks"]["base"]
    answer = server.resize(blocks=base)
    assert (answer["outcome"], answer["to"]) == ("done", base), answer
    state = assert_ranks_agree(server)
    assert state["bytes"]["resident"] == base * state["bytes"]["per_block"]


def test_a_rank_that_fails(server, one_rank):
    """kvcached #372: the error was swallowed and the workers hung."""
    before = assert_ranks_agree(server)
    server.fault.write_text("1")
    threads = ask_all(server)
    answer = server.resize(fraction=1)
    server.fault.unlink()
    assert answer["outcome"] == "refused"
    assert answer["reason"].startswith("rank 1: create of ")
    assert "rank 0" not in answer["reason"]
    assert answers(server, threads) == one_rank
    server.resize(blocks=before["blocks"]["base"])
    after = assert_ranks_agree(server)
    assert after["ranks"] == before["ranks"]
    assert after["transactions"]["failed"] >= 1
    assert server.resize(fraction=1)["outcome"] == "done"
    assert_ranks_agree(server)


def test_a_rank_that_dies_or_hangs(server):
    """vLLM #45615: the engine was dead, and /health still said 200. Ends the server, so it comes last."""
    rank = one_worker(server)
    os.kill(rank, signal.SIGKILL if server.backend == "mp" else signal.SIGSTOP)
    try:
        begin = time.monotonic()
        told = []

        def resize():
            try:
                told.append(server.call("POST", "/elastic_kv/resize", {"fraction": 0.5}))
            except OSError as error:  # the server ended before it could answer
                told.append(error)

        thread = threading.Thread(target=resize)
        thread.start()
        while healthy(server) and time.monotonic() - begin < 3 * STEP_SECONDS:
            time.sleep(1)
        assert not healthy(server)
        thread.join(120)
        assert not thread.is_alive(), "the resize waits for ever"
        (answer,) = told
        assert isinstance(answer, OSError) or answer[0] >= 500, answer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def one_worker(server) -> int:
    """The process of a rank; with Ray it is none of the server's."""
    if server.backend == "mp":
        return int(re.findall(r"Worker_TP1 pid=(\d+)", server.log.read_text())[-1])
    return ray_workers()[0].pid


def ray_workers() -> list[psutil.Process]:
    """The processes of the ranks, which are children of the Ray nodes."""
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if " ".join(process.cmdline()).startswith("ray::RayWorkerProc")]


def healthy(server) -> bool:
    try:
        return server.call("GET", "/health")[0] == 200
    except (OSError, urllib.error.URLError):
        return False
