"""The command line, and the order of the steps.

Each step has a key, the hash of what it depends on, and ``.venv/elastic-setup.json`` records the keys of the steps that
are done. A second run does nothing, an interrupted run goes on at the step it lost, and a changed pin redoes its step
and those after it that build on it.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator

from elastic_tools.setup import places
from elastic_tools.setup.patches import apply_patches, keep_upstream, revert_patches
from elastic_tools.setup.show import SetupError, say, timed
from elastic_tools.setup.steps import nvidia_driver_answers, steps


def read_stamp() -> dict[str, str]:
    """The keys of the steps that are done; empty where there is no environment, or one that something else made."""
    try:
        stamp = json.loads(places.STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and places.PYTHON.exists() else {}


def write_stamp(stamp: dict[str, str]) -> None:
    """Replaces the record in one go, so that a crash leaves the old or the new one."""
    temporary = places.STAMP.with_suffix(".new")
    temporary.write_text(json.dumps(stamp, indent=1) + "\n")
    temporary.replace(places.STAMP)


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Lets one setup run at a time in this checkout; a second one waits."""
    places.CACHE.mkdir(exist_ok=True)
    with open(places.CACHE / "setup.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another setup is at work in this checkout; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
            places.STAMP.unlink(missing_ok=True)
        if step.name == "engine":
            revert_patches()  # pip takes away only what it brought
        timed(step.name, step.run)
        stamp[step.name] = step.key
        write_stamp(stamp)

    if stamp.get("copy") != stamp["engine"] or not (places.UPSTREAM / "vllm" / "__init__.py").exists():
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
                places.STAMP.unlink(missing_ok=True)
            set_up(engine, dev=not arguments.no_dev, patches=not arguments.no_patches)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    say(f"ready: {engine} engine in {places.VENV.relative_to(places.ROOT)} ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
