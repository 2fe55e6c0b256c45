"""Builds the images of `docker/Dockerfile` with docker, podman or buildah, whichever works. Standard library only."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_tools.patchset.project import Project
from elastic_tools.pins import ROOT, pins

NAME = "elastic-kv-vllm"
# buildah as it works inside another container, without an engine and without a network of its own
BUILDAH = ("buildah", "--storage-driver", "vfs")
# How each begins a build. podman and buildah are told docker's format, since OCI's has no HEALTHCHECK.
BUILD = {
    "docker": ("docker", "build"),
    "podman": ("podman", "build", "--format", "docker"),
    "buildah": (*BUILDAH, "build", "--isolation", "chroot", "--network", "host", "--format", "docker"),
}


class ImageError(Exception):
    """A failure that one sentence explains."""


def builder(works: Callable[[str], bool]) -> str:
    """The first builder that works."""
    for name in BUILD:
        if works(name):
            return name
    raise ImageError("none of docker, podman and buildah works here; on Debian: apt-get install buildah.")


def works(name: str) -> bool:
    """Whether a builder is installed and, in the case of docker, has a daemon that answers."""
    if shutil.which(name) is None:
        return False
    asked = [name, "info"] if name != "buildah" else [name, "--version"]
    try:
        return subprocess.run(asked, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def arguments(target: str) -> dict[str, str]:
    """The build arguments: the base and what the labels say."""
    pin = pins()
    return {
        f"{target.upper()}_BASE": pin["image"][target],
        "VLLM_VERSION": pin["vllm"]["version"],
        "SERIES": Project.at(ROOT).series.hash(),
        "REVISION": revision(),
    }


def revision() -> str:
    """The commit of this checkout; with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def build_command(target: str, name: str, base: str | None, options: Sequence[str]) -> list[str]:
    """What builds an image, but for the context, which comes last.

    Args:
        target: `cpu` or `cuda`.
        name: Of the builder.
        base: Another base image than the pinned one, or None.
        options: For the builder.

    """
    given = arguments(target)
    if base is not None:
        given[f"{target.upper()}_BASE"] = base
    file = ["--file", str(ROOT / "docker" / "Dockerfile"), "--target", target, "--tag", tag(target)]
    return [*BUILD[name], *file, *(f"--build-arg={key}={value}" for key, value in given.items()), *options]


def tag(target: str) -> str:
    """The name of an image: vLLM's release, the target."""
    return f"{NAME}:{pins()['vllm']['version']}-{target}"


def build(target: str, base: str | None, options: Sequence[str]) -> None:
    """Builds an image from the files that git knows, and no others."""
    command = build_command(target, builder(works), base, options)
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        context(Path(folder))
        run([*command, folder])
    say(f"built {tag(target)}")


def pin(target: str) -> None:
    """Writes the digest that the base of an image has now beside its tag, where the base is named."""
    old = pins()["image"][target]
    tagged = old.partition("@")[0]
    name = builder(works)
    new = f"{tagged}@{digest(name, tagged)}"
    run([*(BUILDAH if name == "buildah" else [name]), "pull", new])  # what the registry does not know ends it here
    for path in (ROOT / "configs" / "pins.toml", ROOT / "docker" / "Dockerfile"):
        path.write_text(path.read_text().replace(old, new))
    say(f"pinned {new}")


def digest(name: str, reference: str) -> str:
    """What a registry has under a tag, as `sha256:...`. The image is pulled, which the build needs anyway.

    Args:
        name: Of the builder.
        reference: The image, by tag.

    """
    if name == "buildah":
        run([*BUILDAH, "pull", reference], capture=True)
        return run([*BUILDAH, "inspect", "--type=image", "--format={{.FromImageDigest}}", reference], capture=True)
    run([name, "pull", reference])
    told = json.loads(run([name, "image", "inspect", "--format={{json .RepoDigests}}", reference], capture=True))
    if not told:
        raise ImageError(f"{reference} has no digest: it was made here, not pulled.")
    return str(told[0].partition("@")[2])


def context(into: Path) -> None:
    """Copies what the Dockerfile may take: files that git tracks or would, not what was made beside them."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listing += ["configs", "docker", "patches", "scripts"]
    for path in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if path and (ROOT / path).exists():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, into / path)


def make_base(release: str, mirror: str) -> None:
    """Makes a base image from Debian's packages alone, for places that no image registry reaches."""
    name = f"localhost/debian:{release}-minbase"
    with tempfile.TemporaryDirectory(prefix="debian-") as folder:
        run(["debootstrap", "--variant=minbase", release, folder, mirror])
        made = run([*BUILDAH, "from", "scratch"], capture=True)
        run([*BUILDAH, "copy", "--quiet", made, folder, "/"])
        run([*BUILDAH, "config", "--cmd", "bash", made])
        run([*BUILDAH, "commit", "--quiet", "--rm", made, name])
    say(f"made {name}: scripts/image build cpu --base {name}")


def run(command: Sequence[str], capture: bool = False) -> str:
    """Runs a command that has to work. Returns what it printed, where that is captured."""
    say(shlex.join(command))
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    except FileNotFoundError:
        raise ImageError(f"{command[0]} is not installed.") from None
    if result.returncode != 0:
        raise ImageError(f"{command[0]} ended with status {result.returncode}.")
    return result.stdout.strip() if capture else ""


def say(text: str) -> None:
    """A line for the user."""
    print(f"image: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    top = argparse.ArgumentParser(prog="scripts/image", description="Builds the container images.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    one = verbs.add_parser("build", help="build an image", epilog="Options after -- go to docker, podman or buildah.")
    one.add_argument("target", choices=["cpu", "cuda"])
    one.add_argument("--base", help="another base image than the one of configs/pins.toml, best by its digest")
    base = verbs.add_parser("base", help="make a Debian base image with debootstrap and buildah")
    base.add_argument("--release", default="bookworm")
    base.add_argument("--mirror", default="http://deb.debian.org/debian")
    digests = verbs.add_parser("pin", help="pin a base by the digest that its tag has now")
    digests.add_argument("target", choices=["cpu", "cuda"])
    verbs.add_parser("names", help="print the names of the images")
    cut = list(argv).index("--") if "--" in argv else len(argv)
    chosen, options = top.parse_args(argv[:cut]), argv[cut + 1 :]
    try:
        if chosen.verb == "build":
            build(chosen.target, chosen.base, options)
        elif chosen.verb == "pin":
            pin(chosen.target)
        elif chosen.verb == "base":
            make_base(chosen.release, chosen.mirror)
        else:
            print("\n".join(tag(target) for target in ("cpu", "cuda")))
    except ImageError as error:
        say(str(error))
        return 1
    return 0
