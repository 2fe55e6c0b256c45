"""Limits of memory cgroups, wherever around the process they are."""

import psutil
import pytest
from vllm.v1.elastic_kv.host_memory import available_bytes, total_bytes

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path):
    """Writes a cgroup's files; the process lies in `path`."""

    def write(group, limit, used, cache, version=2):
        folder = tmp_path / ("memory" if version == 1 else "") / group
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")

    return write


def figures(tmp_path, lines):
    process = tmp_path / "process"
    process.write_text(lines)
    return available_bytes(tmp_path, process), total_bytes(tmp_path, process)


def test_no_limit(cgroup, tmp_path):
    """What is available changes while it is looked at; the whole does not."""
    cgroup("a", "max", 50 * MIB, 0)
    for lines in ("0::/a\n", "0::/\n", "0::/gone\n", "", "3:cpu:/a\n"):
        available, total = figures(tmp_path, lines)
        assert total == psutil.virtual_memory().total
        assert 0 < available <= total
    assert total_bytes(tmp_path, tmp_path / "nothing") == psutil.virtual_memory().total


def test_page_cache_that_can_be_dropped_is_available(cgroup, tmp_path):
    cgroup("a", 100 * MIB, 60 * MIB, 20 * MIB)
    assert figures(tmp_path, "0::/a\n") == (60 * MIB, 100 * MIB)


def test_the_narrowest_of_the_groups_around_counts(cgroup, tmp_path):
    cgroup("slice", 100 * MIB, 90 * MIB, 0)
    cgroup("slice/unit", 200 * MIB, 20 * MIB, 0)
    assert figures(tmp_path, "0::/slice/unit\n") == (10 * MIB, 100 * MIB)


def test_over_the_limit_nothing_is_available(cgroup, tmp_path):
    cgroup("a", 100 * MIB, 120 * MIB, 0)
    assert figures(tmp_path, "0::/a\n") == (0, 100 * MIB)


def test_version_1(cgroup, tmp_path):
    cgroup("docker/box", 100 * MIB, 70 * MIB, 10 * MIB, version=1)
    assert figures(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/box\n") == (40 * MIB, 100 * MIB)


def test_a_path_outside_of_what_is_mounted_is_the_root_here(cgroup, tmp_path):
    """In a container without a cgroup namespace of its own."""
    cgroup("", 100 * MIB, 70 * MIB, 0, version=1)
    assert figures(tmp_path, "4:memory:/host/only\n") == (30 * MIB, 100 * MIB)
