"""Runs pip."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from elastic_tools.setup import places
from elastic_tools.setup.show import SetupError, progress, say

ATTEMPTS = 3


def locked(lock: Path) -> dict[str, str]:
    """Distribution and version of every entry of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))


class NoSuchDistribution(SetupError):
    """No configured index offers what was asked for."""


def pip(*arguments: str, total: int = 0) -> None:
    """Runs pip in the environment, shows how far it is, and tries again where a download broke."""
    command = [str(places.PYTHON), "-m", "pip", *arguments[:1], "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "5", *arguments[1:], "--progress-bar", "off"]
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
    for metadata in places.site_packages().glob("*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)


def run_pip(command: list[str], total: int) -> tuple[int, list[str]]:
    """One run of pip: its exit status and its output."""
    lines: list[str] = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=places.CACHE
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
            present = sum(1 for _ in places.site_packages().glob("*.dist-info"))
            return f"unpacking, {present} packages in place"
        if file := re.match(r"\s*(?:Downloading|Using cached) (?:\S*/)?([^/\s-]+)\S*(?: \((.*?)\))?", line):
            return f"{count}: {file[1]} {file[2] or ''}".rstrip()
        if line.startswith("Collecting "):
            return f"{count}: {line.split()[1].split('==')[0]}"
    return "starting"
