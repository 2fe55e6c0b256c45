"""The command line: `scripts/storm`."""

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

from elastic_tools.demo import server
from elastic_tools.pins import CACHE
from elastic_tools.storm import report
from elastic_tools.storm.plan import Settings
from elastic_tools.storm.run import StormError, Target, storm
from elastic_tools.storm.verdict import judge

LOG = CACHE / "storm" / "server.log"
REPORT = CACHE / "storm" / "report.json"
# The base holds one request of the greatest length, so that something always runs. The capacity costs addresses alone,
# and is more than the storm asks for: the larger it is, the more blocks a chunk has on the host, and the more of the
# chunks that have to go hold blocks that have to move.
ELASTIC = {"base": "64MiB", "start": "192MiB", "capacity": "8GiB", "admin_api": True}
MOST_MIB = 512
OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="scripts/storm",
        description="Streaming clients and a resize four times a second, against a server that nobody else uses. "
        "Fails if a request fails, a greedy token differs from those at a fixed size, or memory does not come back.",
        epilog="Options after -- go to the server that it starts; MODEL names its model, as for make serve.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="how long it blows (default: %(default)s); longer while something is missing that it must have had",
    )
    parser.add_argument("--clients", type=int, default=32, help="requests at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice (default: %(default)s)")
    parser.add_argument(
        "--most-mib",
        type=int,
        help=f"the largest size to ask for (default: {MOST_MIB} for a server that it starts; else the capacity)",
    )
    parser.add_argument("--no-request-seeds", action="store_true", help="send no request with a seed of its own")
    parser.add_argument("--must-move", action="store_true", help="fail if no block was moved")
    parser.add_argument("--must-preempt", action="store_true", help="fail if no request was preempted")
    parser.add_argument("--url", help="use the server at this address; VLLM_API_KEY holds its key, if it has one")
    parser.add_argument("--log", type=Path, help="what that server logged: it tells where its cache lies")
    parser.add_argument("--output", type=Path, default=REPORT, help="the report (default: %(default)s)")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="for vllm serve")
    chosen = parser.parse_args(arguments)
    if chosen.seconds < 5 or chosen.clients < 1:
        parser.error("at least 5 seconds and 1 client are needed")
    if chosen.url and chosen.options:
        parser.error("a running server takes no options")
    if chosen.most_mib is None and not chosen.url:
        chosen.most_mib = MOST_MIB
    return chosen


@contextlib.contextmanager
def target(chosen: argparse.Namespace) -> Iterator[tuple[Target, str]]:
    """The server, and its description."""
    key = os.environ.get("VLLM_API_KEY")
    if chosen.url is not None:
        url = chosen.url.rstrip("/")
        yield Target(url, key, server.listener(url), chosen.log), "a running server"
        return
    options = [*OPTIONS, *chosen.options]
    if "--elastic-kv-config" not in options:
        options += ["--elastic-kv-config", json.dumps(ELASTIC)]
    say(f"starting a server; its log is {LOG}")
    with server.running(options, LOG, lambda text: None) as (url, pid):
        yield Target(url, key, pid, LOG), shlex.join(options)


def say(text: str) -> None:
    """A line for the user."""
    print(f"storm: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs it. The exit status is 0 if everything holds."""
    chosen = parse(sys.argv[1:])
    settings = Settings(
        seconds=chosen.seconds,
        clients=chosen.clients,
        seed=chosen.seed,
        most_bytes=None if chosen.most_mib is None else chosen.most_mib << 20,
        request_seeds=not chosen.no_request_seeds,
        must_move=chosen.must_move,
        must_preempt=chosen.must_preempt,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through every `finally`
    try:
        with target(chosen) as (where, described):
            seen = asyncio.run(storm(where, settings))
    except (server.ServerError, StormError) as error:
        say(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    verdict = judge(seen)
    command = shlex.join(["scripts/storm", *sys.argv[1:]])
    report.write(chosen.output, report.as_json(seen, verdict, described, command))
    report.show(seen, verdict)
    say(f"wrote {chosen.output}")
    say("everything holds" if verdict.holds else "FAILED")
    return int(not verdict.holds)


if __name__ == "__main__":
    sys.exit(main())
