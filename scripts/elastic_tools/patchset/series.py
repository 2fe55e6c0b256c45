"""The series as it lies in ``patches/``: an ordered list of patches, and a folder of new files."""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import patchfile
from .errors import Refusal

PATCH_NAME = re.compile(r"(\d{4})-[a-z0-9][a-z0-9._-]*\.patch$")
_LITTER = re.compile(r"(\..*|__pycache__|.*\.py[co]|.*~|.*\.orig|.*\.rej)$")


def digest(data: bytes) -> str:
    """The sha256 of ``data`` in hex."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def naming(place: Path) -> Iterator[None]:
    """Gives a failing system call that names no file, as a write on a full disk, the name of ``place``."""
    try:
        yield
    except OSError as fault:
        fault.filename = fault.filename or str(place)
        raise


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder; it goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="patchset-") as temporary, naming(Path(temporary)):
        yield Path(temporary).resolve()


def atomic_write(path: Path, data: bytes) -> None:
    """Puts ``data`` at ``path`` whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Series:
    """A patch series and its new files. ``path`` is the folder that holds ``series`` and ``files/``."""

    path: Path

    def names(self) -> list[str]:
        """File names in the order in which they apply; none where there is no ``series`` file."""
        try:
            text = (self.path / "series").read_text()
        except FileNotFoundError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]

    def present(self) -> list[str]:
        """The patch files in the folder, listed or not."""
        return sorted(file.name for file in self.path.glob("*.patch"))

    def patches(self) -> list[patchfile.Patch]:
        """All patches, parsed, in order; raises :class:`Refusal` naming the first bad one."""
        found = []
        for name in self.names():
            try:
                found.append(patchfile.read(self.path / name))
            except patchfile.Malformed as fault:
                raise Refusal(f"{name} {fault}.") from None
            except OSError as fault:
                raise Refusal(f"{name} is in the series and cannot be read: {fault.strerror}.") from None
        return found

    def touched(self) -> list[str]:
        """Every upstream file that a patch touches, sorted."""
        return sorted({path for patch in self.patches() for path in patch.paths})

    def files(self) -> dict[str, Path]:
        """New files: place in the upstream tree to source file, sorted. Litter of editors and Python is left out."""
        base = self.path / "files"
        found: dict[str, Path] = {}
        for folder, folders, names in os.walk(base):
            folders[:] = [name for name in folders if not _LITTER.match(name)]
            for name in names:
                if not _LITTER.match(name):
                    file = Path(folder, name)
                    found[file.relative_to(base).as_posix()] = file
        return dict(sorted(found.items()))

    def hash(self) -> str:
        """One sha256 over order, names and content of patches and new files."""
        parts = [f"patch {name} {digest((self.path / name).read_bytes())}\n" for name in self.names()]
        parts += [f"file {path} {digest(file.read_bytes())}\n" for path, file in self.files().items()]
        return digest("".join(parts).encode())
