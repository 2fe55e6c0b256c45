"""The command line: `scripts/demo`."""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from elastic_tools.demo import picture, report, server
from elastic_tools.demo.live import Live
from elastic_tools.demo.load import Load
from elastic_tools.demo.story import Teller
from elastic_tools.demo.verdict import judge
from elastic_tools.demo.watch import EVERY, Watch
from elastic_tools.pins import CACHE, ROOT

LOG = CACHE / "demo" / "server.log"
ELASTIC = {"start": "128MiB", "capacity": "1GiB", "admin_api": True}
# Short steps: a resize takes place between two of them, and the memory that a step takes for itself stays small.
OPTIONS = ("--max-model-len", "2048", "--max-num-batched-tokens", "256", "--elastic-kv-config", json.dumps(ELASTIC))
MOST_FAILURES = 5  # the demonstration ends there: the server is gone, or nearly
REQUEST_LIMIT = 300.0  # seconds for one request, which may have to wait for a cache that was made small


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Starts a server, sends it chat requests in waves, grows and shrinks its KV cache meanwhile, and "
        "draws what the memory did. Fails if a request failed or the memory did not follow.",
    )
    parser.add_argument("--seconds", type=float, default=90, help="how long the load runs (default: %(default)s)")
    parser.add_argument("--url", help="use the server at this address; VLLM_API_KEY holds its key, if it has one")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "demo.png", help="the picture")
    chosen = parser.parse_args()
    if not 10 <= chosen.seconds <= 3600:
        parser.error("--seconds takes 10 to 3600")
    if chosen.output.suffix not in (".png", ".svg", ".pdf"):
        parser.error("--output takes a file that ends in .png, .svg or .pdf")
    return chosen


async def tell(url: str, pid: int | None, chosen: argparse.Namespace, live: Live) -> int:
    """Runs the demonstration against a server that answers, and reports it. Returns the exit status."""
    key = os.environ.get("VLLM_API_KEY") or "none"
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120, limits=limits) as http,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=REQUEST_LIMIT, max_retries=0) as client,
    ):
        answer = await http.get("/elastic_kv")
        if answer.status_code != 200:
            raise server.ServerError(f"GET {url}/elastic_kv answers {answer.status_code}: its KV cache is not elastic")
        state, model = answer.json(), (await client.models.list()).data[0].id
        version = (await http.get("/version")).json()["version"]
        load = Load(client, model)
        watch = Watch(http, load, pid, state)
        teller = Teller(http, load, watch, state["blocks"]["capacity"], live.say)
        live.say(f"{model} on vLLM {version}: {chosen.seconds:.0f} s of load at {url}")

        async def show() -> None:
            while True:
                live.show(watch.line(chosen.seconds))
                if len(load.failures) >= MOST_FAILURES:
                    raise server.ServerError(f"{len(load.failures)} requests failed, the last one: {load.failures[-1]}")
                await asyncio.sleep(EVERY)

        background = [asyncio.create_task(work) for work in (load.run(), watch.run(), show())]
        story = asyncio.create_task(teller.play(chosen.seconds))
        try:
            await asyncio.wait([story, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()
            await story
        finally:
            for task in (story, *background):
                task.cancel()
            await asyncio.gather(story, *background, return_exceptions=True)
            await load.cancel()

    ranks = len(state["ranks"])
    block_bytes = state["bytes"]["per_block"] * ranks
    verdict = judge(teller.resizes, watch.samples, block_bytes, state["chunk_blocks"])
    memory_name = (
        "memory of the server's processes (RSS)" if pid is not None else "memory of the cache, as the server reports it"
    )
    title = f"{model} on vLLM {version}, with a KV cache that grows and shrinks. Dashed: resizes and the size asked for"
    picture.draw(watch.samples, teller.resizes, block_bytes, chosen.output, title, memory_name)
    settings = {
        "model": model,
        "server": shlex.join(OPTIONS) if chosen.url is None else "a running server",
        "memory": memory_name,
        "block_size": state["block_size"],
        "block_bytes": block_bytes,
        "capacity_blocks": state["blocks"]["capacity"],
    }
    data = chosen.output.with_suffix(".json")
    command = shlex.join(["scripts/demo", *sys.argv[1:]])
    report.write_json(data, command, settings, load, verdict, watch.samples, version)
    report.print_summary(load, verdict, watch.samples, memory_name)
    live.say(f"wrote {chosen.output} and {data}")
    found = report.problems(load, verdict, watch.samples)
    for problem in found:
        live.say(f"FAILED: {problem}")
    if not found:
        live.say("every request was answered, and the memory followed every resize")
    return bool(found)


@contextlib.contextmanager
def address(chosen: argparse.Namespace, live: Live) -> Iterator[tuple[str, int | None]]:
    """The server to use, and its process where that can be told."""
    if chosen.url is not None:
        url = chosen.url.rstrip("/")
        yield url, server.listener(url)
        return
    live.say(f"starting a server; its log is {LOG.relative_to(ROOT)}")
    with server.running(OPTIONS, LOG, live.show) as (url, pid):
        yield url, pid


def main() -> int:
    """Runs it all."""
    chosen = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through every `finally`
    with Live() as live:
        try:
            with address(chosen, live) as (url, pid):
                return asyncio.run(tell(url, pid, chosen, live))
        except (server.ServerError, httpx.HTTPError) as error:
            live.say(f"FAILED: {error or type(error).__name__}")
            return 1
        except KeyboardInterrupt:
            live.say("interrupted")
            return 130


if __name__ == "__main__":
    sys.exit(main())
