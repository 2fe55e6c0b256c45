"""The image that was built, as a container of docker's or podman's. Where only buildah is, `chroot.py` runs it."""

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from support.servers import START_SECONDS, Server

IMAGE = os.environ.get("ELASTIC_KV_IMAGE")  # `make image-test` sets it
MODEL = "/models/model"  # where a container finds the model that it is given
KEY = "a-test-key"
# An engine starts in a /dev/shm of 160 MiB or more; what containers have by default is 64.
OPTIONS = ("--detach", "--publish=127.0.0.1::8000", "--shm-size=1g")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_API_KEY": KEY}


class Container(ABC):
    """One container of the image, with a model."""

    server: Server  # once it is started

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What the image says of itself: Labels, User, Healthcheck, StopSignal."""

    @abstractmethod
    def run(self, *command: str) -> str:
        """What a command prints in a container of its own, in place of the entrypoint."""

    @abstractmethod
    def start(self, *arguments: str, **environment: str) -> None:
        """Starts the entrypoint. `wait_until_ready` waits for its server."""

    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def said(self) -> str:
        """What it has logged."""

    @abstractmethod
    def healthy(self) -> bool:
        """What the image's health check says."""

    @abstractmethod
    def stop(self, seconds: int) -> int:
        """Asks it to stop, with SIGTERM, and waits. Returns its exit status; 137 where it did not stop in time."""

    @abstractmethod
    def end(self) -> None:
        """Removes it, whatever it does."""

    def wait_until_ready(self) -> None:
        """Waits until the server is well."""
        deadline = time.monotonic() + START_SECONDS
        while self.health() != 200:
            assert self.running(), self.said()[-4000:]
            assert time.monotonic() < deadline, self.said()[-4000:]
            time.sleep(1)

    def health(self) -> int:
        """The status of /health, 0 where nobody answers."""
        try:
            return self.server.call("GET", "/health")[0]
        except OSError:
            return 0


class EngineContainer(Container):
    """A container of docker's or podman's, which take the same commands."""

    def __init__(self, engine: str, model: Path):
        self.engine, self.name = engine, f"elastic-kv-test-{os.getpid()}"
        self.options = [f"--volume={model}:{MODEL}:ro"]

    def ask(self, *arguments: str) -> str:
        return ask(self.engine, *arguments)

    def config(self) -> dict[str, Any]:
        (told,) = json.loads(self.ask("image", "inspect", str(IMAGE)))
        return {"Healthcheck": told.get("Healthcheck")} | told["Config"]  # podman has it beside the rest

    def run(self, *command: str) -> str:
        return self.ask("run", "--rm", "--entrypoint", command[0], str(IMAGE), *command[1:])

    def start(self, *arguments: str, **environment: str) -> None:
        variables = [f"--env={name}={value}" for name, value in (ENVIRONMENT | environment).items()]
        options = [*OPTIONS, f"--name={self.name}", *self.options, *variables]
        self.ask("run", *options, str(IMAGE), *arguments)
        self.server = server_at(self.ask("port", self.name, "8000/tcp").split()[0])

    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("inspect", "--format={{json .State}}", self.name)))

    def running(self) -> bool:
        return bool(self.state()["Running"])

    def said(self) -> str:
        command = [self.engine, "logs", self.name]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout

    def healthy(self) -> bool:
        if self.engine == "podman":  # where there is no systemd, nobody else runs it
            self.ask("healthcheck", "run", self.name)
        deadline = time.monotonic() + START_SECONDS
        while (status := self.state()["Health"]["Status"]) == "starting" and time.monotonic() < deadline:
            time.sleep(1)
        return bool(status == "healthy")

    def stop(self, seconds: int) -> int:
        self.ask("stop", "-t", str(seconds), self.name)
        return int(self.state()["ExitCode"])

    def end(self) -> None:
        subprocess.run([self.engine, "rm", "--force", self.name], capture_output=True)


def server_at(address: str) -> Server:
    """A server that is nobody's process here."""
    return Server(f"http://{address}", None, Path(os.devnull), KEY, "m")


def ask(*command: str) -> str:
    """What a command prints that has to work."""
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}:\n{result.stderr[-4000:]}"
    return result.stdout.strip()
