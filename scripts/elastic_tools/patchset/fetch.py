"""Gets upstream's pinned source release into the cache: index, download, checksum, unpack."""

import base64
import hashlib
import html.parser
import http.client
import json
import os
import ssl
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from .errors import Refusal
from .project import Project

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PIECE = 1 << 18
ATTEMPTS = 5
pause: Callable[[float], None] = time.sleep


def ensure_sdist(project: Project) -> Path:
    """The source release in the cache, downloaded where it is missing or damaged."""
    file = project.cache / project.sdist
    if file.is_file():
        if _sha256(file) == project.sha256:
            return file
        print(f"{file.name} in the cache has another checksum than the pinned one; fetching it again.")
        file.unlink()
    project.cache.mkdir(parents=True, exist_ok=True)
    _download(project, file)
    return file


def ensure_source(project: Project) -> Path:
    """Upstream's source, unpacked from the pinned release; does nothing where it is there."""
    stamp = project.cache / f"{project.source.name}.unpacked"
    if project.source.is_dir() and stamp.is_file() and stamp.read_text() == project.sha256:
        return project.source
    sdist = ensure_sdist(project)
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=project.cache, prefix=".unpack-") as temporary:
        fresh = unpack(sdist, Path(temporary))
        if project.source.exists():
            project.source.rename(Path(temporary, "old"))
        fresh.rename(project.source)
    stamp.write_text(project.sha256)
    return project.source


def unpack(sdist: Path, into: Path) -> Path:
    """Unpacks ``sdist`` under ``into``, owned by the caller; returns its one top folder."""
    if not hasattr(tarfile, "data_filter"):
        raise Refusal("This Python's tarfile cannot unpack safely; use Python 3.11.4 or newer.")
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    tops = [entry for entry in into.iterdir() if (entry / "PKG-INFO").is_file()]
    if len(tops) != 1:
        raise Refusal(f"{sdist.name} does not look like a source release: it has no single top folder with PKG-INFO.")
    return tops[0]


def _download(project: Project, file: Path) -> None:
    part = file.with_name(file.name + ".part")
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            url = _locate(f"{index.rstrip('/')}/vllm/", project.sdist)
            _transfer(url, part)
            break
        except urllib.error.HTTPError as fault:
            reason = f"the server answered {fault.code} {fault.reason}"
            retry = fault.code in (408, 429) or fault.code >= 500
        except (OSError, http.client.HTTPException) as fault:
            reason, retry = str(getattr(fault, "reason", fault)) or type(fault).__name__, True
        if not retry or attempt == ATTEMPTS:
            raise Refusal(f"{project.sdist} cannot be fetched from {_public(index)}: {reason}.")
        wait = 2.0**attempt / 2
        print(f"Attempt {attempt} of {ATTEMPTS} failed ({reason}); trying again in {wait:g} s.", file=sys.stderr)
        pause(wait)
    found = _sha256(part)
    if found != project.sha256:
        part.unlink()
        raise Refusal(f"{project.sdist} has sha256 {found}, but {project.sha256} is pinned; nothing was kept.")
    os.replace(part, file)


def _locate(page: str, name: str) -> str:
    """The address of file ``name`` on the index page, in JSON or, from older mirrors, HTML."""
    with _open(page + "index.html" if page.startswith("file:") else page) as answer:
        base, kind, text = answer.geturl(), answer.headers.get_content_type(), answer.read()
    if kind.endswith("json"):
        try:
            links = {str(entry["filename"]): str(entry["url"]) for entry in json.loads(text)["files"]}
        except (ValueError, KeyError, TypeError):
            raise Refusal(f"{_public(page)} is not an index page that can be read.") from None
    else:
        links = _Links(text.decode("utf-8", "replace")).found
    if name not in links:
        raise Refusal(f"{_public(page)} does not list {name}.")
    return urllib.parse.urljoin(base, links[name])


class _Links(html.parser.HTMLParser):
    """File name to address, of every link on an HTML index page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = dict(attrs).get("href") if tag == "a" else None
        if link:
            name = urllib.parse.unquote(urllib.parse.urlsplit(link).path.rsplit("/", 1)[-1])
            self.found[name] = urllib.parse.urldefrag(link).url


def _transfer(url: str, part: Path) -> None:
    """Downloads to ``part``, going on where an earlier attempt broke off if the server can."""
    have = part.stat().st_size if part.exists() else 0
    try:
        answer = _open(url, {"Range": f"bytes={have}-"} if have else {})
    except urllib.error.HTTPError as fault:
        if not have or fault.code != 416:
            raise
        part.unlink()
        have, answer = 0, _open(url)
    with answer:
        if answer.status != 206:
            have = 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        progress = _Progress(total)
        with open(part, "ab" if have else "wb") as file:
            while piece := answer.read(_PIECE):
                file.write(piece)
                have += len(piece)
                progress.show(have)
    if have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


class _Progress:
    """A line that counts on a terminal; a line per quarter elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.shown = total, -1

    def show(self, have: int) -> None:
        percent = 100 * have // self.total if self.total else 0
        step = percent if sys.stderr.isatty() else percent // 25
        if step != self.shown:
            self.shown = step
            end = "\r" if sys.stderr.isatty() and have < self.total else "\n"
            print(f"fetching {have >> 20} of {self.total >> 20} MiB ({percent}%)", end=end, file=sys.stderr, flush=True)


def _open(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """Opens ``url``; a user name and password in it become a header, as pip does it."""
    parts = urllib.parse.urlsplit(url)
    extra = {"Accept": _ACCEPT, "User-Agent": "elastic-kv-patchset", "Accept-Encoding": "identity"} | (headers or {})
    if parts.username is not None:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        extra["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    request = urllib.request.Request(_public(url), headers=extra)
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60, context=context)
    return answer


def _public(url: str) -> str:
    """``url`` without user name and password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
