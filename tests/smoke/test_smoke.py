"""The smoke test passes a good server, and finds each fault of a bad one, and that one alone."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pynvml
import pytest
from docs.facts import metric_names
from elastic_tools.demo import server
from elastic_tools.smoke import __main__ as cli
from elastic_tools.smoke import checks, memory
from junitparser import JUnitXml

from .fake import BLOCK_BYTES, FakeServer

ALL = [name for name, _ in checks.CHECKS]
NO_GRAPHS = {"graph replay after resizes"}
ONE_RANK = {"ranks"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(checks, "SETTLE_SECONDS", 0.1)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def smoke(fake, tmp_path, *options):
    """The exit status, and by outcome the cases of the report."""
    report = tmp_path / "deep" / "junit.xml"
    with fake.running() as url:
        status = cli.main(["--url", url, "--junit", str(report), *options])
    found = {"passed": {}, "failed": {}, "skipped": {}}
    for case in (case for suite in JUnitXml.fromfile(str(report)) for case in suite):
        outcome = "passed" if case.is_passed else "skipped" if case.is_skipped else "failed"
        found[outcome][case.name] = case.result[0].message if case.result else case.system_out
    return status, found


def test_a_good_server_passes(tmp_path, capsys):
    status, found = smoke(FakeServer(), tmp_path)
    assert status == 0
    assert found["failed"] == {}
    assert set(found["skipped"]) == NO_GRAPHS | ONE_RANK
    assert [*found["passed"]] == [name for name in ALL if name not in NO_GRAPHS | ONE_RANK]
    assert "64 to 16 blocks in 1 ms; memory -48.0 MiB" in found["passed"]["shrink"]
    assert "everything holds" in capsys.readouterr().err


def test_two_ranks(tmp_path):
    status, found = smoke(FakeServer(ranks=2), tmp_path)
    assert (status, set(found["skipped"])) == (0, NO_GRAPHS)
    assert "memory -96.0 MiB" in found["passed"]["shrink"]


@pytest.mark.parametrize(
    ("fault", "failed", "why"),
    [
        ("unhealthy", "health", "GET /health answers 503"),
        ("a page of HTML", "health", "^GET /v1/models answers with something else than JSON: <html> <body> +Welcome "),
        ("500 to everything", "health", "^GET /v1/models answers 500: <html> <body> Internal Server Error "),
        ("not elastic", "state", "^the server has no elastic KV cache: GET /elastic_kv answers 404: "),
        ("no JSON", "state", "^GET /elastic_kv answers with something else than JSON: <html>$"),
        ("another policy", "state", "takes static"),
        ("a block is lost", "state", r"free \+ used \+ cached"),
        ("an engine that is dead", "completion", "EngineDeadError"),
        ("a token is missing", "completion", "15 tokens"),
        ("every answer differs", "completion", "not steady"),
        ("a stream breaks off", "streaming", "broke off after 3 of 16"),
        ("a stream tells an error", "streaming", "the engine is dead"),
        ("a stream of one piece", "streaming", "in one piece"),
        ("no admin API", "shrink", "^the server's cache cannot be resized over HTTP, which takes admin_api: "),
        ("dies midway", "shrink", "^no answer from http://127.0.0.1:[0-9]+: RemoteProtocolError: "),
        ("a resize fails", "shrink", "a rank is gone"),
        ("a resize does nothing", "shrink", "16 blocks were asked for, 16 answered, 64 are there"),
        ("a resize stops half-way", "shrink", "came to partial: too little"),
        ("the memory stays", "shrink", "rank 0 does not hold"),
        ("a rank did not follow", "shrink", "rank 1 does not hold"),
        ("another token after a shrink", "answers after the shrink", "token 15 is"),
        ("another token after a growth", "answers after the growth", "token 15 is"),
        ("a gauge is missing", "metrics", "base_blocks is None"),
        ("a gauge is stale", "metrics", "resident_blocks is 64.0, not 16"),
        ("resizes are not counted", "metrics", "counted 0 resizes"),
        ("takes any size", "refusal", "answered with 200"),
    ],
)
def test_each_fault_is_found(tmp_path, fault, failed, why, capsys):
    status, found = smoke(FakeServer(fault, ranks=2 if "rank did" in fault else 1), tmp_path)
    assert status == 1
    first = next(name for name in ALL if name in found["failed"])
    assert first == failed
    assert re.search(why, found["failed"][failed])
    assert "\n" not in found["failed"][failed]
    assert f"FAILED   {failed}: {found['failed'][failed]}" in capsys.readouterr().err
    if failed in ("health", "state", "completion"):
        after = ALL[ALL.index(failed) + 1 :]
        assert {name: f"not run, since {failed} failed" for name in after} == found["skipped"]


def test_nothing_listens(tmp_path):
    report = tmp_path / "junit.xml"
    address = f"http://127.0.0.1:{server.free_port()}"
    assert cli.main(["--url", address, "--junit", str(report)]) == 1
    (suite,) = JUnitXml.fromfile(str(report))
    assert (suite.failures, suite.skipped) == (1, len(ALL) - 1)
    assert "Connection refused" in next(iter(suite)).result[0].message


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("no-such-host.invalid", "protocol"),
        ("ftp://127.0.0.1", "unsupported protocol"),
        ("http://no-such-host.invalid", "ConnectError"),
    ],
)
def test_an_address_that_is_none(tmp_path, url, why):
    report = tmp_path / "junit.xml"
    assert cli.main(["--url", url, "--junit", str(report)]) == 1
    (suite,) = JUnitXml.fromfile(str(report))
    assert why in next(iter(suite)).result[0].message


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_key_that_is_missing_or_wrong(tmp_path, monkeypatch, key):
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    status, found = smoke(FakeServer(key="a-key"), tmp_path)
    assert (status, [*found["failed"]]) == (1, ["health"])
    why = "VLLM_API_KEY has to hold the server's key, and does not: GET /v1/models answers 401: "
    assert found["failed"]["health"].startswith(why)


def test_after_a_server_is_gone_no_check_waits_for_it(tmp_path, monkeypatch):
    def gone(*_):
        raise httpx.ConnectError("Connection refused")

    monkeypatch.setattr(checks, "_resized", gone)
    status, found = smoke(FakeServer(), tmp_path)
    assert (status, [*found["failed"]]) == (1, ["shrink"])
    assert found["skipped"]["back to the first size"] == "not run, since shrink failed"


def test_the_time_is_bounded(tmp_path):
    begin = time.monotonic()
    status, found = smoke(FakeServer("hangs"), tmp_path, "--limit", "0.3")
    assert status == 1
    assert found["failed"] == dict.fromkeys(("health", "end"), "not done within 0.3 s")
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("signum", "why"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")], ids=["INT", "TERM"]
)
def test_a_signal_ends_it_with_a_report(tmp_path, monkeypatch, signum, why):
    monkeypatch.setattr(checks.Client, "state", lambda self: signal.raise_signal(signum))
    before = signal.getsignal(signum)
    status, found = smoke(FakeServer(), tmp_path)
    assert status == 1
    assert found["failed"] == dict.fromkeys(("state", "end"), why)
    assert [*found["passed"]] == ["health"]
    assert signal.getsignal(signum) is before


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    """NVML of a machine with two GPUs. The cache of a fake server is on the first one; what it holds besides is not."""
    held = SimpleNamespace(fake=None, besides=7 << 30, stuck=False)

    def used(number):
        cache = held.fake.resident * BLOCK_BYTES if number == 0 and not held.stuck else 0
        return SimpleNamespace(used=held.besides + cache)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", used)
    monkeypatch.setattr(memory, "NVML_TOLERANCE", 8 << 20)
    return held


def test_device_memory_by_nvml_and_graphs(two_gpus, tmp_path):
    two_gpus.fake = FakeServer(driver="cuda")
    status, found = smoke(two_gpus.fake, tmp_path)
    assert (status, set(found["skipped"])) == (0, ONE_RANK)
    assert found["passed"]["shrink"].endswith("memory -48.0 MiB (NVML, 2 GPUs)")
    assert found["passed"]["graph replay after resizes"] == "batches of 1, 2, 4, 8 at 16 and 64 blocks"


def test_device_memory_that_stays_is_found(two_gpus, tmp_path):
    two_gpus.fake, two_gpus.stuck = FakeServer(driver="cuda"), True
    status, found = smoke(two_gpus.fake, tmp_path)
    assert (status, set(found["failed"])) == (1, {"shrink", "grow"})
    assert "memory +0.0 MiB, where -48.0 MiB are due (NVML, 2 GPUs)" in found["failed"]["shrink"]


def test_a_cache_too_small_for_nvml_to_show_says_so(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "NVML_TOLERANCE", 64 << 20)
    two_gpus.fake = FakeServer(driver="cuda")
    _, found = smoke(two_gpus.fake, tmp_path)
    assert "too little to be told apart" in found["failed"]["shrink"]


def test_graphs_that_were_not_captured_are_not_claimed(two_gpus, tmp_path):
    log = tmp_path / "log"
    log.write_text("enforce_eager\n")
    two_gpus.fake = FakeServer(driver="cuda")
    status, found = smoke(two_gpus.fake, tmp_path, "--log", str(log))
    assert (status, found["skipped"]["graph replay after resizes"]) == (0, "the server captured no graphs")


def test_no_nvml(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert memory.gpus() == 0


# --- the command line ------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_start(tmp_path, monkeypatch):
    def running(*_, **__):
        raise server.ServerError("the server ended with status 1 at start")

    monkeypatch.setattr(server, "running", running)
    monkeypatch.setattr(cli, "gpus", lambda: 1)
    report = tmp_path / "junit.xml"
    assert cli.main(["--junit", str(report)]) == 1
    one, parallel = JUnitXml.fromfile(str(report))
    assert "ended with status 1" in next(iter(one)).result[0].message
    assert (parallel.tests, parallel.skipped) == (1, 1)


@pytest.fixture
def started(monkeypatch):
    """A fake server in place of each that would be started; the list tells when one begins and ends."""
    events = []

    @contextlib.contextmanager
    def running(*_, **__):
        events.append("begin")
        try:
            with FakeServer().running() as url:
                yield url, 0
        finally:
            events.append("end")

    monkeypatch.setattr(server, "running", running)
    return events


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_that_was_started(tmp_path, monkeypatch, started, signum):
    monkeypatch.setattr(checks.Client, "state", lambda self: signal.raise_signal(signum))
    monkeypatch.setattr(cli, "FOLDER", tmp_path)
    assert cli.main(["--junit", str(tmp_path / "junit.xml")]) == 1
    assert started == ["begin", "end"]
    (suite,) = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    assert (suite.tests, suite.errors) == (3, 2)


def test_with_several_gpus_a_second_server_is_started_over_two_of_them(tmp_path, monkeypatch):
    started = []

    def running(options, log, show, model=None):
        started.append((options[-2:], model))
        raise server.ServerError("none today")

    monkeypatch.setattr(server, "running", running)
    monkeypatch.setattr(cli, "gpus", lambda: 4)
    monkeypatch.setattr(cli.model, "padded_heads", lambda path: path)
    monkeypatch.delenv("MODEL", raising=False)
    assert cli.main(["--junit", str(tmp_path / "junit.xml")]) == 1
    assert started[0][1] is None
    assert started[1][0] == ("--tensor-parallel-size", "2")
    assert started[1][1].endswith("smollm2-12-heads")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--url", "http://x", "--", "--tp", "2"], "a running server takes no options"),
        (["--url", "http://127.0.0.1:port"], "--url http://127.0.0.1:port is no address: Invalid port: 'port'"),
        (["--log", "file"], "--log belongs to --url"),
        (["--limit", "0"], "seconds above 0"),
        (["--junit", "/proc/nowhere/junit.xml"], "--junit /proc/nowhere/junit.xml cannot be written: "),
        (["--junit", "/proc"], "--junit /proc cannot be written: Is a directory"),
    ],
)
def test_wrong_options(options, why, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(options)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_metrics_that_it_reads_are_the_engine_s():
    assert {*checks.GAUGES, checks.RESIZES} <= metric_names()


def test_the_key_is_sent_and_the_module_is_a_command(tmp_path):
    """As CI calls it: another process, with the key in the environment."""
    with FakeServer(key="a-key").running() as url:
        assert cli.main(["--url", url, "--junit", str(tmp_path / "without.xml")]) == 1
        finished = subprocess.run(
            [sys.executable, "-m", "elastic_tools.smoke", "--url", url, "--junit", tmp_path / "junit.xml"],
            cwd=Path(cli.__file__).parents[2],
            env=os.environ | {"VLLM_API_KEY": "a-key"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ""
