"""Shared by all tests. Keep it small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Whether Triton's own functions can run in its interpreter is decided when it is imported, so this comes before
# anything imports it. Triton imports its Gluon at the first launch, and that must find the same decision.
# Processes that tests start decide for themselves.
os.environ["TRITON_INTERPRET"] = "1"
import triton.experimental.gluon  # noqa: F401

del os.environ["TRITON_INTERPRET"]

_LOAD_WITHOUT_VLLM = """
import importlib.util, pathlib, sys
sys.modules["vllm"] = None  # any import of vLLM fails
_folder = pathlib.Path({folder!r})
_spec = importlib.util.spec_from_file_location(
    "elastic_kv", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
sys.modules["elastic_kv"] = importlib.util.module_from_spec(_spec)
"""


@pytest.fixture(scope="session")
def python_without_vllm():
    """Runs Python code in a process that cannot import vLLM; our memory modules are `elastic_kv.…` there."""
    import vllm.v1.elastic_kv

    prelude = _LOAD_WITHOUT_VLLM.format(folder=str(Path(vllm.v1.elastic_kv.__file__).parent))

    def run(code: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=120, check=False
        )

    return run
