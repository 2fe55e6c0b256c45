"""The image under buildah alone, which has no engine: its processes are this machine's, and so are its ports."""

import contextlib
import json
import signal
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from elastic_tools.demo.server import free_port
from elastic_tools.image import BUILDAH

from .containers import ENVIRONMENT, IMAGE, MODEL, Container, ask, server_at


class ChrootContainer(Container):
    """Runs the image's entrypoint in its files, as its user."""

    def __init__(self, model: Path):
        self.port, self.model = free_port(), model
        self.name = self.buildah("from", str(IMAGE))
        self.log = tempfile.NamedTemporaryFile("w+", prefix="image-test-")  # noqa: SIM115 - as long as the container
        self.process: subprocess.Popen[bytes] | None = None

    def buildah(self, *arguments: str) -> str:
        return ask(*BUILDAH, *arguments)

    def config(self) -> dict[str, Any]:
        return self._config

    @cached_property
    def _config(self) -> dict[str, Any]:
        return dict(json.loads(self.buildah("inspect", self.name))["Docker"]["config"])

    def command(self, *arguments: str, **environment: str) -> list[str]:
        """What runs a command in the container, with its environment."""
        variables = [f"--env={name}={value}" for name, value in (ENVIRONMENT | environment).items()]
        options = ["--isolation", "chroot", *variables, f"--env=PORT={self.port}", f"--volume={self.model}:{MODEL}:ro"]
        return [*BUILDAH, "run", *options, self.name, "--", *arguments]

    def run(self, *command: str) -> str:
        return ask(*self.command(*command))

    def start(self, *arguments: str, **environment: str) -> None:
        command = self.command(*self.config()["Entrypoint"], *arguments, **environment)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        self.server = server_at(f"127.0.0.1:{self.port}")

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def healthy(self) -> bool:
        return subprocess.run(self.command(*self.config()["Healthcheck"]["Test"][1:])).returncode == 0

    def stop(self, seconds: int) -> int:
        assert self.process is not None
        # What an engine would send the signal to: the first process of the image.
        first = Path(self.config()["Entrypoint"][0]).name
        tree = psutil.Process(self.process.pid).children(recursive=True)
        next(one for one in tree if one.name() == first).send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 137

    def end(self) -> None:
        if self.process and self.running():
            parent = psutil.Process(self.process.pid)
            for one in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self.process.wait()
        self.buildah("rm", self.name)
        self.log.close()
