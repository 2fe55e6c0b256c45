"""Registers the mark of the runs of upstream's own tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "upstream: runs upstream's own test suite (minutes)")
