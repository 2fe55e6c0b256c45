"""The compose files of `docker/`, brought up with an engine that works and taken down, whatever happens."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_tools.image import works
from elastic_tools.pins import ROOT
from support.servers import START_SECONDS, Server

from .containers import IMAGE, KEY, MODEL, ask, server_at

FILES = [ROOT / "docker" / "compose.yaml", ROOT / "docker" / "compose.cpu.yaml"]
DRAIN_SECONDS = 300
# What tests change: the model is a directory, the port is one that is free, the two ranks share the cores of this
# machine, and a request has as long as a slow machine needs.
OVERRIDE = """
x-node: &node
  environment:
    HF_HUB_OFFLINE: "1"
    VLLM_CPU_OMP_THREADS_BIND: "{cpus}"
    DRAIN_SECONDS: "{drain}"
  volumes:
    - "{model}:{place}:ro"
services:
  head:
    <<: *node
    command: [{place}, --served-model-name, m, --config, /opt/elastic-kv/configs/profiles/tp-ray-cpu.yaml]
    ports: !override
      - 127.0.0.1::8000
  worker:
    <<: *node
"""


def compose_command() -> list[str] | None:
    """What runs compose files with an engine that works, if anything does."""
    if works("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if works("podman") and shutil.which("podman-compose"):
        return ["podman-compose"]
    return None


class Stack:
    """A head and a worker, each a container with an address of its own."""

    def __init__(self, command: list[str], folder: Path, model: Path):
        override = folder / "override.yaml"
        cpus = sorted(os.sched_getaffinity(0))
        values = {"model": model, "place": MODEL, "cpus": f"{cpus[0]}|{cpus[-1]}", "drain": DRAIN_SECONDS}
        override.write_text(OVERRIDE.format(**values))
        self.engine = "docker" if command[0] == "docker" else "podman"
        self.project = f"elastic-kv-test-{os.getpid()}"
        files = [argument for file in (*FILES, override) for argument in ("-f", str(file))]
        self.command = [*command, "-p", self.project, *files]
        self.environment: Mapping[str, str] = os.environ | {
            "IMAGE": str(IMAGE),
            "MODEL": MODEL,
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            "VLLM_API_KEY": KEY,
        }

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_SECONDS)

    def up(self) -> None:
        result = self.compose("up", "--detach")
        assert result.returncode == 0, result.stderr[-4000:]

    def ask(self, *arguments: str) -> str:
        return ask(self.engine, *arguments)

    def containers(self) -> dict[str, str]:
        """Container names by service, of those that are there, running or not."""
        label = f"--filter=label=com.docker.compose.project={self.project}"
        names = self.ask("ps", "--all", label, "--format={{.Names}}").split()
        service = '--format={{index .Config.Labels "com.docker.compose.service"}}'
        return {self.ask("inspect", service, name): name for name in names}

    def name(self, service: str) -> str:
        return self.containers()[service]

    def state(self, service: str) -> dict[str, Any]:
        return dict(json.loads(self.ask("inspect", "--format={{json .State}}", self.name(service))))

    def address(self, service: str) -> str:
        """Its address on the network of both."""
        networks = "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.ask("inspect", networks, self.name(service))

    def server(self) -> Server:
        return server_at(self.ask("port", self.name("head"), "8000/tcp").split()[0])

    def said(self, service: str) -> str:
        command = [self.engine, "logs", self.name(service)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout

    def health(self) -> int:
        """The status of /health, 0 where nobody answers."""
        try:
            return self.server().call("GET", "/health")[0]
        except (OSError, AssertionError):  # also while the container is started anew and has no port
            return 0

    def wait_for_health(self, well: bool, seconds: float = START_SECONDS) -> float:
        """Waits until /health is 200, or is not. Returns after how many seconds."""
        began = time.monotonic()
        while (self.health() == 200) is not well:
            tail = "\n".join(self.said(service)[-3000:] for service in self.containers())
            assert time.monotonic() < began + seconds, tail
            time.sleep(1)
        return time.monotonic() - began

    def end(self) -> None:
        """Takes away containers, network and volume."""
        self.compose("down", "--volumes", "--timeout", "1")
        for name in self.containers().values():
            subprocess.run([self.engine, "rm", "--force", name], capture_output=True)
