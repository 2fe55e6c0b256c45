"""How the images are built, and that the Dockerfile says what the pins say. Nothing is built here."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from elastic_tools import image
from elastic_tools.patchset.project import Project
from elastic_tools.pins import CACHE, ROOT, pins

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_defaults_of_the_dockerfile_are_the_pins(target):
    (default,) = re.findall(rf"^ARG {target.upper()}_BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert default == pins()["image"][target]


def test_the_cuda_base_is_the_pinned_release():
    assert pins()["image"]["cuda"].partition("@")[0].endswith(f":v{pins()['vllm']['version']}")


def test_every_argument_is_used():
    for target in ("cpu", "cuda"):
        for name in image.arguments(target):
            assert re.search(rf"\$\{{{name}\}}", DOCKERFILE), name


def test_both_images_are_alike_where_they_can_be():
    """User, port, health check and entrypoint: what a deployment relies on."""
    _, cpu, cuda = re.split(r"^FROM .* AS (?:cpu|cuda)$", DOCKERFILE, flags=re.MULTILINE)
    same = r"^(?:USER 2000.*|WORKDIR /home.*|EXPOSE.*|STOPSIGNAL.*|HEALTHCHECK.*|ENTRYPOINT.*|LABEL(?:.*\\\n)*.*)$"
    found = [re.findall(same, part, re.MULTILINE) for part in (cpu, cuda)]
    assert len(found[0]) == 7
    assert [one.replace("CPU", "CUDA") for one in found[0]] == found[1]


@pytest.mark.parametrize(("there", "taken"), [({"docker", "buildah"}, "docker"), ({"podman"}, "podman")])
def test_the_builder_is_the_first_that_works(there, taken):
    assert image.builder(there.__contains__) == taken


def test_no_builder():
    with pytest.raises(image.ImageError, match="none of docker, podman and buildah works here"):
        image.builder(lambda name: False)


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("docker", ["docker", "build", "--file"]),
        ("podman", ["podman", "build", "--format", "docker", "--file"]),
        ("buildah", ["buildah", "--storage-driver", "vfs", "build", "--isolation", "chroot"]),
    ],
)
def test_what_is_run(name, begin):
    command = image.build_command("cuda", name, "vllm/vllm-openai@sha256:0", ["--pull"])
    assert command[: len(begin)] == begin
    assert "--build-arg=CUDA_BASE=vllm/vllm-openai@sha256:0" in command
    assert command[command.index("--target") + 1] == "cuda"
    assert command[command.index("--tag") + 1] == f"elastic-kv-vllm:{pins()['vllm']['version']}-cuda"
    assert command[-1] == "--pull"


DIGEST = "sha256:" + "1a" * 32
OTHER = "sha256:" + "2b" * 32


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A builder that pulls what a tag has now, beside copies of the files that name the bases."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "docker").mkdir()
    (tmp_path / "configs" / "pins.toml").write_text("[image]\n# a comment\ncpu = 'debian:12'\ncuda = 'vllm:v1'\n")
    (tmp_path / "docker" / "Dockerfile").write_text("ARG CPU_BASE=debian:12\nARG CUDA_BASE=vllm:v1\n")
    monkeypatch.setattr(image, "ROOT", tmp_path)
    monkeypatch.setattr(image, "pins", lambda: tomllib.loads((tmp_path / "configs" / "pins.toml").read_text()))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def program(name, digest):
        monkeypatch.setattr(image, "works", lambda other: other == name)
        inspected = digest if name == "buildah" else json.dumps([f"docker.io/library/vllm@{digest}"] if digest else [])
        file = tmp_path / "bin" / name
        file.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *inspect*) echo \'{inspected}\';; esac\n'
        )
        file.chmod(0o755)
        return tmp_path

    return program


@pytest.mark.parametrize("name", ["docker", "podman", "buildah"])
def test_a_base_is_pinned_by_its_digest_and_again_when_the_tag_has_moved(registry, name):
    for digest in (DIGEST, OTHER):
        folder = registry(name, digest)
        assert image.main(["pin", "cuda"]) == 0
        pinned = (folder / "configs" / "pins.toml").read_text()
        assert pinned == f"[image]\n# a comment\ncpu = 'debian:12'\ncuda = 'vllm:v1@{digest}'\n"
        dockerfile = (folder / "docker" / "Dockerfile").read_text()
        assert dockerfile == f"ARG CPU_BASE=debian:12\nARG CUDA_BASE=vllm:v1@{digest}\n"
        asked = (folder / "asked").read_text().splitlines()
        assert asked[-3].endswith("pull vllm:v1")  # the tag, not what it was pinned to
        assert asked[-1].endswith(f"pull vllm:v1@{digest}")


def test_an_image_that_no_registry_has_is_not_pinned(registry, capsys):
    folder = registry("podman", "")
    before = (folder / "configs" / "pins.toml").read_text()
    assert image.main(["pin", "cuda"]) == 1
    assert "vllm:v1 has no digest" in capsys.readouterr().err
    assert (folder / "configs" / "pins.toml").read_text() == before


def test_the_context_holds_what_is_copied_and_nothing_that_was_made(tmp_path):
    image.context(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"configs", "docker", "patches", "scripts"}
    assert not list(tmp_path.rglob("__pycache__"))
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (tmp_path / source).exists(), source


def test_what_the_cuda_build_copies_is_enough_for_patchset(tmp_path):
    """The build runs docker/apply, which needs scripts/patchset, with the few files that are copied for it."""
    for line in re.split(r"^FROM .* AS cuda$", DOCKERFILE, flags=re.MULTILINE)[1].splitlines():
        if line.startswith("COPY "):
            *sources, into = line.split()[1:]
            place = tmp_path / into.removeprefix("/opt/elastic-kv/")
            place.mkdir(parents=True, exist_ok=True) if len(sources) > 1 or into.endswith("/") else None
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", *(ROOT / source for source in sources), place], check=True)
    command = [sys.executable, tmp_path / "scripts" / "patchset", "status", ROOT / ".venv"]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert result.returncode == 0, result.stdout + result.stderr


def test_options_after_two_dashes_go_to_the_builder(monkeypatch):
    ran = []
    monkeypatch.setattr(image, "works", lambda name: name == "buildah")
    monkeypatch.setattr(image, "run", lambda command: ran.append(command))
    assert image.main(["build", "cpu", "--base", "mine", "--", "--volume", "/a:/b:ro"]) == 0
    assert ran[0][-3:-1] == ["--volume", "/a:/b:ro"]
    assert "--build-arg=CPU_BASE=mine" in ran[0]


@pytest.fixture
def cuda_like(tmp_path):
    """A Python tree as in upstream's image: the files that the series touches, unpatched, of a wheel named vllm."""
    site, series = tmp_path / "dist-packages", Project.at(ROOT).series
    for path in [*series.touched(), "vllm/__init__.py"]:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CACHE / "upstream" / path, site / path)
    release = pins()["vllm"]["version"]
    (site / f"vllm-{release}.dist-info").mkdir()
    (site / f"vllm-{release}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {release}\n")
    (site / f"vllm-{release}.dist-info" / "RECORD").write_text("vllm/__init__.py,,\n")
    return site


def apply_step(site):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    return subprocess.run([ROOT / "docker" / "apply"], env=environment, capture_output=True, text=True)


def test_the_patch_step_of_the_cuda_image(cuda_like):
    result = apply_step(cuda_like)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ": applied" in result.stdout
    assert Project.at(ROOT).series.hash() in result.stdout


def test_another_release_in_the_base_ends_the_build(cuda_like):
    (info,) = cuda_like.glob("*.dist-info")
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.31.0\n")
    result = apply_step(cuda_like)
    assert result.returncode != 0
    assert "is vLLM 0.31.0, and the series is for" in result.stderr
