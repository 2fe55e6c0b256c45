"""The environment maker: what it would install, and that it does neither too much nor too little."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.pins import ROOT, pins
from elastic_tools.setup import __main__ as command
from elastic_tools.setup import packages, patches, places, steps
from elastic_tools.setup.show import SetupError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty checkout for ``set_up``, with steps that only note that they ran."""
    for name, path in {
        "VENV": tmp_path / ".venv",
        "STAMP": tmp_path / ".venv" / "elastic-setup.json",
        "PYTHON": tmp_path / ".venv" / "bin" / "python",
        "CACHE": tmp_path / ".cache",
        "UPSTREAM": tmp_path / ".cache" / "upstream",
    }.items():
        monkeypatch.setattr(places, name, path)
    return tmp_path


class Recorder:
    """Stands for the real steps."""

    def __init__(self, place, monkeypatch):
        self.ran = []
        self.keys = {"venv": "v", "torch": "t", "engine": "e", "tools": "d"}
        self.broken = ""
        self.place = place
        monkeypatch.setattr(command, "steps", lambda engine, dev: [self.step(name) for name in self.keys])
        monkeypatch.setattr(command, "apply_patches", lambda: self.ran.append("patches"))
        monkeypatch.setattr(command, "revert_patches", lambda: self.ran.append("revert"))
        monkeypatch.setattr(command, "keep_upstream", self.copy)

    def step(self, name):
        return steps.Step(name, self.keys[name], lambda: self.run(name))

    def run(self, name):
        if name == self.broken:
            raise SetupError("broken")
        self.ran.append(name)
        places.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        places.PYTHON.touch()

    def copy(self):
        self.ran.append("copy")
        (places.UPSTREAM / "vllm").mkdir(parents=True, exist_ok=True)
        (places.UPSTREAM / "vllm" / "__init__.py").touch()

    def set_up(self):
        self.ran = []
        command.set_up("cpu")
        return self.ran


@pytest.fixture
def made(place, monkeypatch):
    return Recorder(place, monkeypatch)


def test_second_run_only_looks_at_the_patches(made):
    assert made.set_up() == ["venv", "torch", "revert", "engine", "tools", "revert", "copy", "patches"]
    assert made.set_up() == ["patches"]


def test_run_that_broke_goes_on_where_it_broke(made):
    made.broken = "engine"
    with pytest.raises(SetupError):
        made.set_up()
    assert "venv" in made.ran
    assert "engine" not in made.ran
    made.broken = ""
    assert made.set_up() == ["revert", "engine", "tools", "revert", "copy", "patches"]


def test_changed_tools_leave_the_engine_alone(made):
    made.set_up()
    made.keys["tools"] = "other"
    assert made.set_up() == ["tools", "patches"]


def test_changed_engine_lock_takes_the_patches_out_first(made):
    made.set_up()
    made.keys["engine"] = "other"
    assert made.set_up() == ["revert", "engine", "tools", "revert", "copy", "patches"]


def test_other_engine_starts_anew(made):
    made.set_up()
    made.keys["venv"] = "other"
    assert made.set_up()[0] == "venv"
    assert "torch" in made.ran


def test_environment_of_something_else_is_made_anew(made, place):
    made.set_up()
    places.STAMP.write_text("[not ours")
    assert made.set_up()[0] == "venv"


def test_lost_unpatched_copy_is_made_from_reverted_files(made):
    made.set_up()
    (places.UPSTREAM / "vllm" / "__init__.py").unlink()
    assert made.set_up() == ["revert", "copy", "patches"]


@pytest.mark.parametrize(
    ("status", "verbs"),
    [(0, ["status"]), (3, ["status", "apply"]), (4, ["status", "apply"]), (6, ["status", "revert", "apply"])],
)
def test_patches_by_what_the_engine_carries(monkeypatch, status, verbs):
    said = []

    def patchset(verb):
        said.append(verb)
        return subprocess.CompletedProcess([], status if verb == "status" else 0, "", "")

    monkeypatch.setattr(patches, "patchset", patchset)
    patches.apply_patches()
    assert said == verbs


def test_hand_made_changes_to_the_engine_are_kept(monkeypatch):
    result = subprocess.CompletedProcess([], patches.MODIFIED, "  vllm/v1/core/block_pool.py\n", "")
    monkeypatch.setattr(patches, "patchset", lambda verb: result)
    with pytest.raises(SetupError, match=r"block_pool\.py"):
        patches.apply_patches()


