"""A Ray cluster of two nodes on this machine, each with a slot for a rank and, if that can be had, its own network."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from elastic_tools.demo.server import end, free_port
from support.servers import SUPPORT

from .networks import network, why_not

RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
START_SECONDS = 300


@contextlib.contextmanager
def two_nodes(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Starts them; they end when the block is left. Yields the environment for the server, which runs on the first."""
    with contextlib.ExitStack() as stack:
        # Sockets lie in Ray's folder, and their paths may have 107 characters.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)))
        hosts: list[tuple[str, tuple[str, ...]]] = [("127.0.0.1", ()), ("127.0.0.1", ())]
        if why_not() is None:
            link = stack.enter_context(network())
            hosts = [(link.near, ()), (link.far, link.enter)]
            environment = environment | {"GLOO_SOCKET_IFNAME": link.interface}
        address = f"{hosts[0][0]}:{free_port()}"
        environment = environment | {"RAY_ADDRESS": address}
        nodes: list[subprocess.Popen] = []
        stack.callback(lambda: [end(node) for node in reversed(nodes)])
        for number, (host, enter) in enumerate(hosts):
            head = [
                "--head",
                "--port",
                address.split(":")[1],
                "--include-dashboard",
                "false",
                "--temp-dir",
                str(folder),
            ]
            command = [
                *(*enter, *RAY, "start", "--block", "--node-ip-address", host, "--num-gpus", "1", "--num-cpus", "2"),
                *("--disable-usage-stats", "--object-store-memory", str(100 << 20)),
                *(["--address", address] if number else head),
            ]
            log = folder / f"node-{number}.log"
            with open(log, "w") as output:
                nodes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            wait_for_slots(address, nodes, environment, log)
        yield environment


def wait_for_slots(address: str, nodes: list[subprocess.Popen], environment: dict[str, str], log: Path) -> None:
    """Wait until the cluster offers a slot for each node."""
    ask = f"import ray; ray.init({address!r}, log_to_driver=False); print(int(ray.cluster_resources().get('GPU', 0)))"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and nodes[-1].poll() is None:
        answer = subprocess.run(
            [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, timeout=START_SECONDS
        )
        if answer.stdout.strip().endswith(str(len(nodes))):
            return
        time.sleep(1)
    raise RuntimeError(f"Ray node {len(nodes)} does not come up:\n{log.read_text()[-3000:]}")


def ray_environment(environment: dict[str, str]) -> dict[str, str]:
    """Two ranks on this machine, one core each, whatever Ray makes of it."""
    cpus = sorted(os.sched_getaffinity(0))
    return environment | {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}",
        "PYTHONPATH": str(SUPPORT / "few_cores"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # else processes need a token that Ray keeps in the home directory
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_worker_niceness": "0",  # else ranks have what all other processes leave
        "RAY_DEDUP_LOGS": "0",  # each rank tells where its cache lies
    }
