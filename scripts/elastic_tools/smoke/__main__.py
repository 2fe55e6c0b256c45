"""The command line: `scripts/smoke`."""

import argparse
import json
import os
import sys
from pathlib import Path

import httpx
from junitparser import TestSuite

from elastic_tools import model
from elastic_tools.demo import server
from elastic_tools.pins import CACHE
from elastic_tools.smoke.checks import CHECKS, Smoke
from elastic_tools.smoke.client import Client
from elastic_tools.smoke.memory import gpus
from elastic_tools.smoke.run import Ended, add_error, add_skipped, may_be_ended, run, write

FOLDER = CACHE / "smoke"
ELASTIC = {"start": "512MiB", "capacity": "1GiB", "admin_api": True}
OPTIONS = ("--max-model-len", "1024", "--elastic-kv-config", json.dumps(ELASTIC))
PATIENCE = 300.0  # seconds without a byte; a busy CPU needs minutes for a first batch


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="scripts/smoke",
        description="Asks a server with an elastic KV cache for answers and sizes, and reads its memory meanwhile. "
        "Without --url it starts a small one, and with several GPUs a second one over two of them.",
        epilog="Exit status: 0 all checks hold, 1 one does not, or the limit, Ctrl-C or SIGTERM came before the end "
        "(the report is written and a server that was started is ended all the same), 2 wrong options. "
        "Options after -- go to the server that it starts; MODEL names its model, as for make serve.",
    )
    parser.add_argument("--url", help="a server that runs and is idle; VLLM_API_KEY holds its key, if it has one")
    parser.add_argument("--log", type=Path, help="what that server logged: it tells where its cache lies")
    parser.add_argument("--junit", type=Path, default=FOLDER / "junit.xml", help="the report (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="for vllm serve")
    chosen = parser.parse_args(arguments)
    if chosen.url and chosen.options:
        parser.error("a running server takes no options")
    try:
        httpx.URL(chosen.url or "")
    except httpx.InvalidURL as error:
        parser.error(f"--url {chosen.url} is no address: {error}")
    if chosen.log and not chosen.url:
        parser.error("--log belongs to --url")
    if chosen.limit <= 0:
        parser.error("--limit takes seconds above 0")
    try:  # now, and not when all is done
        chosen.junit.parent.mkdir(parents=True, exist_ok=True)
        chosen.junit.open("a").close()
    except OSError as error:
        parser.error(f"--junit {chosen.junit} cannot be written: {error.strerror}")
    return chosen


def say(text: str) -> None:
    """A line for the user."""
    print(f"smoke: {text}", file=sys.stderr, flush=True)


def check(title: str, url: str, log: Path | None, suite: TestSuite) -> None:
    """All checks against one server."""
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as http:
        run(title, CHECKS, Smoke(Client(http, log)), say, suite)


def start_and_check(title: str, options: tuple[str, ...], suite: TestSuite, name: str | None = None) -> None:
    """The same against a server that is started for it. `name` is a model directory, or None for the default."""
    log = FOLDER / f"{title.replace(' ', '-')}.log"
    say(f"starting a server, {title}; its log is {log}")
    try:
        with server.running(options, log, lambda text: None, model=name) as (url, _):
            check(title, url, log, suite)
    except server.ServerError as error:
        add_error(suite, "start", str(error), say)


def everything(chosen: argparse.Namespace, suites: list[TestSuite]) -> None:
    """Adds to the suite of the first server, and one for a second, when it is begun."""
    if chosen.url:
        check("running server", chosen.url.rstrip("/"), chosen.log, suites[-1])
        return
    start_and_check("one server", (*OPTIONS, *chosen.options), suites[-1])
    suites.append(TestSuite("tensor parallel"))
    if gpus() < 2:
        add_skipped(suites[-1], "tensor parallelism", f"{gpus()} GPUs", say)
        return
    padded = None if os.environ.get("MODEL") else str(model.padded_heads(CACHE / "models" / "smollm2-12-heads"))
    options = (*OPTIONS, "--tensor-parallel-size", "2", *chosen.options)
    start_and_check("tensor parallel", options, suites[-1], padded)


def main(arguments: list[str]) -> int:
    """Runs it. The exit status is 0 if everything holds."""
    chosen = parse(arguments)
    suites = [TestSuite("one server")]
    try:
        with may_be_ended(chosen.limit):
            everything(chosen, suites)
    except Ended as why:
        add_error(suites[-1], "end", str(why), say)
    holds = write(suites, chosen.junit)
    say(f"{'everything holds' if holds else 'FAILED'}; wrote {chosen.junit}")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