# --- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "cuda", "dev"])
def test_every_entry_of_a_lock_has_a_hash(name):
    entries = (places.LOCKS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    assert entries
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_locks_say_what_the_pins_say():
    pin = pins()
    for engine, chosen in pin["engine"].items():
        versions = packages.locked(places.LOCKS / "dev.txt") | packages.locked(ROOT / "configs" / chosen["lock"])
        assert versions[chosen["distribution"]] == chosen["version"] == pin["vllm"]["version"], engine
        wanted = pin["packages"]
        assert {name: versions.get(name, version) for name, version in wanted.items()} == wanted, engine


def test_cpu_lock_leaves_out_what_does_not_fit_its_torch():
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(packages.locked(places.LOCKS / "cpu.txt"))


def test_tools_never_change_the_cpu_engine():
    assert not set(packages.locked(places.LOCKS / "dev.txt")) & set(packages.locked(places.LOCKS / "cpu.txt"))


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_metadata_wheel_names_the_engine_and_holds_no_code(tmp_path):
    wheel = steps.metadata_wheel(tmp_path, "0.32.0+cpu")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel]
    subprocess.run(command, check=True)
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert list(found.entry_points) == []
    assert [path.name for path in target.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_unpatched_copy_survives_patching(place, monkeypatch):
    package = place / "site" / "vllm"
    (package / "__pycache__").mkdir(parents=True)
    (package / "a.py").write_text("upstream\n")
    monkeypatch.setattr(places, "site_packages", lambda: place / "site")
    patches.keep_upstream()
    patches.keep_upstream()  # again, over an older one

    (package / "new").write_text("patched\n")
    (package / "new").replace(package / "a.py")
    assert (places.UPSTREAM / "vllm" / "a.py").read_text() == "upstream\n"
    assert [path.name for path in (places.UPSTREAM / "vllm").iterdir()] == ["a.py"]
    assert [path.name for path in places.UPSTREAM.iterdir()] == ["vllm"]


def fake_python(place, script):
    """An interpreter whose pip is ``script``."""
    places.PYTHON.parent.mkdir(parents=True)
    places.CACHE.mkdir()
    places.PYTHON.write_text(f"#!/bin/bash\n{script}\n")
    places.PYTHON.chmod(0o755)


def test_broken_download_is_tried_again(place, monkeypatch):
    monkeypatch.setattr(packages.time, "sleep", lambda seconds: None)
    fake_python(place, 'echo x >> tries; [ "$(wc -l < tries)" -ge 3 ] || { echo "ERROR: reset by peer"; exit 1; }')
    packages.pip("install", "thing")
    assert len((places.CACHE / "tries").read_text().split()) == 3


def test_download_that_stays_broken_is_told(place, monkeypatch):
    monkeypatch.setattr(packages.time, "sleep", lambda seconds: None)
    fake_python(place, 'echo "ERROR: reset by peer"; exit 1')
    with pytest.raises(SetupError, match="reset by peer"):
        packages.pip("install", "thing")


def test_wrong_hash_is_not_tried_again(place):
    fake_python(place, 'echo x >> tries; echo "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"; exit 1')
    with pytest.raises(SetupError, match="does not have the hash"):
        packages.pip("install", "thing")
    assert (places.CACHE / "tries").read_text() == "x\n"


def test_half_installed_package_is_installed_again(place, monkeypatch):
    monkeypatch.setattr(places, "site_packages", lambda: place)
    for name, file in [("whole", "INSTALLER"), ("half", "METADATA")]:
        (place / f"{name}-1.dist-info").mkdir()
        (place / f"{name}-1.dist-info" / file).touch()
    fake_python(place, "exit 0")
    packages.pip("install", "half")
    assert [path.name for path in place.glob("*.dist-info")] == ["whole-1.dist-info"]


def test_interruption_stops_pip(place, monkeypatch):
    fake_python(place, "exec sleep 60")
    started = []

    @contextlib.contextmanager
    def interrupted(position):
        raise KeyboardInterrupt
        yield

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(packages, "progress", interrupted)
    monkeypatch.setattr(packages.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        packages.run_pip([str(places.PYTHON)], 0)
    assert started[0].returncode == -signal.SIGTERM


def test_torch_comes_from_its_own_index_only_where_the_others_lack_it(monkeypatch):
    calls = []

    def pip(*arguments, total=0):
        calls.append(arguments)
        if "--extra-index-url" not in arguments:
            raise packages.NoSuchDistribution("none")

    monkeypatch.setattr(steps, "pip", pip)
    steps.install_torch({"torch": "2.0+cpu", "torch_index": "https://index.invalid"})
    assert [("https://index.invalid" in call, call[-1]) for call in calls] == [
        (False, "torch==2.0+cpu"),
        (True, "torch==2.0+cpu"),
    ]


@pytest.mark.parametrize(
    ("lines", "position"),
    [
        ([], "starting"),
        (["Collecting numpy==2.3.5"], "1 of 9: numpy"),
        (["Collecting numpy==2.3.5", "  Downloading numpy-2.3.5-cp311-x.whl (16.9 MB)"], "1 of 9: numpy 16.9 MB"),
        (["Collecting a==1", "  Using cached https://host/a/a_b-1.tar.gz"], "1 of 9: a_b"),
    ],
)
def test_position_of_pip(lines, position):
    assert packages.pip_position(lines, 9) == position


def test_old_python_is_refused_in_one_sentence(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = subprocess.run(
        [ROOT / "scripts" / "setup"], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_unpatched_engine_can_be_run_beside_the_patched_one():
    if Path(sys.prefix) != places.VENV:
        pytest.skip("needs .venv; run scripts/test")
    code = (
        "import importlib.util, importlib.metadata, json; "
        "print(json.dumps([importlib.util.find_spec('vllm').origin, importlib.metadata.version('vllm')]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(places.UPSTREAM)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    origin, version = json.loads(result.stdout)
    assert Path(origin) == places.UPSTREAM / "vllm" / "__init__.py"
    assert version.split("+")[0] == pins()["vllm"]["version"]
    assert not (places.UPSTREAM / "vllm" / "v1" / "elastic_kv").exists()
