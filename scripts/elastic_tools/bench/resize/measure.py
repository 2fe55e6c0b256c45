"""Runs all cases against one server while requests decode."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from elastic_tools.bench import pages
from elastic_tools.bench.resize.cases import Case, Sample, Settings, order
from elastic_tools.bench.resize.copies import copy_ms_per_mib
from elastic_tools.bench.resize.load import Decoders
from elastic_tools.bench.resize.stage import Stage
from elastic_tools.demo import server
from elastic_tools.pins import CACHE
from elastic_tools.storm.stream import session
from elastic_tools.storm.watch import get_state

LOG = CACHE / "bench" / "resize.log"
CAPACITY = (
    "8GiB"  # more than is used: on the host a larger capacity has larger chunks, out of which blocks have to move
)
DECODER_BLOCKS = 9  # at most: 200 tokens and a short prompt, in blocks of 32
WARM_UP_S = 15.0
TAIL_S = 0.2  # after the answer, in which a token may still be late because of it


@dataclass
class Measured:
    """All that was found."""

    model: str
    block_bytes: int
    chunk_blocks: int
    row_bytes: int  # of one block in one layer
    copy_ms_per_mib: float
    versions: dict[str, str]
    samples: list[Sample] = field(default_factory=list)
    pages: list[dict[str, Any]] = field(default_factory=list)  # what attaching and detaching take without an engine
    calls: dict[str, dict[str, int]] = field(default_factory=dict)  # to the driver, for the largest of them


def options(settings: Settings) -> list[str]:
    """For `vllm serve`: as many requests at a time as blocks have to be held."""
    elastic = {"start": f"{settings.floor_mib}MiB", "capacity": CAPACITY, "admin_api": True}
    limits = ["--max-model-len", "1024", "--max-num-seqs", "1024", "--max-num-batched-tokens", "1024"]
    return [*limits, "--elastic-kv-config", json.dumps(elastic)]


def measure(settings: Settings, layers: int) -> Measured:
    """Starts the server, measures everything, ends the server.

    Args:
        settings: What to measure.
        layers: Of the model, to tell how long a row of a block is.

    """
    found = pages.measure()
    calls = pages.driver_calls(pages.SIZES_MIB[-1])
    with server.running(options(settings), LOG, lambda text: None) as (url, _):
        measured = asyncio.run(_measure(url, settings, layers))
    return replace(measured, pages=found, calls=calls)


async def _measure(url: str, settings: Settings, layers: int) -> Measured:
    async with session(url) as http:
        state = await get_state(http)
        async with http.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        async with http.get("/version") as reply:
            version = (await reply.json())["version"]
        block_bytes = state["bytes"]["per_block"]
        measured = Measured(
            model=model,
            block_bytes=block_bytes,
            chunk_blocks=state["chunk_blocks"],
            row_bytes=block_bytes // layers,
            copy_ms_per_mib=copy_ms_per_mib(block_bytes // layers),
            versions={"vllm": version},
        )
        stage = Stage(http, model, settings, block_bytes, state["block_size"], state["chunk_blocks"])
        decoders = Decoders(http, model)
        decoders.start(settings.decoders)
        try:
            await asyncio.sleep(WARM_UP_S)
            for case in tqdm(order(settings), desc="resizes", unit="case", file=sys.stderr):
                measured.samples += await _run(stage, decoders, case)
                decoders.check()
        finally:
            await decoders.stop()
    return measured


async def _run(stage: Stage, decoders: Decoders, case: Case) -> list[Sample]:
    """A grow and a shrink."""
    high = stage.floor + stage.whole(case.mib)
    await stage.resize(stage.floor)
    grown = await _timed(stage, decoders, "grow", case.mib, high)
    holders = await stage.set_up(case)
    try:
        shrunk = await _timed(stage, decoders, case.kind, case.mib, stage.floor)
    finally:
        await stage.resize(high)  # so that what was preempted gets ahead
        await holders.keep_every(0)
        await stage.until_used(stage.settings.decoders * DECODER_BLOCKS, at_least=False)
    return [grown, shrunk]


async def _timed(stage: Stage, decoders: Decoders, what: str, mib: int, blocks: int) -> Sample:
    begin = time.monotonic()
    await asyncio.sleep(stage.settings.quiet_s)
    asked = time.monotonic()
    answer = await stage.resize(blocks)
    answered = time.monotonic()
    await asyncio.sleep(TAIL_S + stage.settings.quiet_s / 2)  # the gap that is open ends
    return Sample(
        what,
        mib,
        answer,
        quiet_gaps_ms=decoders.gaps_ms(begin, asked - TAIL_S),
        gaps_ms=decoders.gaps_ms(asked, answered + TAIL_S),
    )
