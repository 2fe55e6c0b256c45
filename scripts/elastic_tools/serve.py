"""Becomes ``vllm serve`` with defaults that suit this machine. Run it in ``.venv``; ``scripts/serve`` does.

The process is replaced by the server, so a signal to it reaches the server.
"""

import argparse
import ctypes
import errno
import ipaddress
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_tools.pins import ROOT, VENV, pins

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # in /proc/cpuinfo: bf16 arithmetic in hardware (x86, x86, Arm)
LIBNUMA = "libnuma.so.1"
FEW_CORES = 4  # up to here the engine gets every core; above, vLLM keeps one back for the server's own work


class ServeError(Exception):
    """A failure that one sentence explains."""


@dataclass
class Plan:
    """What will be run."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # added to the caller's, which wins
    lines: list[str] = field(default_factory=list)  # shown to the user


def plan(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    engine: str,
    cpu_flags: set[str],
    cpus: Sequence[int],
    process: int,
) -> Plan:
    """Decides what to run. ``arguments`` are the user's own and come last on the command line, so that they win."""
    given = user_options(arguments)
    model, local_name = choose_model(environment.get("MODEL", ""))
    host = given.host or environment.get("HOST") or "127.0.0.1"
    port = given.port or port_number(environment.get("PORT") or "8000")
    name = given.served_model_name[0] if given.served_model_name else local_name or model
    keyed = bool(given.api_key or environment.get("VLLM_API_KEY"))

    options = ["--host", host, "--port", str(port)]
    added = {"VLLM_NO_USAGE_STATS": "1"}
    if local_name:
        options += ["--served-model-name", local_name]
        added["HF_HUB_OFFLINE"] = "1"
    if engine == "cpu":
        check_libraries()
        options += ["--enforce-eager", "--block-size", "32"]  # compiling takes minutes here and gains nothing
        if not cpu_flags & BF16_FLAGS:
            options += ["--dtype", "float32"]
        added["VLLM_CPU_OMP_THREADS_BIND"] = binding(cpus, given.tensor_parallel_size)

    elastic, admin = True, True
    if given.elastic_kv_config:
        pass  # the user's own, whatever it says
    elif environment.get("ELASTIC", "").lower() in ("off", "0", "no", "false"):
        elastic = False
        if engine == "cpu" and not given.kv_cache_memory_bytes:
            options += ["--kv-cache-memory-bytes", str(1 << 30)]
    elif engine != "cpu":
        elastic = False  # the engine would refuse it
    else:
        config = elastic_config(local=is_loopback(host), given=given, environment=environment)
        admin = keyed or "admin_api" in config
        options += ["--elastic-kv-config", json.dumps(config)]

    shown = "localhost" if host in ("0.0.0.0", "::") else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    lines = [f"{name} on {url} (pid {process}, {engine} engine); ready when it says so below"]
    post = f"curl -X POST {url}%s -H 'Content-Type: application/json'"
    post += " -H \"Authorization: Bearer $VLLM_API_KEY\" -d '%s'" if keyed else " -d '%s'"
    question = json.dumps({"model": name, "prompt": "The capital of France is"})
    if engine != "cpu" and not elastic:
        lines.append("the KV cache is not elastic here: this release has a page driver for CPU engines only")
    lines.append("ask:    " + post % ("/v1/completions", question))
    if elastic:
        lines.append(f"size:   curl {url}/elastic_kv")
        if admin:
            lines.append("resize: " + post % ("/elastic_kv/resize", json.dumps({"fraction": 0.5})))
        else:
            lines.append("resizing is off: this server answers other machines and has no API key; set VLLM_API_KEY")

    command = [str(VENV / "bin" / "python"), str(VENV / "bin" / "vllm"), "serve", model, *options, *arguments]
    return Plan(command, added, lines)


def user_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Those of the user's options that the defaults depend on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--api-key", nargs="+")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--elastic-kv-config")
    given, rest = parser.parse_known_args(arguments)
    if any(argument.startswith("--elastic-kv-config.") for argument in rest):  # vLLM's dotted form
        given.elastic_kv_config = "dotted"
    return given


def choose_model(wanted: str) -> tuple[str, str]:
    """What to hand to vLLM, and the name to serve it under where that is a local directory."""
    if not wanted:
        from elastic_tools.model import smollm2

        path = smollm2()
        return str(path), path.name
    path = Path(wanted).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ServeError(
                f"MODEL={wanted} is a directory without a config.json; name a Hugging Face model directory."
            )
        return str(path.resolve()), path.resolve().name
    if wanted.startswith(("/", ".", "~")) or wanted.count("/") > 1:
        raise ServeError(f"MODEL={wanted} does not exist; name a model directory, or a model of the hub as owner/name.")
    return wanted, ""


def elastic_config(local: bool, given: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, object]:
    """The default elastic cache: sizes that suit a small machine."""
    config: dict[str, object] = {"start": "1GiB", "capacity": "4GiB"}
    if given.kv_cache_memory_bytes or environment.get("VLLM_CPU_KVCACHE_SPACE"):
        config = {}  # the same as start, and only one may be given
    if local:
        config["admin_api"] = True  # without it vLLM serves the resize route only to holders of an API key
    return config


def binding(cpus: Sequence[int], ranks: int) -> str:
    """``VLLM_CPU_OMP_THREADS_BIND``: which cores each rank computes on."""
    if ranks == 1:
        return ",".join(map(str, cpus)) if len(cpus) <= FEW_CORES else "auto"
    share = len(cpus) // ranks
    if share == 0:
        raise ServeError(f"{ranks} ranks need at least {ranks} cores; this process may use {len(cpus)}.")
    return "|".join(",".join(map(str, cpus[rank * share : (rank + 1) * share])) for rank in range(ranks))


def port_number(text: str) -> int:
    """The port that ``text`` names."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise ServeError(f"PORT={text} is not a port: give a number from 1 to 65535.")
    return int(text)


def is_loopback(host: str) -> bool:
    """True where only this machine can reach the server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int) -> None:
    """Fails now, rather than after the model has been loaded, where the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServeError(f"port {port} on {host} is in use; stop what uses it or say PORT=another.") from error
            raise ServeError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from error


def check_libraries() -> None:
    """Fails now where the system lacks a library of the CPU engine: vLLM only warns, and then loses its worker."""
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError:
        raise ServeError(
            f"{LIBNUMA} is missing, which the CPU engine needs; on Debian and Ubuntu: apt install libnuma1."
        ) from None


def engine_kind() -> str:
    """``cpu`` or ``cuda``: which engine the environment holds."""
    name = pins()["engine"]["cpu"]["distribution"].replace("-", "_")
    return "cpu" if any((VENV / "lib").glob(f"python3*/site-packages/{name}-*")) else "cuda"


def machine_flags() -> set[str]:
    """What the first core can do, as the kernel names it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.split(":")[0].strip() in ("flags", "Features"):
            return set(line.split(":", 1)[1].split())
    return set()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        chosen = plan(
            arguments,
            os.environ,
            engine=engine_kind(),
            cpu_flags=machine_flags(),
            cpus=sorted(os.sched_getaffinity(0)),
            process=os.getpid(),
        )
        options = user_options(chosen.command)
        check_port(options.host, options.port)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    for line in chosen.lines:
        print(f"serve: {line}", file=sys.stderr)
    print(f"serve: {shlex.join(['vllm', *chosen.command[2:]])}", file=sys.stderr, flush=True)
    os.chdir(ROOT)
    os.execve(chosen.command[0], chosen.command, {**chosen.environment, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
