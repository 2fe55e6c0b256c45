"""Greedy tokens of 32 mixed requests: the same from upstream, from the patched engine with the cache fixed,
and from an elastic cache that is resized at random before every step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.model import tiny_llama
from support.servers import SUPPORT, engine_environment, smollm2, upstream_environment

pytestmark = pytest.mark.engine

# In chunks of four blocks, so that blocks in use have to move, and with less room than the requests would like.
ELASTIC = {"start": "64MiB", "capacity": "256MiB"}
GRANULE = 4 * 48 << 10
# The same for a tiny model, with 8 KiB for a block in each layer.
TINY_LAYERS = 4
TINY_ELASTIC = {"start": 45 * TINY_LAYERS * 8 << 10, "capacity": 182 * TINY_LAYERS * 8 << 10}
TINY_GRANULE = 4 * 8 << 10


@pytest.fixture(scope="session")
def arm(tmp_path_factory):
    """Runs an arm in a process of its own; what it printed, parsed. The same arm is run once."""
    done = {}

    def run(environment, **options):
        key = json.dumps(options | {"path": environment.get("PYTHONPATH", "")}, sort_keys=True)
        if key not in done:
            options = {"model": smollm2()} | options
            command = [sys.executable, Path(__file__).with_name("arm.py"), json.dumps(options)]
            finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
            assert finished.returncode == 0, finished.stderr[-6000:]
            done[key] = json.loads(finished.stdout.splitlines()[-1])
        return done[key]

    return run


@pytest.fixture(scope="session")
def upstream(arm):
    result = arm(upstream_environment())
    assert not result["patched"], f"{result['vllm']} is not upstream's"
    assert len(result["outputs"]) == 32
    return result


def test_patched_with_elastic_off(arm, upstream):
    off = arm(engine_environment())
    assert off["patched"]
    assert off["outputs"] == upstream["outputs"]


def assert_resized(result):
    """The resizes were many, went both ways, and met cached blocks and blocks in use."""
    sizes = result["sizes"]
    assert len(sizes) == result["steps"] > 50
    assert min(sizes) < 45
    assert max(sizes) > 150
    assert result["outcomes"]["done"] > 40
    assert set(result["outcomes"]) <= {"done", "partial", "refused"}
    assert result["poisoned"] > 100
    assert all(result["costs"][cost] > 0 for cost in ("evicted", "moved", "preempted")), result["costs"]


def test_resized_before_every_step(arm, upstream):
    elastic = arm(engine_environment(), elastic=ELASTIC, granule=GRANULE, resize=True)
    assert_resized(elastic)
    assert elastic["outputs"] == upstream["outputs"]


def test_resized_with_steps_in_flight(arm, upstream):
    """Asynchronous scheduling, which a CPU platform has to be made to keep.

    Between two steps there is always one whose result is not processed yet. On a CPU its work is done
    by then, so this does not show that the fence waits: tests/controller does.
    """
    environment = engine_environment() | {"PYTHONPATH": str(SUPPORT)}
    elastic = arm(environment, elastic=ELASTIC, granule=GRANULE, resize=True, async_scheduling=True)
    assert elastic["async"]
    assert elastic["steps_in_flight"] > elastic["steps"] // 2
    assert_resized(elastic)
    assert elastic["outputs"] == upstream["outputs"]


def test_over_the_cuda_driver(arm, tmp_path_factory):
    """The CUDA page driver carries the whole run, over the stand-in for NVIDIA's library.

    A shrink copies what stays of a run of handles, which on a CPU takes most of the time with the cache of a real
    model. So the model is a tiny one, whose cache has as many blocks, and chunks of as many.
    """
    model = str(tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=TINY_LAYERS))
    upstream = arm(upstream_environment(), model=model)
    assert not upstream["patched"]
    path = str(SUPPORT / "cuda_stand_in")
    environment = engine_environment() | {"PYTHONPATH": path, "STAND_IN_GRANULE": str(TINY_GRANULE)}
    elastic = arm(environment, model=model, elastic=TINY_ELASTIC, resize=True)
    assert elastic["driver"] == "cuda"
    assert_resized(elastic)
    assert elastic["outputs"] == upstream["outputs"]
    assert len(elastic["outputs"]) == 32


def test_model_runner_v2(arm, tmp_path_factory):
    """Its kernels are Triton's, which a CPU runs in the interpreter: a tiny model, and few requests."""
    model = str(tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))
    options = {"model": model, "requests": 12, "tokens": [2, 8]}

    def environment(first: dict[str, str]) -> dict[str, str]:
        path = ":".join(filter(None, [str(SUPPORT / "triton_cpu"), first.get("PYTHONPATH")]))
        return first | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

    fixed = arm(environment(upstream_environment()), **options)
    elastic = {"start": "2MiB", "capacity": "8MiB"}
    resized = arm(environment(engine_environment()), **options, elastic=elastic, granule=128 << 10, resize=True)
    assert (fixed["patched"], resized["patched"]) == (False, True)
    assert fixed["runner"] == resized["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert resized["outcomes"]["done"] > 10
    assert resized["costs"]["moved"] > 0
    assert resized["outputs"] == fixed["outputs"]
    assert len(fixed["outputs"]) == 12
