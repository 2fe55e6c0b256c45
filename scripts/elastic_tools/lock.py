"""Resolves ``configs/requirements`` and the pins into ``configs/locks``. Run it in ``.venv``; it needs uv.

A lock serves every Python named below: each is resolved, and they must agree. Versions already locked stay as long as
they fit; ``--upgrade`` looks for newer ones.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic_tools.pins import VENV, pins
from elastic_tools.setup.packages import locked
from elastic_tools.setup.places import LOCKS, REQUIREMENTS

PYTHONS = ["3.11", "3.12", "3.13"]
PLATFORM = "x86_64-manylinux_2_31"


def resolve(name: str, constraints: Path, options: list[str], python: str, target: Path) -> None:
    """One run of uv. What ``target`` holds already is preferred."""
    command = [
        str(VENV / "bin" / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
    ]
    command += [
        "--only-binary",
        ":all:",
        "--python-platform",
        PLATFORM,
        "--python-version",
        python,
        "--constraint",
        str(constraints),
        *options,
    ]
    command += ["--output-file", str(target), str(REQUIREMENTS / f"{name}.txt")]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise SystemExit(f"lock: {name} for Python {python}:\n{result.stderr.strip()}")


def lock(name: str, versions: dict[str, str], options: list[str], upgrade: bool) -> dict[str, str]:
    """Writes one lock file; returns what it holds."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, target = Path(folder) / "constraints.txt", Path(folder) / f"{name}.txt"
        constraints.write_text("".join(f"{package}=={version}\n" for package, version in versions.items()))
        if not upgrade and (LOCKS / f"{name}.txt").exists():
            target.write_text((LOCKS / f"{name}.txt").read_text())
        kept: dict[str, str] = {}
        for python in PYTHONS:
            resolve(name, constraints, options, python, target)
            found = locked(target)
            if changed := {package for package, version in kept.items() if found.get(package) != version}:
                raise SystemExit(f"lock: {name}: Python {python} wants other versions of {', '.join(sorted(changed))}")
            kept = found
        (LOCKS / f"{name}.txt").write_text(target.read_text())
    print(f"lock: {name}: {len(kept)} packages")
    return kept


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Resolves configs/requirements and the pins into configs/locks.")
    parser.add_argument("--upgrade", action="store_true", help="take newer versions where the pins allow")
    upgrade = parser.parse_args().upgrade

    pin = pins()
    versions = pin["packages"] | {engine["distribution"]: engine["version"] for engine in pin["engine"].values()}
    without = ["--excludes", str(REQUIREMENTS / "cpu-without.txt")]
    cpu = lock("cpu", versions, without, upgrade)
    lock("cuda", versions, [], upgrade)
    # The tools, and Ray in the images, come on top of either engine, so they hold only what the engine's lock does not.
    omit = [option for package in cpu for option in ("--no-emit-package", package)]
    lock("dev", versions | cpu, without + omit, upgrade)
    lock("ray", versions | cpu, without + omit, upgrade)
    return 0


if __name__ == "__main__":
    sys.exit(main())
