"""Commands, files and links in the documents exist."""

import os
import re

import pytest

from .facts import DOCUMENTS, ROOT

pytestmark = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def test_make_targets(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`|\$ )(?:[A-Z]+=\S+ )*make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert named <= targets


def test_scripts(document):
    for name in re.findall(r"(?<![\w/.-])scripts/[a-z-]+(?![\w./])", document.read_text()):
        path = ROOT / name
        assert path.exists(), name
        assert path.is_dir() or os.access(path, os.X_OK), f"{name} cannot be run"


def test_patchset_verbs(document):
    parser = (ROOT / "scripts" / "elastic_tools" / "patchset" / "cli.py").read_text()
    for verb in re.findall(r"scripts/patchset ([a-z]+)", document.read_text()):
        assert f'"{verb}"' in parser, verb


def test_links(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_options_of_the_demonstration(document):
    source = (ROOT / "scripts" / "elastic_tools" / "demo" / "__main__.py").read_text()
    for line in re.findall(r"scripts/demo ([^`\n]*)", document.read_text()):
        for option in re.findall(r"--[a-z-]+", line):
            assert option == "--help" or f'"{option}"' in source, option


def test_no_private_paths(document):
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work)/", document.read_text())
