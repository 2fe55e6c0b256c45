"""The backend ELASTIC_TRITON, served on a CPU in Triton's interpreter: a tiny model, and few requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.model import tiny_llama
from support.servers import SUPPORT, engine_environment

pytestmark = pytest.mark.engine

ELASTIC = {"start": "2MiB", "capacity": "8MiB"}
GRANULE = 128 << 10


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """Runs the same eight requests in a process of its own; what it printed, parsed."""
    model = str(tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))

    def run(environment=None, **options):
        options = {"model": model, "requests": 8, "tokens": [4, 8], "elastic": ELASTIC, "granule": GRANULE} | options
        command = [sys.executable, Path(__file__).with_name("arm.py"), json.dumps(options)]
        environment = engine_environment() | {"TRITON_INTERPRET": "1"} | (environment or {})
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
        assert finished.returncode == 0, finished.stderr[-6000:]
        return json.loads(finished.stdout.splitlines()[-1]) | {"log": finished.stdout + finished.stderr}

    return run


@pytest.fixture(scope="session")
def cpu_attention(serve):
    return serve(elastic=None)


def test_tokens_are_those_of_the_cpu_backend_during_resizes(serve, cpu_attention):
    resized = serve(backend="ELASTIC_TRITON", resize=True)
    assert resized["outputs"] == cpu_attention["outputs"]
    assert resized["outcomes"]["done"] > 8
    assert resized["costs"]["moved"] > 0
    assert resized["faults"] == 0
    assert "do not check block ids" not in resized["log"]


def test_tokens_with_model_runner_v2(serve, cpu_attention):
    """With upstream's Triton kernels around it, and its block tables on the device."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(SUPPORT / "triton_cpu")}
    resized = serve(environment, backend="ELASTIC_TRITON", resize=True)
    assert resized["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert resized["outputs"] == cpu_attention["outputs"]
    assert resized["costs"]["moved"] > 0


def test_a_stale_entry_fails_its_request_alone(serve, cpu_attention):
    """A block table names, inside the sequence's length, a block whose addresses are not mapped."""
    stale = serve(backend="ELASTIC_TRITON", stale=True)
    # The engine puts something behind the name of a request.
    failed = stale["planted"][: len("request-00")]
    assert stale["reasons"].pop(failed) == [
        "error",
        "soft page fault: its block table names 1 KV cache block(s) without memory",
    ]
    assert stale["faults"] == 1
    assert f"request {stale['planted']} fails" in stale["log"].replace("\n", " ")
    assert {reason for reason, _ in stale["reasons"].values()} == {"length"}
    others = {request: tokens for request, tokens in stale["outputs"].items() if request != failed}
    assert others == {request: tokens for request, tokens in cpu_attention["outputs"].items() if request != failed}
    assert len(others) == 7


def test_refused_outside_the_interpreter(serve):
    with pytest.raises(AssertionError, match="set TRITON_INTERPRET=1"):
        serve({"TRITON_INTERPRET": "0"}, backend="ELASTIC_TRITON")


def test_the_log_says_what_guards_residency_elsewhere(serve):
    assert "do not check block ids" in serve(requests=1)["log"]
