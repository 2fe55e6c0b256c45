"""Two elastic servers on one machine, with /dev/shm and /tmp in common: memory goes from one to the other, and neither
knows of the other's end."""

import contextlib
import os
import signal

import psutil
import pytest
from elastic_tools.model import tiny_llama
from support.servers import serving

pytestmark = pytest.mark.engine

KEY = "a-test-key"
SIZES = '{"start": "48MiB", "capacity": "256MiB"}'
PROMPTS = [f"Question {number}: name three things that are blue.\nAnswer:" for number in range(4)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The second starts while the first already holds its memory. The test may end the second."""
    folder = tmp_path_factory.mktemp("two")
    model = str(tiny_llama(folder / "model", layers=8))
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(serving(folder / name, "--elastic-kv-config", SIZES, model=model, key=KEY))
            for name in ("first", "second")
        )
        yield first, second


def answers(server):
    return [server.complete(prompt) for prompt in PROMPTS]


def sizes(server):
    state = server.state()
    assert state["bytes"]["reported"] == state["bytes"]["resident"] == server.cache_bytes()
    return state["blocks"]


def test_the_second_has_all_that_it_was_given(pair):
    """vLLM #19125, #14376: it refused to start, or took the first one's memory for its own."""
    first, second = pair
    assert sizes(second)["resident"] == sizes(first)["resident"]
    assert answers(second) == answers(first)


def test_the_busy_one_grows_into_what_the_idle_one_gives_back(pair):
    """vLLM #2193, #13633: the idle one's half was unusable. vLLM #20256: an idle server held the whole card."""
    first, second = pair
    wanted = answers(first)
    for idle, busy in ((first, second), (second, first)):
        before = idle.cache_bytes() + busy.cache_bytes()
        gone = idle.resize(blocks=idle.state()["blocks"]["base"])
        assert gone["outcome"] == "done"
        assert sizes(idle)["resident"] == idle.state()["chunk_blocks"]  # the base is one chunk
        moved = (gone["from"] - gone["to"]) // 2
        assert busy.resize(blocks=busy.state()["blocks"]["resident"] + moved)["outcome"] == "done"
        assert idle.cache_bytes() + busy.cache_bytes() <= before
        assert answers(busy) == wanted
        assert idle.resize(blocks=gone["from"])["outcome"] == "done"


def test_neither_notices_the_other_s_end(pair):
    """kvcached #316, #134: one engine's exit removed what the other shared under the same name."""
    first, second = pair
    wanted, size = answers(first), sizes(first)["resident"]
    root = psutil.Process(second.process.pid)
    for process in (*root.children(recursive=True), root):
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    assert second.process.wait(60) == -signal.SIGKILL
    assert sizes(first)["resident"] == size
    assert answers(first) == wanted
    assert first.resize(fraction=1)["outcome"] == "done"
    assert first.resize(blocks=first.state()["blocks"]["base"])["outcome"] == "done"
    assert answers(first) == wanted
