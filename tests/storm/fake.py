"""A server that answers as the real one does, at once and without an engine, with the fault that it is told to have."""

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator

from aiohttp import web

BASE, START, CAPACITY, CHUNK = 4, 40, 100, 2
LATE = 30  # resizes
EVERY = 9  # of so many requests, one has the fault: the others are as they should be


class FakeServer:
    """`fault` names what goes wrong; None: nothing does."""

    def __init__(self, fault: str | None = None, block_bytes: int = 10):
        self.fault, self.block_bytes = fault, block_bytes
        self.storming = False  # from the first resize that is not the way down and back before the storm
        self.resident = START
        self.resizes = 0
        self.requests = 0

    def has(self, fault: str) -> bool:
        return self.storming and self.fault == fault

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/version", self.version),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.complete),
                web.get("/elastic_kv", self.state),
                web.post("/elastic_kv/resize", self.resize),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.has("unhealthy") else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        if self.has("gone in the end") and request.transport:
            request.transport.close()
        count = 1.0 if self.has("a request stays in the engine") else 0.0
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {count}\n')

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1"})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 1024}]})

    async def state(self, _: web.Request) -> web.Response:
        lost = 1 if self.has("a block is lost") else 0
        short = 1 if self.has("a rank has fewer bytes") else 0
        rank = {
            "rank": 0,
            "resident_bytes": self.resident * self.block_bytes,
            "reported_bytes": self.resident * self.block_bytes - short,
        }
        return web.json_response(
            {
                "block_size": 32,
                "chunk_blocks": CHUNK,
                "blocks": {
                    **{"base": BASE, "resident": self.resident, "capacity": CAPACITY},
                    **{"used": 0, "cached": 0, "free": self.resident - 1 - lost},
                },
                "bytes": {"per_block": self.block_bytes, "resident": self.resident * self.block_bytes},
                "ranks": [rank],
            }
        )

    async def resize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.resizes += 1
        self.storming = self.storming or self.resizes > 2
        wanted = int(body.get("blocks") or body.get("bytes", 0) // self.block_bytes or body.get("tokens", 0) // 32)
        wanted = wanted or int(body["fraction"] * CAPACITY)
        before, self.resident = self.resident, max(BASE, wanted // CHUNK * CHUNK)
        forced = self.has("preempts where it may not") and body.get("allow_preemption") is False
        late = self.has("preempts late") and self.resizes > LATE
        answer = {
            **{"outcome": "done", "from": before, "to": self.resident, "evicted": 0, "moved": 0},
            **{"preempted": int(forced or late), "duration_ms": 1.0, "pause_ms": 0.5, "reason": None},
        }
        if self.has("another size than asked"):
            answer["to"] = CAPACITY if answer["to"] != CAPACITY else BASE
        if self.has("a resize fails"):
            return web.json_response({"error": {"message": "a rank is gone"}}, status=500)
        return web.json_response(answer)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens = [
            [zlib.crc32(f"{body['prompt']} {place}".encode()) % 1000 + copy for place in range(body["max_tokens"])]
            for copy in range(body.get("n", 1))
        ]
        if not body.get("stream"):
            chances = {"top_logprobs": [{"a": -0.1, "b": -3.0} for _ in tokens[0]]}
            return web.json_response({"choices": [{"token_ids": tokens[0], "logprobs": chances}]})
        self.requests += 1
        now = self.requests % EVERY == 0
        if now and self.has("a request is refused"):
            return web.json_response({"error": {"message": "the engine is dead"}}, status=500)
        if self.has("a token differs") and body["temperature"] == 0:
            tokens[0][-1] += 1
        if now and self.has("a token is missing"):
            tokens[0].pop()
        reply = web.StreamResponse()
        await reply.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client left
            await self._stream(reply, tokens, now)
        return reply

    async def _stream(self, reply: web.StreamResponse, tokens: list[list[int]], now: bool) -> None:
        for place in range(len(tokens[-1])):
            await asyncio.sleep(0.0005)
            if now and place == 2 and self.has("the stream stops"):
                await asyncio.sleep(3)
                return
            if now and place == 2 and self.has("the stream breaks off"):
                return
            if now and place == 2 and self.has("the stream tells an error"):
                await reply.write(b'data: {"error": {"message": "the engine is dead"}}\n\n')
                return
            for index, choice in enumerate(tokens):
                last = place == len(tokens[-1]) - 1
                piece = {"index": index, "token_ids": choice[place : place + 1]}
                data = json.dumps({"choices": [piece | {"finish_reason": "length" if last else None}]})
                await reply.write(f"data: {data}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
