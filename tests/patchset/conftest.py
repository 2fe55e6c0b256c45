"""A synthetic upstream release, a series against it, and targets to apply it to."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from elastic_tools.patchset import git, tree
from elastic_tools.patchset.project import Project

VERSION = "9.9.1"
UPSTREAM = {
    "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n",
    ".gitignore": "_version.py\n*.log\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/core/__init__.py": "",
    "vllm/core/pool.py": "".join(f"pool line {n}\n" for n in range(1, 61)),
    "vllm/core/windows.py": "".join(f"crlf line {n}\r\n" for n in range(1, 21)),
    "vllm/worker.py": "".join(f"worker line {n}\n" for n in range(1, 31)),
    "tests/test_pool.py": "def test(): ...\n",
}
NEW = {
    "vllm/elastic/__init__.py": '"""New."""\n',
    "vllm/elastic/deep/arena.py": "SIZE = 1\n",
    "vllm/core/extra.py": "EXTRA = True\n",
}
HEADER = "\n\nWhat: a change.\n\nWhy: a reason.\n\nUpstream-Status: not sent\n"


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())


def replace(file: Path, old: str, new: str) -> None:
    """Edits like an editor that replaces the file, so a hard link elsewhere keeps the old text."""
    data = file.read_bytes()
    assert old.encode() in data
    file.unlink()
    file.write_bytes(data.replace(old.encode(), new.encode(), 1))


def commit(at: Path, subject: str, header: str = HEADER) -> None:
    git.output("commit", "--quiet", "--all", "--message", subject + header, cwd=at)


def plain_git(*args: str, cwd: Path) -> str:
    """Git as a user runs it, with an identity and nothing else of ours."""
    who = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
    return subprocess.run(["git", *who, *args], cwd=cwd, check=True, capture_output=True, text=True).stdout


def snapshot(root: Path) -> dict[str, object]:
    """Everything that an observer could see under ``root``: kinds, modes, times and content."""
    found: dict[str, object] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != ".git"]
        for name in folders + names:
            place = Path(folder, name)
            info = place.lstat()
            key = place.relative_to(root).as_posix()
            if place.is_symlink():
                found[key] = os.readlink(place)
            elif place.is_dir():
                found[key] = info.st_mode
            else:
                found[key] = (info.st_mode, info.st_mtime_ns, place.read_bytes())
    return found


def make_sdist(root: Path, files: dict[str, str] = UPSTREAM) -> str:
    """Puts the release into the cache of the project at ``root``; returns its sha256."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"vllm-{VERSION}/{path}")
            member.size, member.mode, member.uid = len(text.encode()), 0o644, 4711
            archive.addfile(member, io.BytesIO(text.encode()))
    (root / ".cache").mkdir(parents=True, exist_ok=True)
    (root / ".cache" / f"vllm-{VERSION}.tar.gz").write_bytes(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def make_empty_project(root: Path) -> Project:
    """A checkout with a pinned release and no series."""
    sha = make_sdist(root)
    pins = f'[vllm]\nversion = "{VERSION}"\nsdist = "vllm-{VERSION}.tar.gz"\nsdist_sha256 = "{sha}"\n'
    write(root, {"configs/pins.toml": pins})
    (root / "patches").mkdir()
    return Project.at(root)


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """A test process outlives no power cut, so syncing only costs time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    """A project with three patches and three new files, and its tree; tests copy it."""
    root = tmp_path_factory.mktemp("template") / "project"
    project = make_empty_project(root)
    write(root / "patches" / "files", NEW)
    tree.make(project)
    at = project.tree
    replace(at / "vllm/core/pool.py", "pool line 30\n", "pool line 30\npool grows\n")
    commit(at, "pool: grow")
    replace(at / "vllm/core/pool.py", "pool line 50\n", "pool line fifty\n")
    replace(at / "vllm/core/windows.py", "crlf line 7\r\n", "crlf line seven\r\n")
    commit(at, "Pool & Windows: say it in words")
    replace(at / "vllm/worker.py", "worker line 15\n", "worker line fünfzehn: Grüße\n")
    commit(at, "worker: übersetzt")
    tree.refresh(project)
    return root


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Project:
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    return Project.at(tmp_path / "project")


@pytest.fixture
def empty(tmp_path: Path) -> Project:
    return make_empty_project(tmp_path / "empty")


def make_site(root: Path, distribution: str = "vllm", version: str = VERSION) -> Path:
    """A virtual environment with vLLM installed from a wheel; returns its site-packages."""
    site = root / "lib" / "python3.11" / "site-packages"
    write(site, {path: text for path, text in UPSTREAM.items() if path.startswith("vllm/")})
    info = f"{distribution}-{version}.dist-info"
    name = distribution.replace("_", "-")
    write(site, {f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nText\n"})
    write(site, {f"{info}/RECORD": "vllm/__init__.py,sha256=x,0\n"})
    return site


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    make_site(tmp_path / "venv")
    return tmp_path / "venv"


@pytest.fixture
def site(venv: Path) -> Path:
    return venv / "lib" / "python3.11" / "site-packages"
