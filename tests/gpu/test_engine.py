"""A whole engine on a GPU, CUDA graphs included. Over the stand-in as well, so that the test itself is tried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from elastic_tools.model import tiny_llama
from support.servers import SUPPORT, engine_environment

pytestmark = pytest.mark.engine
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or this torch has no CUDA"),
]
STAND_IN = [pytest.mark.skipif(torch.cuda.is_available(), reason="this vLLM has a GPU, and takes it")]


def run(environment: dict[str, str], **options) -> dict:
    command = [sys.executable, Path(__file__).with_name("smoke.py"), json.dumps(options)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stderr[-6000:]
    return json.loads([line for line in finished.stdout.splitlines() if line.startswith("{")][-1])


@pytest.mark.parametrize(
    ("elastic", "where"),
    [
        pytest.param({"start": "256MiB", "capacity": "1GiB"}, None, marks=GPU, id="on a GPU"),
        pytest.param({"start": "2MiB", "capacity": "8MiB"}, "cuda_stand_in", marks=STAND_IN, id="over the stand-in"),
    ],
)
def test_the_same_tokens_at_every_size(tmp_path, elastic, where):
    if where is None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    else:
        environment = engine_environment() | {"PYTHONPATH": str(SUPPORT / where), "STAND_IN_GRANULE": str(64 << 10)}
    model = str(tiny_llama(tmp_path / "tiny", head_dim=64))
    told = run(environment, model=model, elastic=elastic, eager=where is not None)
    assert told["driver"] == "cuda"
    first, *others = told["rounds"]
    assert [one["outcome"] for one in others] == ["done"] * 3
    assert len({one["blocks"] for one in told["rounds"]}) == 4
    for one in told["rounds"]:
        assert one["reported"] == one["resident"]
        assert one["tokens"] == first["tokens"]
