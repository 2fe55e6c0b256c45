"""One streaming request. A wait that takes too long is a failure with a name, never a hang."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from elastic_tools.storm.plan import Ask

Outcome = Literal["done", "aborted", "failed"]


class BadAnswerError(Exception):
    """The server answered, and not as it should."""


@dataclass
class Record:
    """What became of a request."""

    ask: Ask
    begin: float
    outcome: Outcome = "failed"
    why: str | None = None
    tokens: list[list[int]] = field(default_factory=list)  # of each choice
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between the pieces of one choice

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


def session(url: str, key: str | None = None) -> aiohttp.ClientSession:
    """A client for a server.

    A connection for each request: the server closes those that idle, and a request that meets such a one would
    fail for no fault of the engine.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def ask(
    http: aiohttp.ClientSession,
    model: str,
    wanted: Ask,
    patience_s: float,
    on_gap: Callable[[float], None] = lambda gap: None,
) -> Record:
    """Sends a request and reads its answer to the end, or as far as the client wants it.

    Args:
        http: Knows the server and its key.
        model: Its name there.
        wanted: The request.
        patience_s: How long there may be no token.
        on_gap: Told of each gap between two tokens when it ends, in seconds.

    """
    record = Record(wanted, time.monotonic(), tokens=[[] for _ in range(wanted.choices)])
    limit = aiohttp.ClientTimeout(total=None, sock_connect=patience_s, sock_read=patience_s)
    try:
        async with http.post("/v1/completions", json=wanted.body(model), timeout=limit) as reply:
            if reply.status != 200:
                raise BadAnswerError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            await _read(reply, record, on_gap)
    except aiohttp.SocketTimeoutError:
        record.why = f"no token for {patience_s:.0f} s, after {record.count}"
    except (aiohttp.ClientError, BadAnswerError, ValueError, OSError) as error:
        record.why = f"{type(error).__name__} after {record.count} tokens: {error}"
    return record


async def _read(reply: aiohttp.ClientResponse, record: Record, on_gap: Callable[[float], None]) -> None:
    wanted = record.ask
    last: dict[int, float] = {}
    reasons: dict[int, str] = {}
    ended = False
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            ended = True
            break
        for choice in _choices(data):
            index, tokens = choice["index"], choice["token_ids"] or []
            reasons |= {index: choice["finish_reason"]} if choice["finish_reason"] else {}
            if not tokens:
                continue
            now = time.monotonic()
            if record.first_token_s is None:
                record.first_token_s = now - record.begin
            if index in last:
                record.gaps_s.append(now - last[index])
                on_gap(now - last[index])
            last[index] = now
            record.tokens[index] += tokens
        if wanted.abort_after is not None and record.count >= wanted.abort_after:
            reply.close()  # hangs up: the server sees a client that is gone
            record.outcome = "aborted"
            return
    _check_complete(record, reasons, ended)
    record.outcome = "done"


def _choices(data: bytes) -> list[dict[str, Any]]:
    piece: dict[str, Any] = json.loads(data)
    if "choices" not in piece:  # an error that came after the first piece
        raise BadAnswerError(f"the stream says {data.decode(errors='replace')[:300]}")
    choices: list[dict[str, Any]] = piece["choices"]
    return choices


def _check_complete(record: Record, reasons: dict[int, str], ended: bool) -> None:
    lengths = [len(tokens) for tokens in record.tokens]
    if not ended:
        raise BadAnswerError(f"the stream broke off, with {lengths} of {record.ask.tokens} tokens")
    if lengths != [record.ask.tokens] * record.ask.choices:
        raise BadAnswerError(f"{lengths} tokens came where {record.ask.tokens} were asked for")
    if set(reasons.values()) != {"length"} or len(reasons) != record.ask.choices:
        raise BadAnswerError(f"it ended with {reasons}")
