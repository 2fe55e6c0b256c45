"""The models that these tests read. The real one is built on first use, in seconds, and kept under .cache."""

import fcntl

import pytest
from elastic_tools import model
from elastic_tools.pins import CACHE


@pytest.fixture(scope="session")
def smollm2():
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "model-tests.lock", "w") as lock:  # several test processes, one build
        fcntl.flock(lock, fcntl.LOCK_EX)
        return model.smollm2()
