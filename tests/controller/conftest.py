import pytest
from vllm.v1.elastic_kv import allowance


@pytest.fixture(autouse=True)
def no_second_try(monkeypatch):
    """The allowance changes the size by itself at once, but not again after it failed, however slow the test is."""
    monkeypatch.setattr(allowance, "RETRY_SECONDS", (3600.0, 3600.0))
