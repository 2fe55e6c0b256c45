"""The source release: index, download, checksum, unpacking."""

import http.server
import json
import os
import threading

import pytest
from elastic_tools.patchset import fetch
from elastic_tools.patchset.errors import Refusal

from .conftest import VERSION

NAME = f"vllm-{VERSION}.tar.gz"


class Index(http.server.BaseHTTPRequestHandler):
    """An index that can be made to fail, break off, or answer in HTML."""

    sdist = b""
    failures: list[str] = []  # noqa: RUF012 - set anew by the fixture
    html = False
    listed = True
    seen: list[tuple[str, str | None, str | None]] = []  # noqa: RUF012

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.path.endswith("/vllm/"):
            page = json.dumps({"files": [{"filename": NAME, "url": f"../../files/{NAME}"}] if self.listed else []})
            kind = "application/vnd.pypi.simple.v1+json"
            if self.html:
                page, kind = f'<a href="../../files/{NAME}#sha256=0">x</a>', "text/html"
            return self.answer(200, page.encode(), kind)
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "busy":
            return self.answer(503, b"", "text/plain")
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        data = self.sdist[start:]
        self.answer(206 if start else 200, data[: len(data) // 2] if failure == "cut" else data, "x/y", len(data))

    def answer(self, code, body, kind, length=None):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def index(empty, monkeypatch):
    """The index in place of the cached download."""
    file = empty.cache / NAME
    Index.sdist, Index.failures, Index.html, Index.listed, Index.seen = file.read_bytes(), [], False, True, []
    file.unlink()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("PIP_CERT", raising=False)
    monkeypatch.setattr(fetch, "pause", lambda _: None)
    yield Index
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("html", [False, True])
def test_fetches_once_and_unpacks(empty, index, html):
    index.html = html
    source = fetch.ensure_source(empty)
    assert (source / "vllm" / "_version.py").is_file()
    assert (source / "PKG-INFO").stat().st_uid == os.getuid()
    assert index.seen[0][2] == "Basic bWU6c2VjcmV0"
    count = len(index.seen)
    fetch.ensure_source(empty)
    assert len(index.seen) == count


def test_retries_and_goes_on_where_it_broke_off(empty, index):
    index.failures += ["busy", "cut"]
    fetch.ensure_source(empty)
    half = len(index.sdist) // 2
    assert [span for path, span, _ in index.seen if "files" in path] == [None, None, f"bytes={half}-"]


def test_gives_up_after_some_attempts_without_telling_the_password(empty, index):
    index.failures += ["busy"] * fetch.ATTEMPTS
    with pytest.raises(Refusal, match=r"cannot be fetched from http://127.*503") as refusal:
        fetch.ensure_source(empty)
    assert "secret" not in str(refusal.value)


def test_refuses_another_checksum_and_keeps_nothing(empty, index):
    index.sdist = index.sdist[:-1] + b"!"
    with pytest.raises(Refusal, match="is pinned; nothing was kept"):
        fetch.ensure_source(empty)
    assert not list(empty.cache.glob("vllm-*"))


def test_says_when_the_index_does_not_list_the_file(empty, index):
    index.listed = False
    with pytest.raises(Refusal, match=f"does not list {NAME}"):
        fetch.ensure_source(empty)


def test_says_when_the_index_is_not_there(empty, monkeypatch):
    (empty.cache / NAME).unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "pause", lambda _: None)
    with pytest.raises(Refusal, match="Connection refused"):
        fetch.ensure_source(empty)


def test_replaces_a_damaged_download(empty, index):
    (empty.cache / NAME).write_bytes(b"half")
    fetch.ensure_source(empty)
    assert (empty.cache / NAME).read_bytes() == index.sdist


def test_unpacks_again_after_an_interruption(empty):
    source = fetch.ensure_source(empty)
    (empty.cache / f"{source.name}.unpacked").unlink()
    (source / "vllm" / "__init__.py").unlink()
    fetch.ensure_source(empty)
    assert (source / "vllm" / "__init__.py").is_file()
