"""Brings the cache into the state that a case needs."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from elastic_tools.bench.resize.cases import MIB, Case, Settings
from elastic_tools.bench.resize.load import Holders, LoadError, fill_prefixes
from elastic_tools.storm.watch import get_state

STAGE_LIMIT = 180.0  # seconds to get there


@dataclass
class Stage:
    """A server, and the sizes of its cache in blocks."""

    http: aiohttp.ClientSession
    model: str
    settings: Settings
    block_bytes: int
    block_tokens: int
    chunk: int

    @property
    def floor(self) -> int:
        """What a shrink leaves."""
        return self.whole(self.settings.floor_mib)

    def whole(self, mib: int) -> int:
        """Blocks of so many MiB, in whole chunks."""
        return max(1, mib * MIB // self.block_bytes // self.chunk) * self.chunk

    async def resize(self, blocks: int) -> dict[str, Any]:
        """Asks for a size; the answer, with what was wanted."""
        async with self.http.post("/elastic_kv/resize", json={"blocks": blocks}) as reply:
            answer: dict[str, Any] = await reply.json()
        if reply.status not in (200, 409):
            raise LoadError(f"a resize was answered with HTTP {reply.status}: {answer}")
        return answer | {"wanted": blocks}

    async def set_up(self, case: Case) -> Holders:
        """From a cache of `floor` plus the case's size, with the decoders running, to what the case is about."""
        holders, more = Holders(self.http, self.model), self.whole(case.mib)
        used = (await get_state(self.http))["blocks"]["used"]
        room = self.floor + more - used
        if case.kind == "cached":
            await fill_prefixes(self.http, self.model, room, self.block_tokens)
        elif case.kind == "moves":
            # Every block is taken, then all are let go but one of each chunk, or fewer where the floor has no room for
            # so many.
            holders.add(room - 2 * self.chunk)
            await self.until_used(used + room * 0.8, at_least=True)
            await holders.keep_every(max(self.chunk, -(-room // max(1, (self.floor - used) // 2))))
            await self.until_used(used + room * 0.5, at_least=False)
        elif case.kind == "preemption":
            # More is in use than the floor has room for.
            holders.add(min(room, self.floor + more // 2))
            await self.until_used(self.floor + more * 0.3, at_least=True)
        return holders

    async def until_used(self, blocks: float, at_least: bool) -> None:
        """Waits until so many blocks are in use, or no more than that."""
        deadline = time.monotonic() + STAGE_LIMIT
        while time.monotonic() < deadline:
            used = (await get_state(self.http))["blocks"]["used"]
            if (used >= blocks) if at_least else (used <= blocks):
                return
            await asyncio.sleep(0.2)
        raise LoadError(f"{used} blocks are used after {STAGE_LIMIT:.0f} s, where {blocks:.0f} were expected")
