# SPDX-License-Identifier: Apache-2.0
"""How much memory this process can get on its host: cgroups(7), and the machine itself.

psutil is imported where it is needed, so that the drivers' contract runs on a GPU machine that has torch alone.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Limit, use, and the page cache within it that can be dropped: of the unified hierarchy, and of version 1.
_FILES = (
    ("", ("memory.max", "memory.current", "inactive_file")),
    ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)


def available_bytes(root: Path = _ROOT, process: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that could be taken now, within the machine and every cgroup around this process."""
    import psutil

    limits = [max(0, limit - used) for limit, used in _cgroups(root, process)]
    return min([psutil.virtual_memory().available, *limits])


def total_bytes(root: Path = _ROOT, process: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process could have if nothing else took any."""
    import psutil

    return min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroups(root, process))])


def _cgroups(root: Path, process: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each memory cgroup that this process is in and that has a limit."""
    try:
        lines = process.read_text().splitlines()
    except OSError:  # no cgroups on this system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name, files in _FILES:
            if name not in controllers.split(","):
                continue
            # Seen from inside a container the path may lead out of what is mounted: then the root is ours.
            folder = root / name / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(root / name) and (found := _limit(group, *files)):
                    yield found


def _limit(group: Path, limit_file: str, used_file: str, cache_field: str) -> tuple[int, int] | None:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((group / used_file).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # not a memory cgroup, or the root of the hierarchy, which has no limit
        return None
    return int(limit), used - int(statistics.get(cache_field, 0))
