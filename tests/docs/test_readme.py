"""The README's first steps, as they stand there, against the server that they start."""

import contextlib
import json
import re
import subprocess

import pytest
from elastic_tools.demo.server import end, free_port
from elastic_tools.pins import ROOT
from smoke.fake import FakeServer
from support.servers import Server, engine_environment, wait_until_ready

from .test_run import run

SAMPLES = re.findall(r"^\$ (.*?)\n(\{.*?)$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def keys(text: str) -> list[str]:
    """The names of fields, in order."""
    return re.findall(r'"(\w+)":', text)


def contains(whole: list[str], part: list[str]) -> bool:
    """Whether `part` stands in `whole`, without gaps."""
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


@contextlib.contextmanager
def made(line: str, log):
    """The server of `make serve`, on a free port."""
    port = free_port()
    environment = {name: value for name, value in engine_environment().items() if name not in ("MODEL", "VLLM_API_KEY")}
    with open(log, "w") as output:
        process = subprocess.Popen(
            line.split(), cwd=ROOT, env=environment | {"PORT": str(port)}, stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        end(process)


@pytest.mark.engine
def test_try_it(tmp_path):
    """Also docs/operating.md's smoke test of a server that runs."""
    with made("make serve", tmp_path / "server.log") as server:
        lines = (
            "curl -X POST http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
            '-d \'{"model": "SmolLM2-135M-Instruct", "prompt": "The capital of France is", '
            '"temperature": 0, "max_tokens": 8}\'',
            "curl -X POST http://127.0.0.1:8000/elastic_kv/resize -H 'Content-Type: application/json' "
            '-d \'{"bytes": "256MiB"}\'',
            "curl http://127.0.0.1:8000/elastic_kv",
        )
        assert len(lines) == len(SAMPLES)
        answers = []
        for line, (_, sample) in zip(lines, SAMPLES, strict=True):
            silent = line.replace("http://127.0.0.1:8000", server.url) + " --silent"
            answer = run(silent, tmp_path)
            answers.append(json.loads(answer))
            for part in sample.split(" ... "):
                assert contains(keys(answer), keys(part)), f"{sample} is not the form of {answer}"
            if "..." not in sample:
                assert keys(sample) == keys(answer)
        assert answers[0]["choices"][0]["text"].startswith(" Paris")
        assert answers[1]["outcome"] == "done"
        assert answers[2]["blocks"]["resident"] == answers[1]["to"]
        assert (answers[2]["policy"], answers[2]["driver"], answers[2]["block_size"]) == ("static", "host", 32)
        line = "scripts/smoke --url http://127.0.0.1:8000 --log server.log --junit smoke.xml"
        run(line.replace("http://127.0.0.1:8000", server.url), tmp_path)


def test_smoke_of_a_url(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with FakeServer().running() as url:
        assert "everything holds" in run("scripts/smoke --url URL", tmp_path, URL=f"{url} --junit smoke.xml")
