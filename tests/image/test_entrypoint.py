"""The entrypoint and the health check of the images, with programs in place of vLLM and Ray that note their calls."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from elastic_tools.pins import ROOT

ENTRYPOINT = ROOT / "docker" / "entrypoint"
HEALTHCHECK = ROOT / "docker" / "healthcheck"
NOTE = 'echo "$(basename "$0") $*" >> "$NOTES"\n'
# Whoever reads a program's note may send it a signal: the trap comes first.
TRAP = 'trap \'echo "$(basename "$0") got TERM" >> "$NOTES"; exit 0\' TERM\n'
LOOP = "while :; do sleep 0.02; done\n"


class Container:
    """An entrypoint with fake programs. `nodes` is how many Ray nodes are alive."""

    def __init__(self, folder: Path):
        self.folder, self.notes = folder, folder / "notes"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.sessions: list[int] = []
        self.notes.touch()
        self.nodes(1)
        self.program("vllm", TRAP + NOTE + 'echo "ray at ${RAY_ADDRESS:-none}" >> "$NOTES"\n' + LOOP)
        self.program("ray", TRAP + NOTE + LOOP)
        self.program("python3", 'cat "$NOTES.nodes"\n')

    def program(self, name: str, text: str) -> None:
        place = self.bin / name
        place.write_text("#!/bin/bash\n" + text)
        place.chmod(0o755)

    def nodes(self, count: int) -> None:
        Path(f"{self.notes}.nodes").write_text(f"{count}\n")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        path = f"{self.bin}:/usr/bin:/bin"
        given = {"PATH": path, "NOTES": str(self.notes), "RAY_POLL_SECONDS": "0.05", **environment}
        command = [ENTRYPOINT, *arguments]
        process = subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.sessions.append(process.pid)
        return process

    def end(self) -> None:
        """Whatever a test that failed left behind."""
        for session in self.sessions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

    def said(self) -> list[str]:
        return self.notes.read_text().splitlines()

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 60
        while not any(one.startswith(line) for one in self.said()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)


@pytest.fixture
def container(tmp_path):
    one = Container(tmp_path)
    yield one
    one.end()


def ended(process: subprocess.Popen) -> int:
    """The status of a process that ends by itself or because it was asked to."""
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


def test_arguments_go_to_vllm_as_they_are(container):
    container.program("vllm", NOTE)
    assert ended(container.start("owner/a model", "--elastic-kv-config", '{"start": "1GiB"}')) == 0
    assert container.said() == [
        'vllm serve owner/a model --port 8000 --shutdown-timeout 30 --elastic-kv-config {"start": "1GiB"}'
    ]


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"PORT": "9000"}, "--port 9000 --shutdown-timeout 30"),
        ({"DRAIN_SECONDS": "120"}, "--port 8000 --shutdown-timeout 120"),
        ({"DRAIN_SECONDS": ""}, "--port 8000"),
    ],
)
def test_settings_from_the_environment(container, environment, options):
    container.program("vllm", NOTE)
    assert ended(container.start("m", **environment)) == 0
    assert container.said() == [f"vllm serve m {options}"]
    assert ended(container.start("--config", "a.yaml", **environment)) == 0
    assert container.said()[1:] == [f"vllm serve {options} --config a.yaml"]


@pytest.mark.parametrize("profile", sorted((ROOT / "configs" / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_vllm_finds_the_model_beside_a_profile(container, profile):
    """It looks for it behind `serve`, before any option."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    container.program("vllm", 'printf "%s\\n" "$@" >> "$NOTES"\n')
    assert ended(container.start("owner/model", "--config", str(profile))) == 0
    arguments = FlexibleArgumentParser()._pull_args_from_config(container.said())
    assert arguments[:2] == ["serve", "owner/model"]
    assert "--elastic-kv-config" in arguments


def test_without_ray_the_server_takes_the_place_of_the_script(container):
    """So it gets every signal itself, and its status is the container's."""
    process = container.start("m")
    container.wait_for("ray at none")
    assert "vllm" in Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0
    assert container.said()[-1] == "vllm got TERM"


def test_the_head_starts_ray_waits_for_the_nodes_and_serves(container):
    process = container.start("m", RAY_MODE="head", RAY_NODES="2", RAY_SLOTS="1", RAY_PORT="7000")
    container.wait_for("ray start")
    assert container.said() == ["ray start --block --head --port 7000 --include-dashboard false --num-gpus 1"]
    container.nodes(2)
    container.wait_for("ray at")
    assert container.said()[-1] == "ray at 127.0.0.1:7000"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0
    assert container.said()[-2:] == ["vllm got TERM", "ray got TERM"]  # in this order: requests need their ranks


