"""The unpatched copy of the engine, and the patches."""

import os
import shutil
import subprocess
import sys

from elastic_tools.setup import places
from elastic_tools.setup.show import SetupError, timed

APPLIED, NOT_APPLIED, MODIFIED, OTHER_SERIES = 0, 3, 5, 6  # what `patchset status` exits with


def patchset(verb: str) -> subprocess.CompletedProcess[str]:
    """Runs ``scripts/patchset VERB .venv``."""
    command = [sys.executable, str(places.ROOT / "scripts" / "patchset"), verb, str(places.VENV)]
    return subprocess.run(command, capture_output=True, text=True, cwd=places.ROOT)


def keep_upstream() -> None:
    """A second, unpatched ``vllm`` package, made of hard links before patching.

    ``PYTHONPATH=.cache/upstream`` runs the unpatched engine in the same environment. Patching replaces files and never
    writes into them, so the links keep what upstream shipped.
    """
    places.UPSTREAM.mkdir(parents=True, exist_ok=True)
    temporary = places.UPSTREAM / f".vllm-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(places.site_packages() / "vllm", temporary, ignore=ignore, copy_function=link_or_copy)
    shutil.rmtree(places.UPSTREAM / "vllm", ignore_errors=True)
    temporary.rename(places.UPSTREAM / "vllm")


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the cache is on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def revert_patches() -> None:
    """Upstream's files again, where there is an engine and it carries patches."""
    if (places.site_packages() / "vllm" / "__init__.py").exists() and patchset("status").returncode != NOT_APPLIED:
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
