"""Starts the server of the demonstration and ends it, whatever happens."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from elastic_tools import serve
from elastic_tools.pins import ROOT

START_LIMIT = 900.0  # seconds; a busy machine needs minutes to import and load
STOP_LIMIT = 60.0
CHILDREN_LIMIT = 10.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


class ServerError(Exception):
    """A failure that one message explains."""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_line(port: int, options: Sequence[str], model: str | None = None) -> serve.Plan:
    """What `scripts/serve` would run on this machine, with `options` on top. `model` goes before MODEL."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOST", "PORT", "ELASTIC")}
    if model is not None:
        environment["MODEL"] = model
    try:
        return serve.plan(
            ["--host", "127.0.0.1", "--port", str(port), *options],
            environment,
            engine=serve.engine_kind(),
            cpu_flags=serve.machine_flags(),
            cpus=sorted(os.sched_getaffinity(0)),
            process=os.getpid(),
        )
    except serve.ServeError as error:
        raise ServerError(str(error)) from error


@contextlib.contextmanager
def running(
    options: Sequence[str], log: Path, show: Callable[[str], None], model: str | None = None
) -> Iterator[tuple[str, int]]:
    """A server that answers, as its address and process id; it is ended when the block is left.

    Raises:
        ServerError: It did not come up. The message ends with what it logged last.

    """
    port = free_port()
    plan = command_line(port, options, model)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**plan.environment, **os.environ},
            start_new_session=True,  # Ctrl-C comes here alone, and the server is then ended in order
            preexec_fn=_end_with_parent,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_health(process, url, log, show)
        yield url, process.pid
    finally:
        show("ending the server")
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the server and every process it started: asked first, then forced."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, left = psutil.wait_procs(tree, timeout=CHILDREN_LIMIT)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def listener(url: str) -> int | None:
    """The process on this machine that listens at `url`, or None where it cannot be told."""
    address = httpx.URL(url)
    try:
        if address.host not in ("localhost", "127.0.0.1", "::1"):
            return None
        port = address.port or (443 if address.scheme == "https" else 80)
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return int(connection.pid)
    except psutil.AccessDenied:
        pass
    return None


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _wait_for_health(process: "subprocess.Popen[bytes]", url: str, log: Path, show: Callable[[str], None]) -> None:
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < START_LIMIT:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode} at start:\n{tail(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        show(f"starting the server, {waited:.0f} s: {tail(log, 1).split('] ')[-1].strip()[:60]}")
        time.sleep(0.5)
    raise ServerError(f"the server did not answer /health within {START_LIMIT:.0f} s:\n{tail(log)}")


def _end_with_parent() -> None:
    # In the child: if this program is killed outright, the server gets SIGTERM.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
