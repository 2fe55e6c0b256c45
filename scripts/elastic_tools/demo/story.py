"""What happens when: waves of requests, and resizes before, during and after them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from elastic_tools.demo.load import Load
from elastic_tools.demo.watch import Watch


@dataclass(frozen=True)
class Act:
    """One thing that happens. Times are parts of the whole, sizes parts of the capacity."""

    at: float
    what: str
    clients: int | None = None
    size: float | None = None


STORY = (
    Act(0.00, "a first wave at the size the server starts with", clients=6),
    Act(0.12, "grow before a wave", size=0.5),
    Act(0.14, "a wave of 16", clients=16),
    Act(0.26, "grow while requests run", size=1.0, clients=24),
    Act(0.38, "shrink while requests run", size=0.6),
    Act(0.48, "the wave ends", clients=0),
    Act(0.60, "shrink after the wave", size=0.125),
    Act(0.64, "grow with the next wave", size=0.75, clients=20),
    Act(0.77, "shrink below what the requests use", size=0.05),
    Act(0.84, "grow again", size=0.4),
    Act(0.92, "the last wave ends", clients=0),
)


@dataclass
class Resize:
    """One resize: when, what was asked, what came of it, and the server's memory before and after."""

    what: str
    started: float
    ended: float
    asked_blocks: int
    status: int
    answer: dict[str, Any]
    memory_before: int
    memory_after: int


@dataclass
class Teller:
    """Plays the story against a server."""

    http: httpx.AsyncClient
    load: Load
    watch: Watch
    capacity: int
    say: Callable[[str], None]
    resizes: list[Resize] = field(default_factory=list)

    async def play(self, seconds: float) -> None:
        """Every act at its time, then the end of the load, then the size from before."""
        before = self.watch.latest["blocks"]["resident"]
        for act in STORY:
            await asyncio.sleep(max(0.0, self.watch.begin + act.at * seconds - time.monotonic()))
            if act.size is not None:
                await self.resize(act.what, max(1, round(act.size * self.capacity)))
            if act.clients is not None:
                self.load.wanted = act.clients
                self.say(f"{self.watch.now:5.1f} s  {act.what}: {act.clients} requests at a time")
        await self.load.drain(limit_s=300)
        await asyncio.sleep(max(1.0, self.watch.begin + 0.97 * seconds - time.monotonic()))
        await self.resize("back to the size of the start, idle", before)
        await asyncio.sleep(max(1.0, self.watch.begin + seconds - time.monotonic()))

    async def resize(self, what: str, blocks: int) -> None:
        """Asks for a size and waits for the answer."""
        base = self.watch.latest["blocks"]["base"]
        blocks = max(blocks, base)
        memory_before, started = await self.watch.steady_memory(), self.watch.now
        reply = await self.http.post("/elastic_kv/resize", json={"blocks": blocks}, timeout=180)
        ended, memory_after = self.watch.now, await self.watch.steady_memory()
        answer = reply.json() if reply.status_code in (200, 409) else {"outcome": "failed", "reason": reply.text}
        if "to" in answer:
            self.watch.latest["blocks"]["resident"] = answer["to"]
        resize = Resize(what, started, ended, blocks, reply.status_code, answer, memory_before, memory_after)
        self.resizes.append(resize)
        if "to" not in answer:
            self.say(f"{started:5.1f} s  {what}: HTTP {reply.status_code}: {answer['reason']}")
            return
        because = f" ({answer['reason']})" if answer["reason"] else ""
        self.say(
            f"{started:5.1f} s  {what}: {answer['from']} to {blocks} blocks asked, {answer['to']} had, "
            f"{answer['outcome']}{because}; "
            f"{answer['duration_ms']:.0f} ms, of which the engine stood still {answer['pause_ms']:.0f} ms"
        )
