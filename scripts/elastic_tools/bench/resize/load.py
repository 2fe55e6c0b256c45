"""The clients of the benchmark: some stream all the time, others only hold blocks."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import aiohttp

from elastic_tools.storm.plan import Ask, Prompt
from elastic_tools.storm.stream import ask

PATIENCE = 120.0  # seconds without a token
DECODE_TOKENS = 200  # of one request of a decoder
HOLD_TOKENS = 900  # of a request that is there to hold blocks, and is ended before
_numbers = itertools.count()


class LoadError(Exception):
    """A request failed, so that the figures would mean nothing."""


@dataclass
class Decoders:
    """Requests that decode all the time. `gaps` are all times between two tokens, each with its end."""

    http: aiohttp.ClientSession
    model: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self, count: int) -> None:
        self._tasks = [asyncio.create_task(self._decode(index)) for index in range(count)]

    def check(self) -> None:
        """Raises what ended a client."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Of the gaps that lie at least partly between the two times."""
        return [1000 * length for at, length in self.gaps if at > begin and at - length < end]

    async def _decode(self, index: int) -> None:
        tokens = DECODE_TOKENS - 20 * index  # so that they do not all end at once
        while True:
            prompt = Prompt("decoder", f"Note {next(_numbers)}: the keeper of the lighthouse wrote", tokens)
            record = await ask(self.http, self.model, Ask(index, 0, "greedy", prompt, tokens), PATIENCE, self._gap)
            if record.outcome != "done":
                raise LoadError(f"a request failed: {record.why}")
            tokens = DECODE_TOKENS

    def _gap(self, length: float) -> None:
        self.gaps.append((time.monotonic(), length))


@dataclass
class Holders:
    """Requests that hold blocks until they are let go: a block each, at first."""

    http: aiohttp.ClientSession
    model: str
    _tasks: list["asyncio.Task[object]"] = field(default_factory=list)

    def add(self, count: int) -> None:
        for _ in range(count):
            prompt = Prompt("holder", f"Line {next(_numbers)}", HOLD_TOKENS)
            wanted = Ask(-1, len(self._tasks), "greedy", prompt, HOLD_TOKENS)
            self._tasks.append(asyncio.create_task(ask(self.http, self.model, wanted, PATIENCE)))

    async def keep_every(self, nth: int) -> None:
        """Lets all go but every nth, so that those that stay lie scattered. 0: lets all go."""
        kept = self._tasks[::nth] if nth else []
        gone = set(self._tasks).difference(kept)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        self._tasks = kept


async def fill_prefixes(http: aiohttp.ClientSession, model: str, blocks: int, block_tokens: int) -> None:
    """Leaves about that many blocks as cached prefixes that no request uses."""
    blocks_each = 24
    # "word 17 " is two tokens or a little more, so that the prompt fills its blocks.
    words = blocks_each * block_tokens // 4
    few = asyncio.Semaphore(4)

    async def one() -> None:
        start = next(_numbers)
        text = " ".join(f"{start} word {number}" for number in range(words // 2))
        async with few:
            wanted = Ask(-1, 0, "greedy", Prompt("prefix", text, 1), 1)
            record = await ask(http, model, wanted, PATIENCE)
        if record.outcome != "done":
            raise LoadError(f"a request failed: {record.why}")

    await asyncio.gather(*(one() for _ in range(-(-blocks // blocks_each))))
