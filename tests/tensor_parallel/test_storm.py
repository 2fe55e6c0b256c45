"""The storm of `tests/server/test_storm.py` against two ranks, which are actors on two Ray nodes.

Processes of one engine are stormed by `make storm ARGS='-- --tensor-parallel-size 2'`: both would take CI too long.
"""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic_tools.model import tiny_llama
from elastic_tools.storm import report
from elastic_tools.storm.plan import Settings
from elastic_tools.storm.run import Target, storm
from elastic_tools.storm.verdict import Verdict, judge
from support.servers import engine_environment, serving

from .ray_nodes import ray_environment, two_nodes
from .shared_memory import no_shared_memory_left

pytestmark = [pytest.mark.engine, pytest.mark.alone]

KEY = "a-test-key"
SIZES = '{"base": "12MiB", "start": "48MiB", "capacity": "2GiB"}'
LIMITS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--async-scheduling")
# Two ranks, a server, its clients and Ray share the machine's cores: a resize a second is what they keep up with.
SETTINGS = Settings(
    seconds=30, clients=16, resize_every_s=1.0, warm_up_s=5, most_bytes=96 << 20, must_move=True, must_preempt=True
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    model = str(tiny_llama(folder / "model", layers=24, heads=4, kv_heads=2))
    options = ("--elastic-kv-config", SIZES, "--tensor-parallel-size", "2", *LIMITS, "--shutdown-timeout", "300")
    backend = ("--distributed-executor-backend", "ray")
    with (
        no_shared_memory_left(),
        two_nodes(ray_environment(engine_environment())) as environment,
        serving(folder / "log", *options, *backend, model=model, key=KEY, environment=environment) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def seen(server):
    # Ray's workers are children of its nodes, which are children of this process.
    return asyncio.run(storm(Target(server.url, KEY, os.getpid(), server.log), SETTINGS))


@pytest.mark.parametrize("check", Verdict.__dataclass_fields__)
def test_it_holds(seen, check):
    verdict = judge(seen)
    report.show(seen, verdict)
    assert getattr(verdict, check).wrong == []


def test_both_ranks_were_within_reach(seen):
    workers = [one for one in seen.after if one.cache_bytes is not None]
    assert [one.cache_bytes for one in workers] == 2 * [seen.sizes.start * seen.sizes.block_bytes]


def test_a_request_under_way_is_answered_after_sigterm(server):
    """`ray.init` put its own handler in place of the engine's, which ended the engine at once. Comes last."""
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.complete, "The tide tables of", 64)
        server.wait_until_busy()
        server.process.send_signal(signal.SIGTERM)
        assert asked.result()
    assert server.process.wait(120) == 0
