"""The order of it all: references, memory, the storm, the calm, memory again."""

import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tqdm import tqdm

from elastic_tools.storm import reference
from elastic_tools.storm.clients import Clients
from elastic_tools.storm.coverage import lacking
from elastic_tools.storm.memory import ProcessMemory, cache_ranges, snapshot
from elastic_tools.storm.plan import MOST_TIMES, Settings, Sizes, make_prompts
from elastic_tools.storm.resizes import Resize, Resizer, resize
from elastic_tools.storm.stream import Record, session
from elastic_tools.storm.watch import Watch, get_state, wait_until_idle

DRAIN_LIMIT = 300.0  # seconds for the requests that run at the end
IDLE_LIMIT = 60.0
PLAIN_EVERY = 10.0  # seconds between lines where nobody watches


class StormError(Exception):
    """Why there can be no storm."""


@dataclass(frozen=True)
class Target:
    """A server that answers. Without `pid` its processes are out of reach; without `log`, the place of its cache."""

    url: str
    key: str | None = None
    pid: int | None = None
    log: Path | None = None


@dataclass
class Evidence:
    """All that was seen."""

    settings: Settings
    sizes: Sizes
    references: reference.References
    seconds: float = 0.0
    asked: int = 0  # requests
    records: list[Record] = field(default_factory=list)
    resizes_asked: int = 0
    resizes_left_out: int = 0
    resizes: list[Resize] = field(default_factory=list)
    settling: list[Resize] = field(default_factory=list)  # before and after, with nothing else going on
    polls: int = 0
    faults: list[str] = field(default_factory=list)
    unhealthy: list[str] = field(default_factory=list)
    ended_early: str | None = None
    before: list[ProcessMemory] = field(default_factory=list)
    after: list[ProcessMemory] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)  # the state at the end


async def storm(target: Target, settings: Settings) -> Evidence:
    """Runs everything against a server that nobody else uses meanwhile.

    Raises:
        StormError: The server cannot be stormed: it is not elastic, or does not answer before.

    """
    async with session(target.url, target.key) as http:
        try:
            model, longest = await _model(http)
            sizes = await _sizes(http, settings)
            prompts = make_prompts(settings.seed, longest)
            with _bar("references", 2 * len(prompts)) as bar:
                references = await reference.record(http, model, prompts, settings.patience_s, lambda: _step(bar))
            references = await _warm_up(http, model, settings, references)
        except (aiohttp.ClientError, OSError, reference.NoReferenceError) as error:
            raise StormError(str(error)) from error
        evidence = Evidence(settings, sizes, references)
        evidence.before = await _calm(http, target, evidence)
        await _blow(http, Clients(http, model, settings, references.prompts), evidence)
        if evidence.ended_early is None:
            try:
                evidence.after = await _calm(http, target, evidence)
            except (aiohttp.ClientError, OSError, psutil.NoSuchProcess) as error:
                evidence.ended_early = f"the server was gone after the storm: {type(error).__name__}: {error}"
        return evidence


async def _warm_up(
    http: aiohttp.ClientSession, model: str, settings: Settings, references: reference.References
) -> reference.References:
    """The same clients while the size stays.

    Every process then has the buffers that such requests need, and an answer that differs here is no reference.
    """
    clients = Clients(http, model, settings, references.prompts)
    until = time.monotonic() + settings.warm_up_s
    await asyncio.gather(*clients.start(lambda: time.monotonic() < until, "warm-up"))
    for record in clients.records:
        if record.outcome == "failed":
            raise StormError(f"before the storm, {record.ask.name}: {record.why}")
    steady = reference.without_unsteady(references, clients.records)
    if not steady.prompts:
        raise StormError("no prompt has a steady answer while the size stays")
    return steady


