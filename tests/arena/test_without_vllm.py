"""A GPU machine that has neither vLLM nor our other packages can run what needs no engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys, types
for name in ("hypothesis", "psutil", "safetensors"):
    sys.modules[name] = None  # importing it fails
vllm = sys.modules["vllm"] = types.ModuleType("vllm")
vllm.__path__ = ["patches/files/vllm"]  # what PYTHONPATH leaves of it where no vLLM is
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_the_documented_command_finds_its_tests():
    (command,) = re.findall(
        r"^PYTHONPATH=patches/files python3 -m pytest (.*?)\n```",
        (ROOT / "docs" / "operating.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    arguments = command.replace("\\\n", " ").split()
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = {line.split("::")[0] for line in result.stdout.splitlines() if "::" in line}
    assert found == {argument for argument in arguments if argument.endswith(".py")}
