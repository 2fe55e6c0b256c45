"""The smoke test against a real server."""

import pytest
from elastic_tools.smoke import __main__ as smoke
from junitparser import JUnitXml

from .conftest import KEY

pytestmark = pytest.mark.engine


def test_the_smoke_test_passes(server, tmp_path, monkeypatch):
    """With the key, and with the log, which lets it read the memory behind the cache from the system."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    report = tmp_path / "junit.xml"
    options = ["--limit", "1800"]  # other work on the machine is no fault of the server
    status = smoke.main(["--url", server.url, "--log", str(server.log), "--junit", str(report), *options])
    (suite,) = JUnitXml.fromfile(str(report))
    told = {case.name: (case.result[0].message if case.result else case.system_out) for case in suite}
    assert status == 0, told
    assert suite.skipped == 2  # graphs and ranks
    assert "smaps of 1 processes" in told["shrink"]
