"""Real servers for tests: started on a free port, waited for with a generous limit, ended by pid."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
from elastic_tools.demo.server import end, free_port
from elastic_tools.pins import CACHE

SUPPORT = Path(__file__).parent
START_SECONDS = 900
REQUEST_SECONDS = 300


def smollm2() -> str:
    from elastic_tools.model import smollm2 as build

    return str(build())


def engine_environment() -> dict[str, str]:
    """What an engine needs on a small CPU machine, without a network. Tests that run side by side share the cores:
    an engine's threads wait for each other, so two engines with a thread on every core come to a crawl.
    """
    cores = sorted(os.sched_getaffinity(0))
    jobs = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    job = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cpus = ",".join(map(str, cores[job % len(cores) :: jobs]))
    return os.environ | {"VLLM_CPU_OMP_THREADS_BIND": cpus, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def upstream_environment() -> dict[str, str]:
    """The same for the unpatched engine."""
    return engine_environment() | {"PYTHONPATH": str(CACHE / "upstream")}


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path
    key: str | None = None
    model: str = "SmolLM2"

    def call(self, method: str, path: str, body: dict | None = None, key: str | None = None):
        """Status and answer, which is parsed where it is JSON."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Content-Type", "application/json")
        if key or self.key:
            request.add_header("Authorization", f"Bearer {key or self.key}")
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, timeout=REQUEST_SECONDS) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text

    def state(self) -> dict:
        status, state = self.call("GET", "/elastic_kv")
        assert status == 200, state
        return state

    def resize(self, **wanted) -> dict:
        status, answer = self.call("POST", "/elastic_kv/resize", wanted)
        assert status in (200, 409), answer
        return answer

    def complete(self, prompt: str, max_tokens: int = 24) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.call("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def wait_until_busy(self) -> None:
        """Waits until a request has blocks. That none has is for the caller to find."""
        deadline = time.monotonic() + 120
        while self.state()["blocks"]["used"] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        """Resident memory of all processes of the server, as the system reports it."""
        root = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])

    def cache_bytes(self) -> int:
        """Resident memory behind the cache's range, as /proc/PID/smaps has it. The log tells the range."""
        found = re.search(
            r"Worker\D*pid=(\d+)\).*reserved (\d+) bytes in \d+ segments at (0x\w+)", self.log.read_text()
        )
        pid, nbytes, first = found[1], int(found[2]), int(found[3], 16)
        resident, inside = 0, False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                start, end = (int(address, 16) for address in mapping.groups())
                inside = first <= start and end <= first + nbytes
            elif inside and line.startswith("Rss:"):
                resident += int(line.split()[1]) << 10
        return resident


@contextlib.contextmanager
def serving(
    log: Path, *arguments: str, model: str | None = None, key: str | None = None, environment: dict | None = None
):
    """A server with `arguments`, ready to answer; ended when the block is left."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model or smollm2()),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "SmolLM2"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--block-size", "32"),
        *(("--api-key", key) if key else ()),
        *arguments,
    ]
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=environment or engine_environment(), stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(f"http://127.0.0.1:{port}", process, log, key)
    try:
        wait_until_ready(server)
        yield server
    finally:
        end(process)


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode}:\n{server.log.read_text()[-4000:]}")
        with contextlib.suppress(OSError):
            if server.call("GET", "/health")[0] == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(f"no server within {START_SECONDS} s:\n{server.log.read_text()[-4000:]}")
