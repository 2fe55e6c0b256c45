"""A real engine that cannot have its cache refuses to start, in one sentence that tells why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.model import truncated
from support.servers import engine_environment

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory):
    return str(truncated(tmp_path_factory.mktemp("model") / "two-layers", layers=2))


def refusal(model, elastic, limit=None):
    options = json.dumps({"model": model, "elastic": elastic, "limit": limit})
    command = [sys.executable, Path(__file__).with_name("refusal.py"), options]
    finished = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("elastic", "limit", "kind", "parts"),
    [
        (
            {"start": "64MiB", "capacity": "100TiB"},
            None,
            "ValueError",
            ["elastic_kv_config capacity (109951162777600 bytes", "is more than the device of rank 0 has"],
        ),
        (
            {"start": "64MiB", "capacity": "4GiB"},
            "RLIMIT_AS",
            "OutOfMemoryError",
            ["mmap of 429", "bytes on host failed: ENOMEM"],
        ),
        (
            {"start": "2GiB", "capacity": "4GiB"},
            "RLIMIT_DATA",
            "OutOfMemoryError",
            ["mmap of", "bytes on host failed: ENOMEM"],
        ),
    ],
    ids=["capacity beyond the device", "no address space", "no memory for the start"],
)
def test_the_engine_refuses(two_layers, elastic, limit, kind, parts):
    answer = refusal(two_layers, elastic, limit)
    assert answer["kind"] == kind, answer
    for part in parts:
        assert part in answer["says"]
    assert "\n" not in answer["says"]
