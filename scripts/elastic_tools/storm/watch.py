"""Polls the state and the health of the server, and checks that the state adds up."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

EVERY = 0.2  # seconds
LIMIT = aiohttp.ClientTimeout(total=60)
MOST_ERRORS = 10  # polls without an answer in a row: the server is gone
_GAUGE = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


def inconsistencies(state: dict[str, Any]) -> list[str]:
    """What does not add up in an answer of `GET /elastic_kv`."""
    blocks, size = state["blocks"], state["bytes"]
    found = []
    if any(count < 0 for count in blocks.values()):
        found.append(f"a negative count: {blocks}")
    if not blocks["base"] <= blocks["resident"] <= blocks["capacity"]:
        found.append(f"a size outside base and capacity: {blocks}")
    # The null block belongs to none of the three.
    if blocks["free"] + blocks["used"] + blocks["cached"] != blocks["resident"] - 1:
        found.append(f"free + used + cached is not resident - 1: {blocks}")
    if size["resident"] != blocks["resident"] * size["per_block"]:
        found.append(f"bytes and blocks disagree: {blocks}, {size}")
    return found


def idle_inconsistencies(state: dict[str, Any]) -> list[str]:
    """What does not add up once nothing runs: then chunks are whole, and no request has blocks."""
    found, blocks = inconsistencies(state), state["blocks"]
    if blocks["resident"] % state["chunk_blocks"]:
        found.append(f"no whole number of chunks: {blocks}, {state['chunk_blocks']} blocks a chunk")
    if blocks["used"]:
        found.append(f"{blocks['used']} blocks are used, and no request runs")
    resident = state["bytes"]["resident"]
    for rank in state["ranks"]:
        if not rank["resident_bytes"] == rank["reported_bytes"] == resident:
            found.append(f"rank {rank['rank']} does not hold {resident} bytes: {rank}")
    return found


@dataclass
class Watch:
    """Polls until cancelled."""

    http: aiohttp.ClientSession
    polls: int = 0
    faults: list[str] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)
    latest: dict[str, Any] = field(default_factory=dict)
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, show: Callable[[dict[str, Any]], None]) -> None:
        """Looks every fifth of a second."""
        errors = 0
        while True:
            turn = time.monotonic() + EVERY
            try:
                async with self.http.get("/health", timeout=LIMIT) as reply:
                    if reply.status != 200:
                        self.unhealthy.append(f"/health answers {reply.status}")
                self.latest = await get_state(self.http)
                self.faults += inconsistencies(self.latest)
                show(self.latest)
                errors = 0
            except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
                errors += 1
                self.unhealthy.append(f"no answer: {type(error).__name__}: {error}")
                if errors >= MOST_ERRORS:
                    self.dead.set()
            self.polls += 1
            await asyncio.sleep(max(0.0, turn - time.monotonic()))


async def get_state(http: aiohttp.ClientSession) -> dict[str, Any]:
    """`GET /elastic_kv`."""
    async with http.get("/elastic_kv", timeout=LIMIT) as reply:
        if reply.status != 200:
            raise aiohttp.ClientError(f"GET /elastic_kv answers {reply.status}: {(await reply.text())[:200]}")
        state: dict[str, Any] = await reply.json()
        return state


async def wait_until_idle(http: aiohttp.ClientSession, limit_s: float) -> dict[str, Any]:
    """Waits until the engine has no request and every rank has been measured since. Returns the state, idle or not."""
    deadline = time.monotonic() + limit_s
    while True:
        async with http.get("/metrics", timeout=LIMIT) as reply:
            open_requests = sum(float(value) for value in _GAUGE.findall(await reply.text()))
        state = await get_state(http)
        if (not open_requests and not idle_inconsistencies(state)) or time.monotonic() > deadline:
            return state | {"open_requests": int(open_requests)}
        await asyncio.sleep(0.3)
