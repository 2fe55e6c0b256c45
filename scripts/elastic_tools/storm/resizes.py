"""Asks for sizes at a steady rate, whether or not the last answer has come, and checks every answer."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from elastic_tools.storm.plan import Settings, Sizes, resizes

ANSWER_LIMIT = 120.0  # seconds; the server gives up a resize after 60
FIELDS = {"outcome", "from", "to", "evicted", "moved", "preempted", "duration_ms", "pause_ms", "reason"}


@dataclass(frozen=True)
class Resize:
    """A resize, and what was wrong with the answer, if anything was."""

    at: float
    body: dict[str, Any]
    status: int
    answer: dict[str, Any]
    wrong: str | None = None


@dataclass
class Resizer:
    """Resizes until it is cancelled; `asked` is then `len(answered)`, or an answer is missing."""

    http: aiohttp.ClientSession
    settings: Settings
    sizes: Sizes
    asked: int = 0
    left_out: int = 0  # turns at which too many answers were missing
    answered: list[Resize] = field(default_factory=list)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def run(self, go_on: Callable[[], bool]) -> None:
        """Asks while `go_on`, then waits for the answers."""
        bodies = resizes(self.settings, self.sizes)
        turn = time.monotonic()
        while go_on():
            self._turn(bodies)
            turn += self.settings.resize_every_s
            await asyncio.sleep(max(0.0, turn - time.monotonic()))
        if self._tasks:
            await asyncio.wait(self._tasks)  # each has its own limit

    async def cancel(self) -> None:
        """Gives up what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _turn(self, bodies: Iterator[tuple[int, dict[str, Any]]]) -> None:
        if len(self._tasks) >= self.settings.resizes_at_once:
            self.left_out += 1
            return
        wanted, body = next(bodies)
        self.asked += 1
        task = asyncio.create_task(self._ask(wanted, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, wanted: int, body: dict[str, Any]) -> None:
        self.answered.append(await resize(self.http, self.sizes, body, wanted))


async def resize(http: aiohttp.ClientSession, sizes: Sizes, body: dict[str, Any], wanted: int) -> Resize:
    """Asks for one size and checks the answer."""
    at = time.monotonic()
    try:
        limit = aiohttp.ClientTimeout(total=ANSWER_LIMIT)
        async with http.post("/elastic_kv/resize", json=body, timeout=limit) as reply:
            answer, status = await reply.json(content_type=None), reply.status
    except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
        return Resize(at, body, 0, {}, f"no answer to {body}: {type(error).__name__}: {error}")
    wrong = check(sizes, body, wanted, status, answer)
    return Resize(at, body, status, answer, wrong and f"{wrong}: {body} was answered with HTTP {status}: {answer}")


def check(sizes: Sizes, body: dict[str, Any], wanted: int, status: int, answer: dict[str, Any]) -> str | None:
    """What is wrong with an answer.

    Args:
        sizes: What the server can have.
        body: What was asked.
        wanted: The blocks that it should come to.
        status: Of HTTP.
        answer: The body of the answer.

    """
    outcomes = {200: ("done", "partial"), 409: ("refused",)}
    if answer.get("outcome") not in outcomes.get(status, ()):
        return "no such answer is foreseen"
    if missing := FIELDS - set(answer):
        return f"fields are missing, {sorted(missing)}"
    before, after = answer["from"], answer["to"]
    if not all(sizes.base <= blocks <= sizes.capacity for blocks in (before, after)):
        return "a size outside base and capacity"
    if answer["outcome"] == "done" and after != wanted:
        return f"done, and not {wanted} blocks"
    if answer["outcome"] == "refused" and after != before:
        return "refused, and another size"
    if answer["outcome"] == "partial" and not abs(wanted - after) < abs(wanted - before):
        return "partial, and no nearer"
    if (answer["outcome"] == "done") != (answer["reason"] is None):
        return "a reason where all was done, or none where it was not"
    if body.get("allow_preemption") is False and answer["preempted"]:
        return "requests were preempted where that was forbidden"
    return None
