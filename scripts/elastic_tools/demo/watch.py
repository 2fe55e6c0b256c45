"""Samples the server: its cache, its memory as the system reports it, and its requests."""

import asyncio
import re
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from elastic_tools.demo.load import Load

EVERY = 0.25  # seconds
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def tree_memory(pid: int) -> int:
    """Bytes of the process and all it started: the sum of their resident set sizes, as `ps` shows them.

    Pages that they share, such as libraries, count for each of them; they do not change with the cache.
    """
    total = 0
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended meanwhile
            continue
    return total


@dataclass(frozen=True)
class Sample:
    """The server at one moment. Memory is bytes."""

    at: float
    memory: int
    resident_blocks: int
    used_blocks: int
    running: int
    waiting: int
    tokens: int


@dataclass
class Watch:
    """Samples until cancelled. `pid` is None where the server's processes are out of reach."""

    http: httpx.AsyncClient
    load: Load
    pid: int | None
    latest: dict[str, Any]
    begin: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    _requests: tuple[int, int] = (0, 0)

    @property
    def now(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self.begin

    async def run(self) -> None:
        """Takes a sample every quarter of a second.

        The memory is read at that moment. What the server says of itself is its latest answer, which comes
        between two steps of the engine: a long step does not hold up the readings.
        """
        asking = asyncio.create_task(self._ask())
        try:
            while True:
                next_at = time.monotonic() + EVERY
                memory, at = await self.memory(), self.now
                blocks, (running, waiting) = self.latest["blocks"], self._requests
                tokens = self.load.tokens
                self.samples.append(Sample(at, memory, blocks["resident"], blocks["used"], running, waiting, tokens))
                if asking.done():
                    asking.result()
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        finally:
            asking.cancel()

    async def _ask(self) -> None:
        while True:
            next_at = time.monotonic() + EVERY
            state, metrics = await asyncio.gather(self.http.get("/elastic_kv"), self.http.get("/metrics"))
            self.latest = state.raise_for_status().json()
            requests = dict.fromkeys(("running", "waiting"), 0.0)
            for name, value in _GAUGE.findall(metrics.text):
                requests[name] += float(value)
            self._requests = int(requests["running"]), int(requests["waiting"])
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def memory(self) -> int:
        """The server's memory now: its processes', or else what it says of its cache."""
        if self.pid is not None:
            return await asyncio.to_thread(tree_memory, self.pid)
        state = (await self.http.get("/elastic_kv")).raise_for_status().json()
        return sum(rank["reported_bytes"] for rank in state["ranks"])

    async def steady_memory(self) -> int:
        """The median of a few readings: a step that runs takes memory for a moment."""
        readings = []
        for _ in range(7):
            readings.append(await self.memory())
            await asyncio.sleep(0.05)
        return int(statistics.median(readings))

    def tokens_per_second(self, window: float = 2.0) -> float:
        """Tokens that came in lately."""
        if len(self.samples) < 2:
            return 0.0
        last = self.samples[-1]
        first = next(sample for sample in self.samples if sample.at >= last.at - window)
        return (last.tokens - first.tokens) / (last.at - first.at) if last.at > first.at else 0.0

    def line(self, seconds: float) -> str:
        """The state in one line."""
        if not self.samples:
            return "waiting for the first sample"
        last = self.samples[-1]
        return (
            f"{self.now:4.0f}/{seconds:.0f} s  resident {last.resident_blocks:4d} blocks, used {last.used_blocks:4d}  "
            f"memory {last.memory / 2**20:,.0f} MiB  running {last.running:2d}, waiting {last.waiting:2d}  "
            f"{self.tokens_per_second():3.0f} tok/s"
        )
