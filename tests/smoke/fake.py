"""A server that answers as the real one does, at once and without an engine, with the fault that it is told to have."""

import contextlib
import json
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BASE, START, CAPACITY, CHUNK, BLOCK_BYTES = 2, 64, 128, 2, 1 << 20
MODEL = "fake"
PAGES = {  # of a server, or of what stands before it
    "a page of HTML": (200, "<html>\n<body>\x1b Welcome </body>\n</html>"),
    "500 to everything": (500, "<html>\n<body> Internal\x00Server\nError </body>\n</html>"),
}


class FakeServer:
    """`fault` names what goes wrong; None: nothing does."""

    def __init__(self, fault: str | None = None, ranks: int = 1, driver: str = "host", key: str | None = None):
        self.fault, self.ranks, self.driver, self.key = fault, ranks, driver, key
        self.resident = START
        self.gone = False
        self.resizes: list[tuple[str, str]] = []  # direction and outcome
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def running(self):
        """Its address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": self}))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def state(self) -> dict:
        lost = int(self.fault == "a block is lost")
        nbytes = self.resident * BLOCK_BYTES
        reported = START * BLOCK_BYTES if self.fault == "the memory stays" else nbytes
        ranks = [
            {"rank": rank, "resident_bytes": nbytes, "reported_bytes": reported, "handles": 1}
            for rank in range(self.ranks)
        ]
        if self.fault == "a rank did not follow":
            ranks[-1]["resident_bytes"] = ranks[-1]["reported_bytes"] = START * BLOCK_BYTES
        return {
            "policy": "on-demand" if self.fault == "another policy" else "static",
            "driver": self.driver,
            "block_size": 16,
            "chunk_blocks": CHUNK,
            "blocks": {
                **{"base": BASE, "resident": self.resident, "capacity": CAPACITY, "allowed": self.resident},
                **{"used": 0, "cached": 0, "free": self.resident - 1 - lost},
            },
            "bytes": {"per_block": BLOCK_BYTES, "resident": nbytes, "reported": reported},
            "ranks": ranks,
            "transactions": {"done": len(self.resizes), "partial": 0, "refused": 0, "failed": 0},
        }

    def metrics(self) -> str:
        state = self.state()
        values = {
            "resident_blocks": START if self.fault == "a gauge is stale" else self.resident,
            "capacity_blocks": CAPACITY,
            "base_blocks": BASE,
            "resident_bytes": state["bytes"]["resident"],
        }
        if self.fault == "a gauge is missing":
            del values["base_blocks"]
        lines = [f'vllm:elastic_kv_{name}{{engine="0"}} {value:.1f}' for name, value in values.items()]
        for direction in ("grow", "shrink"):
            count = 0 if self.fault == "resizes are not counted" else self.resizes.count((direction, "done"))
            name = "vllm:elastic_kv_resizes_total"
            lines.append(f'{name}{{direction="{direction}",engine="0",outcome="done"}} {count:.1f}')
        return "\n".join(lines) + "\n"

    def resize(self, body: dict) -> tuple[int, dict]:
        blocks = body["blocks"]
        if self.fault == "no admin API":
            return 404, {"detail": "Not Found"}
        if self.fault == "a resize fails":
            return 500, {"error": {"message": "a rank is gone"}}
        if not BASE <= blocks <= CAPACITY and self.fault != "takes any size":
            return 400, {"error": {"message": "outside base and capacity"}}
        with self.lock:
            before = self.resident
            if self.fault != "a resize does nothing":
                self.resident = blocks
            self.resizes.append(("grow" if blocks > before else "shrink", "done"))
        outcome = "partial" if self.fault == "a resize stops half-way" else "done"
        return 200, {"outcome": outcome, "from": before, "to": blocks, "duration_ms": 1.0, "reason": "too little"}

    def tokens(self, prompt: str, count: int) -> list[int]:
        found = [zlib.crc32(f"{prompt} {place}".encode()) % 1000 for place in range(count)]
        if self.fault == "another token after a shrink" and self.resident < START:
            found[-1] += 1
        if self.fault == "another token after a growth" and self.resizes and self.resident == START:
            found[-1] += 1
        if self.fault == "every answer differs":
            found[0] = time.perf_counter_ns()
        return found[:-1] if self.fault == "a token is missing" else found


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer goes out at once, not in parts that wait for each other

    def log_message(self, *_):
        pass

    def answer(self, status: int, body, kind: str = "application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self, path: str) -> bool:
        """Whether the request is dealt with here: by a server that is gone, a page, or for want of the key."""
        fake = self.fake
        if fake.gone or (fake.fault == "dies midway" and path == "/elastic_kv/resize"):
            fake.gone = self.close_connection = True
        elif fake.fault in PAGES and path != "/health":
            self.answer(*PAGES[fake.fault], "text/html")
        elif (
            fake.key
            and path.startswith(("/v1", "/elastic_kv/"))
            and self.headers["Authorization"] != f"Bearer {fake.key}"
        ):
            self.answer(401, {"error": "Unauthorized"})
        else:
            return False
        return True

    def do_GET(self):
        fake = self.fake
        if self.refused(self.path):
            return
        if self.path == "/health":
            if fake.fault == "hangs":
                time.sleep(3)
            self.answer(503 if fake.fault == "unhealthy" else 200, "")
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": MODEL}]})
        elif self.path == "/metrics":
            self.answer(200, fake.metrics(), "text/plain")
        elif fake.fault == "not elastic":
            self.answer(404, {"detail": "Not Found"})
        elif fake.fault == "no JSON":
            self.answer(200, "<html>")
        else:
            self.answer(200, fake.state())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused(self.path):
            return
        if self.path == "/elastic_kv/resize":
            self.answer(*self.fake.resize(body))
        elif body.get("stream"):
            self.stream(body)
        elif self.fake.fault == "an engine that is dead":
            self.answer(500, {"error": {"message": "EngineDeadError"}})
        else:
            choices = []
            for index, prompt in enumerate(body["prompt"]):
                found = self.fake.tokens(prompt, body["max_tokens"])
                best = {"top_logprobs": [{"a": -0.1, "b": -3.0} for _ in found]}
                choices.append(
                    {"index": index, "text": "x", "token_ids": found, "finish_reason": "length", "logprobs": best}
                )
            self.answer(200, {"choices": choices})

    def stream(self, body: dict):
        self.close_connection = True
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        fault, found = self.fake.fault, self.fake.tokens(body["prompt"], body["max_tokens"])
        if fault == "a stream of one piece":
            self.piece(found, "length")
        else:
            for place, token in enumerate(found):
                if place == 3 and fault == "a stream breaks off":
                    return
                if place == 3 and fault == "a stream tells an error":
                    self.wfile.write(b'data: {"error": {"message": "the engine is dead"}}\n\n')
                self.piece([token], "length" if place == len(found) - 1 else None)
        self.wfile.write(b"data: [DONE]\n\n")

    def piece(self, tokens: list[int], reason: str | None):
        choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": reason}
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