def test_a_signal_while_the_head_waits_ends_everything(container):
    process = container.start("m", RAY_MODE="head", RAY_NODES="2")
    container.wait_for("ray start")
    time.sleep(0.2)  # it is waiting
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 143
    assert container.said()[-1] == "ray got TERM"


def test_a_ray_that_ends_is_told(container):
    container.program("ray", NOTE + "exit 1\n")
    container.nodes(0)
    process = container.start("m", RAY_MODE="head")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "the Ray node has ended" in error


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_status_is_the_server_s(container, status):
    container.program("vllm", f'until grep -q "^ray start" "$NOTES"; do sleep 0.01; done\nexit {status}\n')
    assert ended(container.start("m", RAY_MODE="head")) == status
    assert container.said()[-1] == "ray got TERM"


def test_the_status_of_a_server_that_is_gone_before_it_is_looked_for(container):
    container.program("vllm", "exit 7\n")
    slow = container.folder / "slow"
    slow.write_text('kill() {\n    if [ "$1" = -0 ]; then sleep 0.3; fi\n    builtin kill "$@"\n}\n')
    assert ended(container.start("m", RAY_MODE="head", BASH_ENV=str(slow))) == 7


def test_a_second_signal_while_the_server_drains_changes_nothing(container):
    container.program(
        "vllm",
        'trap \'echo first >> "$NOTES"; trap "" TERM; sleep 0.5; exit 0\' TERM\n' + NOTE + LOOP,
    )
    process = container.start("m", RAY_MODE="head")
    container.wait_for("vllm serve")
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    container.wait_for("first")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0


def test_a_worker_is_a_ray_node_and_nothing_else(container):
    process = container.start(RAY_MODE="worker", RAY_HEAD="127.0.0.1:1", RAY_SLOTS="1")
    container.wait_for("ray start")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0
    assert container.said() == ["ray start --block --address 127.0.0.1:1 --num-gpus 1", "ray got TERM"]


def test_a_worker_goes_after_its_head(container):
    """Where both are asked to stop at once, the requests under way at the head need this node's rank."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        process = container.start(RAY_MODE="worker", RAY_HEAD=address, DRAIN_SECONDS="600")
        container.wait_for("ray start")
        process.send_signal(signal.SIGTERM)
        head.accept()  # it looks whether the head is there
        assert container.said() == [f"ray start --block --address {address}"]
    assert ended(process) == 0
    assert container.said()[-1] == "ray got TERM"


def test_a_worker_does_not_wait_for_its_head_forever(container):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        process = container.start(RAY_MODE="worker", RAY_HEAD=address, DRAIN_SECONDS="1")
        container.wait_for("ray start")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0


@pytest.mark.parametrize("status", [0, 1])
def test_a_worker_ends_with_its_ray_node(container, status):
    container.program("ray", NOTE + f"exit {status}\n")
    assert ended(container.start(RAY_MODE="worker", RAY_HEAD="127.0.0.1:1")) == status


def test_a_server_that_joins_a_cluster(container):
    process = container.start("m", RAY_MODE="join", RAY_HEAD="head:6379")
    container.wait_for("ray at")
    assert container.said()[0] == "ray start --block --address head:6379"
    assert container.said()[-1] == "ray at head:6379"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RAY_MODE": "worker"}, "needs RAY_HEAD, as HOST:PORT"),
        ({"RAY_MODE": "join"}, "needs RAY_HEAD, as HOST:PORT"),
        ({"RAY_MODE": "both"}, "RAY_MODE=both is unknown: say head, worker or join"),
    ],
)
def test_what_is_missing_or_unknown_is_said(container, environment, why):
    process = container.start("m", **environment)
    error = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert why in error
    assert container.said() == []


# --- the health check ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_a_server_is_as_well_as_it_says(status, healthy):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {"PATH": os.environ["PATH"], "PORT": str(server.server_address[1])}
        result = subprocess.run([HEALTHCHECK], env=environment, capture_output=True, timeout=60)
        thread.join()
    assert (result.returncode == 0) is healthy
    assert asked == ["/health"]


def test_a_server_that_is_not_there_is_not_well():
    result = subprocess.run(
        [HEALTHCHECK], env={"PATH": os.environ["PATH"], "PORT": "9"}, capture_output=True, timeout=60
    )
    assert result.returncode != 0


def test_a_worker_is_as_well_as_its_ray_node(container):
    container.program("ray", NOTE)
    environment = {"PATH": f"{container.bin}:/usr/bin:/bin", "NOTES": str(container.notes)}
    environment |= {"RAY_MODE": "worker", "RAY_HEAD": "head:6379"}
    assert subprocess.run([HEALTHCHECK], env=environment, timeout=60).returncode == 0
    assert container.said() == ["ray health-check --address head:6379"]
