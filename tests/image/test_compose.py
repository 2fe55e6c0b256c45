"""Two containers of the cpu image, brought up with compose: two Ray nodes, each with a rank of one engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic_tools.model import padded_heads

from .compose import DRAIN_SECONDS, Stack, compose_command
from .containers import IMAGE

pytestmark = pytest.mark.skipif(not IMAGE, reason="runs a container image: make image, then make image-test")
DEAD_RANK_SECONDS = 300  # docs/operating.md: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
LONG = {"model": "m", "prompt": "Once", "max_tokens": 64, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Up for all tests of this file, which are in the order of a cluster's life."""
    command = compose_command()
    if command is None:
        pytest.skip("neither docker compose nor podman-compose works here")
    folder = tmp_path_factory.mktemp("stack")
    one = Stack(command, folder, padded_heads(folder / "model"))
    try:
        one.up()
        one.wait_for_health(True)
        yield one
    finally:
        one.end()
        assert one.containers() == {}


def rank_addresses(stack):
    """The addresses of the Ray nodes on which the ranks are, as Ray has it."""
    code = (
        "import ray, ray._private.state as state; ray.init('auto', log_to_driver=False);"
        "print(*(one['Address']['IPAddress'] for one in state.actors().values() if one['State'] == 'ALIVE'))"
    )
    return sorted(stack.ask("exec", stack.name("head"), "python3", "-c", code).split())


def test_a_rank_on_each_node(stack):
    assert rank_addresses(stack) == sorted([stack.address("head"), stack.address("worker")])
    assert "Paris" in stack.server().complete("The capital of France is")


def test_a_resize_is_one_transaction_over_both_nodes(stack):
    server = stack.server()
    for fraction in (0.05, 0.5, 0.1):
        resized = server.resize(fraction=fraction)
        assert resized["outcome"] == "done"
        state = server.state()
        assert state["blocks"]["resident"] == resized["to"]
        assert [rank["rank"] for rank in state["ranks"]] == [0, 1]
        assert len({rank["resident_bytes"] for rank in state["ranks"]}) == 1
    assert "Paris" in server.complete("The capital of France is")


def test_a_node_that_dies_is_seen_and_replaced(stack):
    """Without its rank the server ends; both containers are started anew, as their restart policy says."""
    stack.ask("kill", stack.name("worker"))
    stack.wait_for_health(False, DEAD_RANK_SECONDS)
    stack.ask("start", stack.name("worker"))  # docker leaves alone what was killed by hand
    stack.wait_for_health(True)
    assert "Paris" in stack.server().complete("The capital of France is")


@pytest.fixture(scope="module")
def stopped(stack):
    """Both are asked to stop at once, while a request is under way: its answer, and how each container ended."""
    server = stack.server()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.call, "POST", "/v1/completions", LONG)
        server.wait_until_busy()
        result = stack.compose("stop", "--timeout", str(DRAIN_SECONDS + 60))
        answer = asked.result()
    assert result.returncode == 0, result.stderr[-4000:]
    return answer, {service: stack.state(service)["ExitCode"] for service in ("head", "worker")}


def test_both_stop_with_status_0(stopped):
    assert stopped[1] == {"head": 0, "worker": 0}


def test_a_request_under_way_is_answered_to_its_end_by_both_ranks(stopped):
    status, answer = stopped[0]
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_nothing_is_left(stack, stopped):
    assert stack.compose("down").returncode == 0
    assert stack.containers() == {}
