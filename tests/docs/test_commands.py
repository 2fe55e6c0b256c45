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


def test_options_of_the_smoke_test_and_verbs_of_the_image_tool(document):
    tools = ROOT / "scripts" / "elastic_tools"
    text, smoke = document.read_text(), (tools / "smoke" / "__main__.py").read_text()
    for line in re.findall(r"scripts/smoke ([^`\n]*)", text):
        for option in re.findall(r"--[a-z-]+", line):
            assert option == "--help" or f'"{option}"' in smoke, option
    for verb, line in re.findall(r"scripts/image ([a-z]+)([^`\n]*)", text):
        assert f'"{verb}"' in (tools / "image.py").read_text(), verb
        for option in re.findall(r"--[a-z-]+", line.split(" -- ")[0]):
            assert f'"{option}"' in (tools / "image.py").read_text(), option


def test_variables_of_the_images(document):
    """What a document hands to the images is what the entrypoint, Ray or vLLM read."""
    known = (ROOT / "docker" / "entrypoint").read_text() + (ROOT / "docker" / "compose.yaml").read_text()
    for line in re.findall(r"^(?:[A-Z_]+=\S+ )+docker compose.*|^docker run .*", document.read_text(), re.MULTILINE):
        for name in re.findall(r"\b([A-Z][A-Z_]+)=", line):
            assert name in known, name


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
