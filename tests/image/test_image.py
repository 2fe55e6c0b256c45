"""The cpu image as a container: it answers, resizes, is well, drains and stops. `make image-test` says which image."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from elastic_tools.image import builder, works
from elastic_tools.model import smollm2
from elastic_tools.patchset.project import Project
from elastic_tools.pins import ROOT, pins

from .chroot import ChrootContainer
from .containers import IMAGE, MODEL, EngineContainer

pytestmark = pytest.mark.skipif(not IMAGE, reason="runs a container image: make image, then make image-test")
DRAIN_SECONDS = 300
QUESTION = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def container():
    name = builder(works)
    one = ChrootContainer(smollm2()) if name == "buildah" else EngineContainer(name, smollm2())
    try:
        yield one
    finally:
        one.end()


def test_the_image_says_what_it_is(container):
    config = container.config()
    labels = config["Labels"]
    assert labels["elastic-kv.series"] == Project.at(ROOT).series.hash()
    assert labels["org.opencontainers.image.version"] == pins()["vllm"]["version"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["User"] == "2000:0"
    assert config["Healthcheck"]["StartPeriod"] >= 600e9  # nanoseconds
    assert config["StopSignal"] == "SIGTERM"


def test_it_runs_as_a_user_without_rights(container):
    code = "import os, pathlib; print(os.getuid(), os.getgid(), os.access('/opt', os.W_OK), pathlib.Path.home())"
    assert container.run("python3", "-c", code).split() == ["2000", "0", "False", "/home/vllm"]


def test_it_serves_resizes_and_stops(container):
    profile = "/opt/elastic-kv/configs/profiles/cpu.yaml"
    container.start(MODEL, "--served-model-name", "m", "--config", profile, DRAIN_SECONDS=str(DRAIN_SECONDS))
    container.wait_until_ready()
    assert container.healthy()
    server = container.server

    status, answer = server.call("POST", "/v1/chat/completions", QUESTION)
    assert status == 200, answer
    assert "Paris" in answer["choices"][0]["message"]["content"]

    for fraction in (0.05, 0.5):
        resized = server.resize(fraction=fraction)
        assert resized["outcome"] == "done"
        assert server.state()["blocks"]["resident"] == resized["to"]
    assert server.call("POST", "/v1/chat/completions", QUESTION)[1]["choices"] == answer["choices"]

    # A request that is under way when the signal comes is answered to its end.
    long = QUESTION | {"max_tokens": 64, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.call, "POST", "/v1/chat/completions", long)
        server.wait_until_busy()
        assert container.stop(DRAIN_SECONDS + 60) == 0
        status, answer = asked.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 64), answer
    assert not container.running()
    assert container.health() == 0
