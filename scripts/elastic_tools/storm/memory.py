"""What the operating system says of the server's processes."""

import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

READINGS = 5  # of which the median counts: a process takes and gives back a little at any time
_RANGE = re.compile(r"pid=(\d+)\).*reserved (\d+) bytes in \d+ segments at (0x[0-9a-f]+)")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class ProcessMemory:
    """One process. `cache_bytes` is None where it has no cache, or it is not known where that lies."""

    pid: int
    name: str
    worker: bool
    rss: int
    descriptors: int
    mappings: int
    cache_bytes: int | None


def cache_ranges(log: Path) -> dict[int, tuple[int, int]]:
    """First and last address of the cache in each worker process, as the server logged them at start-up."""
    found = {}
    for pid, nbytes, first in _RANGE.findall(log.read_text(errors="replace")):
        found[int(pid)] = (int(first, 16), int(first, 16) + int(nbytes))
    return found


def resident_in(pid: int, first: int, last: int) -> int:
    """Bytes of memory behind a range of addresses of a process."""
    resident, inside = 0, False
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            if mapping := _MAPPING.match(line):
                start, end = (int(address, 16) for address in mapping.groups())
                inside = first <= start and end <= last
            elif inside and line.startswith("Rss:"):
                resident += int(line.split()[1]) << 10
    return resident


def snapshot(root: int, ranges: dict[int, tuple[int, int]]) -> list[ProcessMemory]:
    """Every process of a server, by process id. Takes about a second."""
    processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    names = {process.pid: process.name() for process in processes}
    # vLLM names its processes. An engine without worker processes computes in its core.
    role = "Worker" if any("Worker" in name for name in names.values()) else "EngineCore"
    readings: dict[int, list[int]] = {process.pid: [] for process in processes}
    for _ in range(READINGS):
        for process in processes:
            readings[process.pid].append(process.memory_info().rss)
        time.sleep(0.1)
    return [
        ProcessMemory(
            pid=process.pid,
            name=names[process.pid],
            worker=role in names[process.pid] or process.pid in ranges,
            rss=int(statistics.median(readings[process.pid])),
            descriptors=process.num_fds(),
            mappings=len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
            cache_bytes=resident_in(process.pid, *ranges[process.pid]) if process.pid in ranges else None,
        )
        for process in sorted(processes, key=lambda process: process.pid)
    ]
