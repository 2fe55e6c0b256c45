"""A storm of a minute: 32 clients and a resize four times a second change no token and keep no memory.

`make storm` runs the long one. What each verdict means, and that each can fail, is in `tests/storm`.
"""

import asyncio

import pytest
from elastic_tools.model import tiny_llama
from elastic_tools.storm import report
from elastic_tools.storm.plan import BASE_EVERY, Settings
from elastic_tools.storm.run import Target, storm
from elastic_tools.storm.verdict import Verdict, judge
from support.servers import serving

pytestmark = [pytest.mark.engine, pytest.mark.alone]

KEY = "a-test-key"
# The 16 requests that run hold 60 to 180 blocks, and sizes are 64 to 512: many shrinks meet blocks in use. The base has
# room for the longest request, of 650 tokens: something always runs, and in the end everything has. The capacity is
# larger than what is asked for, and the layers are many and small: on the host a chunk then has several blocks.
SIZES = '{"base": "12MiB", "start": "48MiB", "capacity": "2GiB"}'
MOST_BYTES = 96 << 20
LIMITS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--async-scheduling")
SETTINGS = Settings(seconds=60, clients=32, most_bytes=MOST_BYTES, must_move=True, must_preempt=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of its own, with other sizes than the one of the other tests."""
    folder = tmp_path_factory.mktemp("storm")
    model = str(tiny_llama(folder / "model", layers=24))
    with serving(folder / "log", "--elastic-kv-config", SIZES, *LIMITS, model=model, key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def seen(server):
    """What the storm saw."""
    target = Target(server.url, KEY, server.process.pid, server.log)
    return asyncio.run(storm(target, SETTINGS))


@pytest.mark.parametrize("check", Verdict.__dataclass_fields__)
def test_it_holds(seen, check):
    verdict = judge(seen)
    report.show(seen, verdict)
    assert getattr(verdict, check).wrong == []


def test_the_processes_were_within_reach(seen):
    """Otherwise the checks of the memory would have nothing to look at."""
    workers = [one for one in seen.after if one.worker]
    assert [one.cache_bytes for one in workers] == [seen.sizes.start * seen.sizes.block_bytes]


def test_most_prompts_were_compared(seen):
    references = seen.references
    assert len(references.prompts) >= 20
    assert references.unsteady == ()


def test_shrinks_met_blocks_in_use(seen):
    met = [one for one in seen.resizes if one.answer["reason"] or one.answer["moved"] or one.answer["preempted"]]
    assert len(met) >= len(seen.resizes) // (2 * BASE_EVERY)
