"""Every command in the documents is run, and files and links exist."""

import os
import re

import pytest
import yaml

from .commands import DOCUMENTS as COMMANDS_OF
from .commands import TABLE, commands, written_in
from .facts import DOCUMENTS, ROOT

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_make_targets(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`|\$ )(?:[A-Z]+=\S+ )*make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert named <= targets


@each_document
def test_scripts(document):
    for name in re.findall(r"(?<![\w/.-])scripts/[a-z-]+(?![\w./])", document.read_text()):
        path = ROOT / name
        assert path.exists(), name
        assert path.is_dir() or os.access(path, os.X_OK), f"{name} cannot be run"


@each_document
def test_patchset_verbs(document):
    parser = (ROOT / "scripts" / "elastic_tools" / "patchset" / "cli.py").read_text()
    for verb in re.findall(r"scripts/patchset ([a-z]+)", document.read_text()):
        assert f'"{verb}"' in parser, verb


@each_document
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


@each_document
def test_variables_of_the_images(document):
    """What a document hands to the images is what the entrypoint, Ray or vLLM read."""
    known = (ROOT / "docker" / "entrypoint").read_text() + (ROOT / "docker" / "compose.yaml").read_text()
    for line in re.findall(r"^(?:[A-Z_]+=\S+ )+docker compose.*|^docker run .*", document.read_text(), re.MULTILINE):
        for name in re.findall(r"\b([A-Z][A-Z_]+)=", line):
            assert name in known, name


@each_document
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


@each_document
def test_options_of_the_demonstration(document):
    source = (ROOT / "scripts" / "elastic_tools" / "demo" / "__main__.py").read_text()
    for line in re.findall(r"scripts/demo ([^`\n]*)", document.read_text()):
        for option in re.findall(r"--[a-z-]+", line):
            assert option == "--help" or f'"{option}"' in source, option


@each_document
def test_no_private_paths(document):
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work)/", document.read_text())


def test_the_table_has_the_commands_of_the_documents_and_no_others():
    known = [line for part in ("by", "workflow", "not_run") for line in TABLE[part]] + TABLE["names"]["lines"]
    assert len(known) == len(set(known))
    assert set().union(*map(commands, COMMANDS_OF)) == set(known)


@pytest.mark.parametrize(("line", "test"), TABLE["by"].items())
def test_the_test_has_the_command_in_it(line, test):
    assert line in written_in(test)


@pytest.mark.parametrize(("line", "workflow"), TABLE["workflow"].items())
def test_the_workflow_runs_it(line, workflow):
    jobs = yaml.safe_load((ROOT / workflow).read_text())["jobs"].values()
    assert line in [step.get("run", "").strip() for job in jobs for step in job["steps"]]


@pytest.mark.parametrize(("line", "entry"), TABLE["not_run"].items())
def test_what_is_not_run_has_a_reason_and_a_stand_in(line, entry):
    reason, test = entry
    assert reason
    assert written_in(test) is not None


def test_names_are_no_commands():
    """At most an option without its value."""
    for line in TABLE["names"]["lines"]:
        assert len(line.split()) <= 3, line
        assert not re.search(r"[A-Z]", line), line


def test_commands_are_found(tmp_path):
    document = tmp_path / "a.md"
    document.write_text(
        "`make a` and `vllm:metric`, `vllm/file.py`, `git\nam x`\n\n```\n$ curl -d 'x' \\\n    http://y\n{}\n```\n\n"
        "```\nscripts/patchset apply DIR     # where\nsome output\n```\n\n```python\nmake = 1\n```\n"
    )
    assert commands(document) == {"make a", "git am x", "curl -d 'x' http://y", "scripts/patchset apply DIR"}