async def _blow(http: aiohttp.ClientSession, clients: Clients, evidence: Evidence) -> None:
    settings = evidence.settings
    watch, resizer = Watch(http), Resizer(http, settings, evidence.sizes)
    begin = time.monotonic()

    def go_on() -> bool:
        passed = time.monotonic() - begin
        if passed < settings.seconds:
            return True
        return passed < MOST_TIMES * settings.seconds and bool(lacking(settings, clients.records, resizer.answered))

    with _bar("storm", round(settings.seconds)) as bar:

        def show(state: dict[str, Any]) -> None:
            blocks, passed = state["blocks"], min(settings.seconds, time.monotonic() - begin)
            bar.set_postfix_str(
                f"{len(clients.records)} requests, {clients.failed} failed, {len(resizer.answered)} resizes, "
                f"{blocks['resident']} blocks, {blocks['used']} used",
                refresh=False,
            )
            bar.update(round(passed) - bar.n)

        sending = clients.start(go_on)
        resizing = asyncio.create_task(resizer.run(go_on))
        watching = asyncio.create_task(watch.run(show))
        trouble = [asyncio.create_task(_happens(event)) for event in (clients.too_many_failed, watch.dead)]
        try:
            await asyncio.wait([resizing, watching, *trouble], return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() for task in trouble):
                why = "the server does not answer" if watch.dead.is_set() else f"{clients.failed} requests failed"
                evidence.ended_early = f"{why}, after {time.monotonic() - begin:.0f} s"
            else:
                for task in (resizing, watching):
                    if task.done():
                        task.result()  # an error in our own code is no verdict on the server
                evidence.settling.append(await _to(http, evidence.sizes, evidence.sizes.start))
                await asyncio.wait(sending, timeout=DRAIN_LIMIT)
            evidence.seconds = time.monotonic() - begin
            for task in (*sending, watching):
                if task.done():
                    task.result()
        finally:
            await resizer.cancel()
            for task in (*sending, resizing, watching, *trouble):
                task.cancel()
            await asyncio.gather(*sending, resizing, watching, *trouble, return_exceptions=True)
    evidence.asked, evidence.records = clients.asked, clients.records
    evidence.resizes_asked, evidence.resizes_left_out = resizer.asked, resizer.left_out
    evidence.resizes = resizer.answered
    evidence.polls, evidence.faults, evidence.unhealthy = watch.polls, watch.faults, watch.unhealthy


async def _calm(http: aiohttp.ClientSession, target: Target, evidence: Evidence) -> list[ProcessMemory]:
    """Goes down to the base and back to the size of the start, idle, and reads the memory.

    The same way before and after, so that the cache consists of the same pieces.
    """
    await wait_until_idle(http, IDLE_LIMIT)
    for blocks in (evidence.sizes.base, evidence.sizes.start):
        evidence.settling.append(await _to(http, evidence.sizes, blocks))
    evidence.idle = await wait_until_idle(http, IDLE_LIMIT)
    if target.pid is None:
        return []
    ranges = cache_ranges(target.log) if target.log else {}
    return await asyncio.to_thread(snapshot, target.pid, ranges)


async def _to(http: aiohttp.ClientSession, sizes: Sizes, blocks: int) -> Resize:
    return await resize(http, sizes, {"blocks": blocks}, blocks)


async def _model(http: aiohttp.ClientSession) -> tuple[str, int]:
    async with http.get("/v1/models") as reply:
        if reply.status != 200:
            raise StormError(f"GET /v1/models answers {reply.status}: {(await reply.text())[:200]}")
        model = (await reply.json())["data"][0]
        return model["id"], model["max_model_len"]


async def _sizes(http: aiohttp.ClientSession, settings: Settings) -> Sizes:
    state = await get_state(http)
    blocks, block_bytes = state["blocks"], state["bytes"]["per_block"]
    most = blocks["capacity"]
    if settings.most_bytes is not None:
        most = min(most, settings.most_bytes // block_bytes)
    if most <= blocks["base"]:
        raise StormError(
            f"between the base, {blocks['base']} blocks, and the largest size, {most}, is nothing to resize"
        )
    return Sizes(
        base=blocks["base"],
        start=blocks["resident"],
        most=most,
        capacity=blocks["capacity"],
        chunk=state["chunk_blocks"],
        block_bytes=block_bytes,
        block_tokens=state["block_size"],
    )


async def _happens(event: asyncio.Event) -> None:
    await event.wait()


def _bar(name: str, total: int) -> "tqdm[Any]":
    """A bar on a terminal, and a line now and then elsewhere."""
    interval = 0.1 if sys.stderr.isatty() else PLAIN_EVERY
    return tqdm(total=total, desc=name, bar_format=_BAR, mininterval=interval, maxinterval=interval)


def _step(bar: "tqdm[Any]") -> None:
    bar.update()


_BAR = "{desc}: {n_fmt}/{total_fmt} |{bar:10}|{postfix}"
