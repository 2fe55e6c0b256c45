"""Measures what it costs to attach and detach host memory, against writing the same bytes once."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.layout import Segment

MIB = 2**20
SIZES_MIB = (16, 64, 256, 1024)
SEGMENTS = 30  # layers of the model that the project is tested with
STRIDE = 192 << 10  # bytes of a block in each layer, in float32 at 128 tokens
REPEATS = 9
TIMES = ("prepare", "make", "attach_prepared", "attach_new", "memset", "detach", "release", "detach_scattered")
CALLS = ("create", "map", "unmap", "split", "release")


class CountingDriver(HostPageDriver):
    """Counts the calls that an arena makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def create(self, nbytes: int, address: int = 0) -> int:
        self.calls["create"] += 1
        return super().create(nbytes, address)

    def map(self, address: int, handle: int, usable: bool = True) -> None:
        self.calls["map"] += 1
        super().map(address, handle, usable)

    def unmap(self, handle: int) -> None:
        self.calls["unmap"] += 1
        super().unmap(handle)

    def split(self, handle: int, nbytes: int) -> int:
        self.calls["split"] += 1
        return super().split(handle, nbytes)

    def release(self, handle: int) -> None:
        self.calls["release"] += 1
        super().release(handle)


def measure(sizes_mib: Sequence[int] = SIZES_MIB, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Medians over ``repeats`` rounds, each of which goes through all sizes: a dict for each size, times in ms."""
    arenas = {size: _arena(HostPageDriver(), size) for size in sizes_mib}
    rounds: dict[int, list[dict[str, float]]] = {size: [] for size in sizes_mib}
    try:
        for _ in range(repeats):
            for size, arena in arenas.items():
                rounds[size].append(_round(arena))
    finally:
        for arena in arenas.values():
            arena.close()
    return [_summary(size, rounds[size]) for size in sizes_mib]


def driver_calls(size_mib: int) -> dict[str, dict[str, int]]:
    """The calls to the driver for one attach and one detach of all chunks, and of every second one."""
    driver = CountingDriver()
    arena = _arena(driver, size_mib)
    found = {}
    try:
        for name, call, chunks in (
            ("attach", arena.attach, _chunks(arena)),
            ("detach every second", arena.detach, _chunks(arena)[::2]),
            ("attach every second", arena.attach, _chunks(arena)[::2]),
            ("detach", arena.detach, _chunks(arena)),
        ):
            arena.settle(60.0)
            driver.calls.clear()
            call(chunks)
            arena.settle(60.0)
            found[name] = dict(driver.calls)
    finally:
        arena.close()
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """What ``measure`` found, as a Markdown table."""
    lines = [
        "| MiB | made in background | attach, pages made | attach from nothing | memset | detach "
        "| released in background | detach every second chunk | memset / attach | memset / detach |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        names = ("make", "attach_prepared", "attach_new", "memset", "detach", "release", "detach_scattered")
        cells = [f"{one['mib']:.0f}", *(f"{one[f'{name}_ms']:.2f} ms" for name in names)]
        cells += [f"{one['memset_per_attach']:.0f}x", f"{one['memset_per_detach']:.0f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def calls_table(size_mib: int, found: dict[str, dict[str, int]]) -> str:
    """What ``driver_calls`` found, as a Markdown table."""
    lines = [
        f"| calls to the driver, {size_mib} MiB | {' | '.join(CALLS)} |",
        f"|---{'|---' * len(CALLS)}|",
        *(f"| {name} | {' | '.join(str(calls.get(call, 0)) for call in CALLS)} |" for name, calls in found.items()),
    ]
    return "\n".join(lines)


def _arena(driver: HostPageDriver, size_mib: int) -> KVArena:
    """Room for ``size_mib`` behind a base of one chunk, so that addresses are as odd as they are in an engine."""
    chunks = 1 + round(size_mib * MIB / (SEGMENTS * STRIDE))
    arena = KVArena(driver, [Segment(number * STRIDE * chunks, STRIDE) for number in range(SEGMENTS)], 1, chunks)
    arena.attach([0])
    return arena


def _chunks(arena: KVArena) -> range:
    return range(1, arena.capacity_chunks)


def _round(arena: KVArena) -> dict[str, float]:
    chunks = _chunks(arena)
    took = {
        "prepare": _time(lambda: arena.prepare(chunks)),
        "make": _time(lambda: arena.settle(600.0)),
        "attach_prepared": _time(lambda: arena.attach(chunks)),
        "memset": _time(lambda: _write(arena)),
        "detach": _time(lambda: arena.detach(chunks)),
        "release": _time(lambda: arena.settle(600.0)),
        "attach_new": _time(lambda: arena.attach(chunks)),
    }
    took["detach_scattered"] = _time(lambda: arena.detach(chunks[::2]))
    arena.detach(chunks[1::2])
    arena.settle(600.0)
    return took


def _write(arena: KVArena) -> None:
    """Write the chunks' bytes, segment by segment, with the C library's memset."""
    for segment in arena.segments:
        first = arena.address + segment.offset + segment.stride
        ctypes.memset(first, 1, segment.stride * (arena.capacity_chunks - 1))


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1000


def _summary(size_mib: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    chunks = round(size_mib * MIB / (SEGMENTS * STRIDE))
    found: dict[str, Any] = {"mib": chunks * SEGMENTS * STRIDE / MIB, "chunks": chunks, "rounds": len(rounds)}
    for name in TIMES:
        found[f"{name}_ms"] = median(one[name] for one in rounds)
        found[f"{name}_ms_worst"] = max(one[name] for one in rounds)
    found["memset_per_attach"] = found["memset_ms"] / found["attach_prepared_ms"]
    found["memset_per_detach"] = found["memset_ms"] / found["detach_ms"]
    return found
