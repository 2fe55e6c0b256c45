"""The cpu image as a container: it answers, resizes, is well, drains and stops. `make image-test` says which image."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from elastic_tools.demo.server import free_port
from elastic_tools.image import BUILDAH, builder, works
from elastic_tools.model import smollm2
from elastic_tools.patchset.project import Project
from elastic_tools.pins import ROOT, pins

IMAGE = os.environ.get("ELASTIC_KV_IMAGE")
START_SECONDS = 900
pytestmark = pytest.mark.skipif(not IMAGE, reason="builds and runs a container image: make image, then make image-test")


class Container:
    """A container of buildah's, which has no engine: its processes are this machine's, and so are its ports."""

    def __init__(self, folder: Path):
        self.port, self.log = free_port(), folder / "log"
        self.name = self.buildah("from", IMAGE)
        told = json.loads(self.buildah("inspect", self.name))
        self.config = told["Docker"]["config"]
        self.process: subprocess.Popen | None = None

    def buildah(self, *arguments: str) -> str:
        return subprocess.run([*BUILDAH, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    def command(self, *arguments: str, **environment: str) -> list[str]:
        """What runs a command in the container, as its user and with its environment."""
        given = {"PORT": str(self.port), "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"} | environment
        variables = [f"--env={name}={value}" for name, value in given.items()]
        model = f"--volume={smollm2()}:/models/smollm2:ro"
        return [*BUILDAH, "run", "--isolation", "chroot", *variables, model, self.name, "--", *arguments]

    def start(self, *arguments: str, **environment: str) -> None:
        command = self.command(*self.config["Entrypoint"], *arguments, **environment)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while self.call("/health")[0] != 200:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(1)

    def inside(self) -> psutil.Process:
        """What the container engine would send a signal to: the first process of the image."""
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in tree if one.name() == Path(self.config["Entrypoint"][0]).name)

    def call(self, path: str, body: dict | None = None):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Bearer key")
        try:
            with urllib.request.urlopen(request, body and json.dumps(body).encode(), timeout=600) as reply:
                text = reply.read()
                return reply.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            for one in [*tree, psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self.process.wait()
        self.buildah("rm", self.name)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    if shutil.which("buildah") is None:
        pytest.skip(f"buildah runs the image here, and there is only {builder(works)}")
    one = Container(tmp_path_factory.mktemp("container"))
    try:
        yield one
    finally:
        one.end()


def test_the_image_says_what_it_is(container):
    labels = container.config["Labels"]
    assert labels["elastic-kv.series"] == Project.at(ROOT).series.hash()
    assert labels["org.opencontainers.image.version"] == pins()["vllm"]["version"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert container.config["User"] == "2000:0"
    assert container.config["Healthcheck"]["StartPeriod"] >= 600e9
    assert container.config["StopSignal"] == "SIGTERM"


def test_it_runs_as_a_user_without_rights(container):
    code = "import os, pathlib; print(os.getuid(), os.getgid(), os.access('/opt', os.W_OK), pathlib.Path.home())"
    said = subprocess.run(container.command("python3", "-c", code), capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["2000", "0", "False", "/home/vllm"]


def test_it_serves_resizes_and_stops(container):
    container.start(
        *("/models/smollm2", "--served-model-name", "m", "--config", "/opt/elastic-kv/configs/profiles/cpu.yaml"),
        VLLM_API_KEY="key",
        DRAIN_SECONDS="300",
    )
    check = subprocess.run(container.command(*container.config["Healthcheck"]["Test"][1:]), capture_output=True)
    assert check.returncode == 0, check.stderr

    question = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    question |= {"temperature": 0, "max_tokens": 12}
    status, answer = container.call("/v1/chat/completions", question)
    assert status == 200, answer
    assert "Paris" in answer["choices"][0]["message"]["content"]

    for fraction in (0.05, 0.5):
        status, resized = container.call("/elastic_kv/resize", {"fraction": fraction})
        assert (status, resized["outcome"]) == (200, "done")
        state = container.call("/elastic_kv")[1]
        assert state["blocks"]["resident"] == resized["to"]
    assert container.call("/v1/chat/completions", question)[1]["choices"] == answer["choices"]

    # A request that is under way when the signal comes is answered to its end.
    long = question | {"max_tokens": 64, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(container.call, "/v1/chat/completions", long)
        deadline = time.monotonic() + 60
        while container.call("/elastic_kv")[1]["blocks"]["used"] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        container.inside().send_signal(signal.SIGTERM)
        status, answer = asked.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 64), answer
    assert container.process.wait(120) == 0
    assert [one for one in psutil.process_iter(["cmdline"]) if str(container.port) in (one.info["cmdline"] or [])] == []
